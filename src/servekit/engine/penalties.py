"""Everything that moves single logits before a token is chosen: penalties, bias, and stops that min_tokens forbids.

Only the tokens concerned are touched, found from the sequences' own token lists, so no counter of the vocabulary's size
is kept for each slot and a resumed sequence needs no restoring.
"""

from collections.abc import Sequence as Seq

import numpy as np
import torch

from servekit.engine.core.request import SamplingParams
from servekit.engine.core.sequence import Sequence

FORBIDDEN = float("-inf")


def needs_adjustment(params: SamplingParams) -> bool:
    """Whether any of a request's parameters moves logits."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.min_tokens
    )


def adjust_logits(logits: torch.Tensor, seqs: Seq[Sequence], eos_token_ids: frozenset[int]) -> torch.Tensor:
    """A copy of `logits` [S, vocab] with every sequence's penalties, bias and forbidden stops applied."""
    out = logits.clone()
    for row, seq in enumerate(seqs):
        params = seq.request.sampling
        if not needs_adjustment(params):
            continue
        if params.repetition_penalty != 1.0:
            seen = _ids(np.unique(seq.token_ids), logits)
            values = out[row, seen]
            penalty = params.repetition_penalty
            out[row, seen] = torch.where(values > 0, values / penalty, values * penalty)
        generated = seq.token_ids[seq.num_prompt_tokens :]
        if generated and (params.presence_penalty or params.frequency_penalty):
            ids, counts = np.unique(generated, return_counts=True)
            lost = params.presence_penalty + params.frequency_penalty * torch.from_numpy(counts).to(out)
            out[row, _ids(ids, logits)] -= lost
        if params.logit_bias:
            ids_, biases = zip(*params.logit_bias.items(), strict=True)
            out[row, _ids(np.array(ids_), logits)] += torch.tensor(biases, dtype=out.dtype, device=out.device)
        if seq.num_output_tokens < params.min_tokens:
            stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids
            if stops:
                out[row, _ids(np.array(sorted(stops)), logits)] = FORBIDDEN
    return out


def _ids(values: "np.ndarray[tuple[int, ...], np.dtype[np.int64]]", like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int64)).to(like.device)
