"""Applies a batch's Adjustments to logits on a device. A token that only the device knows yet is counted there."""

from collections.abc import Iterator

import torch

from servekit.engine.adjustments import FORBIDDEN


def adjust_logits(logits: torch.Tensor, tensors: Iterator[torch.Tensor], pending: torch.Tensor | None) -> torch.Tensor:
    """A copy of `logits` [S, vocab] with everything applied. `tensors` are Adjustments.arrays on the device.

    `pending` [S] are the last tokens that the host does not know yet, -1 for none.
    """
    penalties, seen, counts, biased, biases, forbidden = (next(tensors) for _ in range(6))
    out = logits.clone()
    rows, ids = seen
    if seen.shape[1]:
        is_pending = None
        if pending is not None:
            is_pending = ids == pending[rows]
            counts = counts + is_pending
        out[rows, ids] = _penalised(out[rows, ids], counts, penalties[rows])
        if pending is not None and is_pending is not None:
            _penalise_new(logits, out, pending, rows[:, None], is_pending, penalties)
    if biased.shape[1]:
        out[biased[0], biased[1]] += biases
    if forbidden.shape[1]:
        out[forbidden[0], forbidden[1]] = torch.full_like(forbidden[0], FORBIDDEN, dtype=out.dtype)
    return out


def _penalise_new(
    logits: torch.Tensor,
    out: torch.Tensor,
    pending: torch.Tensor,
    rows: torch.Tensor,
    is_pending: torch.Tensor,
    penalties: torch.Tensor,
) -> None:
    """Penalise each row's pending token that its sequence has had nowhere before."""
    all_rows = torch.arange(len(pending), device=pending.device)
    is_known = torch.zeros_like(pending).scatter_add_(0, rows.flatten(), is_pending.to(pending.dtype)) > 0
    ids = pending.clamp(min=0)
    moved = _penalised(logits[all_rows, ids], torch.ones_like(logits[:, 0]), penalties)
    out[all_rows, ids] = torch.where((pending >= 0) & ~is_known, moved, out[all_rows, ids])


def _penalised(values: torch.Tensor, counts: torch.Tensor, penalties: torch.Tensor) -> torch.Tensor:
    """`values` [N] with the `penalties` [N, 3] of their rows, for tokens that the answer has `counts` [N] times."""
    presence, frequency, repetition = penalties.unbind(1)
    values = torch.where(values > 0, values / repetition, values * repetition)
    return values - (presence * (counts > 0) + frequency * counts)
