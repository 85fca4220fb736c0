"""Attention that plans as a GPU's kernels do: from the batch's tensors alone, whatever the host arrays say."""

from dataclasses import replace

import numpy as np
import torch

from servekit.engine.attention.reference import ReferenceAttention
from servekit.engine.batch import Batch
from servekit.engine.spec.attention import AttentionShape


class CapturableAttention(ReferenceAttention):
    """The reference inside a "kernel": it reads lengths from device memory, where the host must not look."""

    name = "capturable"
    is_capturable = True

    def forward(
        self,
        shape: AttentionShape,
        q: torch.Tensor,
        kv: torch.Tensor,
        cache: torch.Tensor | None,
        plan: Batch,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        assert plan.seq_starts is not None
        assert plan.seq_lens is not None
        # Not through a method that waits: this stands for what a kernel reads when it runs.
        query_lens = np.diff(np.from_dlpack(plan.seq_starts)).astype(np.int64)
        context_lens = np.from_dlpack(plan.seq_lens).astype(np.int64)
        assert query_lens.max() <= plan.max_query_len
        assert context_lens.max() <= plan.max_context_len
        assert query_lens.sum() == len(q), "some tokens belong to no sequence"
        now = replace(plan, query_lens=query_lens, context_lens=context_lens)
        out = torch.full_like(q, float("nan"))
        attended = super().forward(shape, q, kv, cache, _without_empty(now), bias)
        return out.copy_(attended)


def _without_empty(batch: Batch) -> Batch:
    """Without dummies that have no token, and with tables as long as the contexts are."""
    rows = np.flatnonzero(batch.query_lens)
    if batch.block_tables is None:
        return replace(batch, query_lens=batch.query_lens[rows], context_lens=batch.context_lens[rows])
    longest = -(-int(batch.context_lens.max()) // batch.block_size)
    tables = batch.block_tables[torch.from_numpy(rows), :longest]
    needed = torch.from_numpy(-(-batch.context_lens[rows] // batch.block_size))
    # Beyond a sequence's own blocks a table may hold anything.
    tables = torch.where(torch.arange(longest) < needed.unsqueeze(1), tables, 0)
    return replace(batch, query_lens=batch.query_lens[rows], context_lens=batch.context_lens[rows], block_tables=tables)
