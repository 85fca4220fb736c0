"""Logits -> token ids, for the whole batch at once. It keeps no state: what a step needs is in the sequences.

Random numbers are a function of (seed, index of the token), so a choice depends neither on its neighbours in the batch
nor on having been preempted in between. A batch in which nobody asks for more than the most likely token is one argmax.
"""

from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch

from servekit.engine.core.request import SampledToken, SamplingParams, TokenLogprob
from servekit.engine.core.sequence import Sequence
from servekit.engine.grammar import Grammars
from servekit.engine.penalties import FORBIDDEN, adjust_logits, needs_adjustment

_FIRST_CANDIDATES = 256
"""How many of the most likely tokens top_p looks at first: nearly always enough, and far cheaper than a sort."""


class Sampler:
    """Chooses one token for each of S sequences. `eos_token_ids` is what `min_tokens` keeps from being chosen.

    `grammars` says what may follow in a sequence that has a grammar; the others share its step untouched.
    """

    def __init__(self, eos_token_ids: frozenset[int], grammars: Grammars | None = None) -> None:
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars

    def sample(self, logits: torch.Tensor, seqs: Seq[Sequence]) -> list[SampledToken]:
        """`logits` [S, vocab] float32, one row for each of `seqs`."""
        params = [seq.request.sampling for seq in seqs]
        adjusted = logits
        if any(needs_adjustment(p) for p in params):
            adjusted = adjust_logits(logits, seqs, self._eos_token_ids)
        rows = [row for row, p in enumerate(params) if p.grammar is not None]
        if rows:
            assert self._grammars is not None, "a grammar was admitted where none can be followed"
            allowed = torch.from_numpy(self._grammars.allowed([seqs[row] for row in rows])).to(logits.device)
            adjusted = adjusted.clone() if adjusted is logits else adjusted
            adjusted[rows] = adjusted[rows].masked_fill(~allowed, FORBIDDEN)
        if all(p.is_greedy for p in params):
            token_ids = adjusted.argmax(dim=-1)
        else:
            token_ids = _draw(adjusted, params, uniforms(seqs).to(logits.device))
        chosen: list[int] = token_ids.tolist()
        if all(p.logprobs is None for p in params):
            return [SampledToken(token_id) for token_id in chosen]
        return _with_logprobs(logits, params, chosen)


def uniforms(seqs: Seq[Sequence]) -> torch.Tensor:
    """One number in [0, 1) for each sequence [S, 1], float64, from its seed and the index of the token to be drawn."""
    seeds = np.array([(seq.request.sampling.seed or 0) % 2**64 for seq in seqs], dtype=np.uint64)
    index = np.array([seq.num_output_tokens for seq in seqs], dtype=np.uint64)
    mixed = _mix(_mix(seeds) + index)
    return torch.from_numpy((mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53).unsqueeze(1)


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's step and finaliser (Steele, Lea and Flood 2014): a counter in, well-mixed bits out."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def _draw(logits: torch.Tensor, params: list[SamplingParams], uniform: torch.Tensor) -> torch.Tensor:
    """Token ids [S]: temperature, then top_k, top_p and min_p together on the tempered probabilities."""
    device = logits.device

    def column(values: list[float]) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.float32, device=device).unsqueeze(1)

    # A greedy row in a mixed batch keeps its own argmax; any positive temperature does for what it throws away.
    temperature = column([p.temperature or 1.0 for p in params])
    # Shifted before dividing: a tiny temperature must not overflow to inf - inf.
    probs = ((logits - logits.max(dim=-1, keepdim=True).values) / temperature).softmax(dim=-1)
    threshold = torch.zeros_like(temperature)
    if any(p.top_k > 0 or p.top_p < 1.0 for p in params):
        threshold = _nucleus_threshold(probs, params)
    if any(p.min_p > 0.0 for p in params):
        threshold = threshold.maximum(column([p.min_p for p in params]) * probs.max(dim=-1, keepdim=True).values)
    kept = probs.masked_fill(probs < threshold, 0.0).double()
    cumulative = kept.cumsum(dim=-1)
    target = uniform * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # u * total can round up to total itself; the last token that has any mass is then the one meant.
    last = kept.shape[-1] - 1 - (kept.flip(-1) > 0).to(torch.uint8).argmax(dim=-1)
    drawn = torch.minimum(drawn, last)
    greedy = [p.is_greedy for p in params]
    return torch.where(torch.tensor(greedy, device=device), logits.argmax(dim=-1), drawn) if any(greedy) else drawn


def _nucleus_threshold(probs: torch.Tensor, params: list[SamplingParams]) -> torch.Tensor:
    """The probability [S, 1] that a token needs to survive top_k and top_p. Equal probabilities survive together."""
    vocab = probs.shape[-1]
    top_k = torch.tensor([min(p.top_k or vocab, vocab) for p in params], device=probs.device).unsqueeze(1)
    top_p = torch.tensor([p.top_p for p in params], dtype=torch.float32, device=probs.device).unsqueeze(1)
    largest_k = max(min(p.top_k, vocab) for p in params)
    num = min(vocab, max(_FIRST_CANDIDATES, largest_k))
    while True:
        best = probs.topk(num, dim=-1).values  # [S, num], descending
        before = best.cumsum(dim=-1) - best
        rank = torch.arange(num, device=probs.device)
        # OpenAI's nucleus: the fewest tokens whose mass reaches top_p, of the mass that top_k leaves.
        mass = torch.where(top_k < vocab, (best * (rank < top_k)).sum(dim=-1, keepdim=True), 1.0)
        inside = (rank < top_k) & ((before < top_p * mass) | (top_p >= 1.0))
        ended = ~inside[:, -1:] | (top_k <= num) | (top_p >= 1.0)
        if num == vocab or bool(ended.all()):
            break
        num = min(vocab, 8 * num)
    lowest = best.masked_fill(~inside, float("inf")).min(dim=-1, keepdim=True).values
    unlimited = (top_k >= vocab) & (top_p >= 1.0)
    return torch.where(unlimited, 0.0, lowest)


def _with_logprobs(logits: torch.Tensor, params: list[SamplingParams], chosen: list[int]) -> list[SampledToken]:
    """Log-probabilities of the model itself: before temperature, penalties and bias."""
    logprobs = logits.log_softmax(dim=-1)
    picked = logprobs.gather(1, torch.tensor(chosen, device=logits.device).unsqueeze(1)).squeeze(1).tolist()
    num_top = max(p.logprobs or 0 for p in params)
    values, ids = logprobs.topk(min(num_top, logits.shape[-1]), dim=-1)
    top_values, top_ids = values.tolist(), ids.tolist()
    tokens = []
    for row, (token_id, p) in enumerate(zip(chosen, params, strict=True)):
        if p.logprobs is None:
            tokens.append(SampledToken(token_id))
            continue
        top = tuple(zip(top_ids[row][: p.logprobs], top_values[row][: p.logprobs], strict=True))
        tokens.append(SampledToken(token_id, TokenLogprob(token_id, picked[row], top)))
    return tokens
