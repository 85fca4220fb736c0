"""What moves single logits before a token is chosen, gathered on the host: penalties, bias, stops before min_tokens.

Only the tokens concerned are touched, found from the sequences' own token lists, so no counter of the vocabulary's size
is kept for each slot and a resumed sequence needs no restoring. They are pairs of a row and a token id.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from servekit.engine.core.request import SamplingParams
from servekit.engine.core.sequence import Sequence

FORBIDDEN = float("-inf")

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


def needs_adjustment(params: SamplingParams) -> bool:
    """Whether any of a request's parameters moves logits."""
    return bool(
        params.presence_penalty
        or params.frequency_penalty
        or params.repetition_penalty != 1.0
        or params.logit_bias
        or params.min_tokens
    )


def _is_penalised(params: SamplingParams) -> bool:
    return bool(params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1.0)


@dataclass(frozen=True, slots=True)
class Adjustments:
    """What moves in a batch of S rows: N pairs that are penalised, B that are biased, F that are forbidden.

    Presence, frequency and repetition are those of each row; `counts` how often the answer has the token by now.
    """

    penalties: FloatArray  # [S, 3]
    seen: IntArray  # [2, N] row and token id
    counts: FloatArray  # [N]
    biased: IntArray  # [2, B]
    biases: FloatArray  # [B]
    forbidden: IntArray  # [2, F]

    def arrays(self) -> list[npt.NDArray[Any]]:
        """In the order in which `adjust_logits` takes them back as tensors."""
        return [self.penalties, self.seen, self.counts, self.biased, self.biases, self.forbidden]


def gather_adjustments(seqs: Seq[Sequence], num_outputs: Seq[int], eos_token_ids: frozenset[int]) -> Adjustments:
    """For `seqs`, the token to be chosen being number `num_outputs` of each answer, counted from 0."""
    penalties = np.zeros((len(seqs), 3), dtype=np.float32)
    seen: list[IntArray] = []
    counts: list[npt.NDArray[Any]] = []
    biased: list[tuple[int, int]] = []
    biases: list[float] = []
    forbidden: list[tuple[int, int]] = []
    for row, (seq, num_output) in enumerate(zip(seqs, num_outputs, strict=True)):
        params = seq.request.sampling
        penalties[row] = params.presence_penalty, params.frequency_penalty, params.repetition_penalty
        if _is_penalised(params):
            ids, firsts = np.unique(np.array(seq.token_ids, dtype=np.int64), return_inverse=True)
            seen.append(np.stack((np.full(len(ids), row, dtype=np.int64), ids)))
            counts.append(np.bincount(firsts[seq.num_prompt_tokens :], minlength=len(ids)))
        biased += [(row, token_id) for token_id in params.logit_bias]
        biases += params.logit_bias.values()
        if num_output < params.min_tokens:
            stops = params.stop_token_ids if params.ignore_eos else params.stop_token_ids | eos_token_ids
            forbidden += [(row, token_id) for token_id in sorted(stops)]
    return Adjustments(
        penalties=penalties,
        seen=np.concatenate(seen, axis=1) if seen else np.zeros((2, 0), dtype=np.int64),
        counts=np.concatenate(counts).astype(np.float32) if counts else np.zeros(0, dtype=np.float32),
        biased=np.array(biased, dtype=np.int64).reshape(-1, 2).T,
        biases=np.array(biases, dtype=np.float32),
        forbidden=np.array(forbidden, dtype=np.int64).reshape(-1, 2).T,
    )
