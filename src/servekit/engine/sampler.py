"""Logits -> token ids, for the whole batch at once. It keeps no state: what a step needs is in its plan.

A batch in which nobody asks for more than the most likely token is one argmax. Nothing here reads a value of a tensor
where that would wait for the device: what was chosen is read when the step is, by `read`.
"""

from collections.abc import Iterator
from collections.abc import Sequence as Seq

import torch

from servekit.engine.adjustments import FORBIDDEN
from servekit.engine.core.request import SampledToken, TokenLogprob
from servekit.engine.penalties import adjust_logits
from servekit.engine.sampling_plan import SamplingPlan

_FIRST_CANDIDATES = 256
"""How many of the most likely tokens top_p looks at first: nearly always enough, and far cheaper than a sort."""


def choose(
    logits: torch.Tensor,
    plan: SamplingPlan,
    tensors: Iterator[torch.Tensor],
    *,
    pending: torch.Tensor | None = None,
    allowed: tuple[torch.Tensor, torch.Tensor] | None = None,
    may_wait: bool = True,
) -> torch.Tensor:
    """Token ids [S] for `logits` [S, vocab] float32. `tensors` are the plan's arrays on the device.

    `pending` [S] are the sequences' last tokens where the host does not know them yet, else -1; `allowed` the rows of
    those with a grammar and which tokens it lets follow. `may_wait`: reading a value of the device costs nothing.
    """
    adjusted = logits
    if plan.adjustments is not None:
        adjusted = adjust_logits(logits, tensors, pending)
    if allowed is not None:
        rows, mask = allowed
        adjusted = adjusted.clone() if adjusted is logits else adjusted
        adjusted[rows] = adjusted[rows].masked_fill(~mask, FORBIDDEN)
    if plan.random is None:
        return adjusted.argmax(dim=-1)
    return _draw(adjusted, plan, next(tensors), may_wait=may_wait)


def log_probabilities(
    logits: torch.Tensor, plan: SamplingPlan, token_ids: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Those of the model itself, before temperature, penalties and bias: the chosen token's [S], and the best ones'
    values and ids [S, N]."""
    logprobs = logits.log_softmax(dim=-1)
    picked = logprobs.gather(1, token_ids.unsqueeze(1)).squeeze(1)
    values, ids = logprobs.topk(min(plan.num_top, logits.shape[-1]), dim=-1)
    return picked, values, ids


def read(plan: SamplingPlan, tensors: Seq[torch.Tensor]) -> list[SampledToken]:
    """What was chosen, from the host's copies of the token ids and, where asked for, of `log_probabilities`."""
    chosen, *rest = (tensor.tolist() for tensor in tensors)
    if not rest:
        return [SampledToken(token_id) for token_id in chosen]
    picked, values, ids = rest
    tokens = []
    for row, (token_id, draw) in enumerate(zip(chosen, plan.draws, strict=True)):
        num = draw.params.logprobs
        if num is None:
            tokens.append(SampledToken(token_id))
            continue
        top = tuple(zip(ids[row][:num], values[row][:num], strict=True))
        tokens.append(SampledToken(token_id, TokenLogprob(token_id, picked[row], top)))
    return tokens


def _draw(logits: torch.Tensor, plan: SamplingPlan, random: torch.Tensor, *, may_wait: bool) -> torch.Tensor:
    """Token ids [S]: temperature, then top_k, top_p and min_p together on the tempered probabilities."""
    params = [draw.params for draw in plan.draws]
    temperature, top_k, top_p, min_p, uniform, is_greedy = random.unsqueeze(2).unbind(1)  # [S, 1] each
    # Shifted before dividing: a tiny temperature must not overflow to inf - inf.
    shifted = logits - logits.max(dim=-1, keepdim=True).values
    probs = (shifted / temperature.float()).softmax(dim=-1)
    threshold = torch.zeros_like(probs[:, :1])
    if any(p.top_k > 0 or p.top_p < 1.0 for p in params):
        largest_k = max(p.top_k for p in params)
        threshold = _nucleus_threshold(probs, top_k.long(), top_p.float(), largest_k, may_wait=may_wait)
    if any(p.min_p > 0.0 for p in params):
        threshold = threshold.maximum(min_p.float() * probs.max(dim=-1, keepdim=True).values)
    kept = probs.masked_fill(probs < threshold, 0.0).double()
    cumulative = kept.cumsum(dim=-1)
    target = uniform * cumulative[:, -1:]
    drawn = torch.searchsorted(cumulative, target, right=True).squeeze(1)
    # u * total can round up to total itself; the last token that has any mass is then the one meant.
    last = kept.shape[-1] - 1 - (kept.flip(-1) > 0).to(torch.uint8).argmax(dim=-1)
    drawn = torch.minimum(drawn, last)
    if not any(p.is_greedy for p in params):
        return drawn
    return torch.where(is_greedy.squeeze(1) > 0, logits.argmax(dim=-1), drawn)


def _nucleus_threshold(
    probs: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, largest_k: int, *, may_wait: bool
) -> torch.Tensor:
    """The probability [S, 1] that a token needs to survive top_k and top_p. Equal probabilities survive together.

    Where a value can be read without waiting, few candidates are looked at first and more only if they were not
    enough; elsewhere all are sorted, since asking would stall the device for longer.
    """
    vocab = probs.shape[-1]
    top_k = torch.where(top_k > 0, top_k, vocab).clamp(max=vocab)
    num = min(vocab, max(_FIRST_CANDIDATES, largest_k)) if may_wait else vocab
    while True:
        best = probs.topk(num, dim=-1).values if num < vocab else probs.sort(dim=-1, descending=True).values
        before = best.cumsum(dim=-1) - best
        rank = torch.arange(num, device=probs.device)
        # OpenAI's nucleus: the fewest tokens whose mass reaches top_p, of the mass that top_k leaves.
        mass = torch.where(top_k < vocab, (best * (rank < top_k)).sum(dim=-1, keepdim=True), 1.0)
        inside = (rank < top_k) & ((before < top_p * mass) | (top_p >= 1.0))
        if num == vocab:
            break
        ended = ~inside[:, -1:] | (top_k <= num) | (top_p >= 1.0)
        if bool(ended.all()):
            break
        num = min(vocab, 8 * num)
    lowest = best.masked_fill(~inside, float("inf")).min(dim=-1, keepdim=True).values
    unlimited = (top_k >= vocab) & (top_p >= 1.0)
    return torch.where(unlimited, 0.0, lowest)
