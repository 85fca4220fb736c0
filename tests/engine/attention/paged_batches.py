"""Ragged, paged batches of every mix, for any source of attention."""

import numpy as np
import torch

from servekit.engine.batch import Batch
from servekit.engine.host_batch import HostBatch
from servekit.engine.spec.attention import AttentionShape

LAYERS = {
    "grouped": AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25),
    "one-kv-head": AttentionShape(num_heads=4, num_kv_heads=1, head_dim=8, scale=0.3),
    "odd-head-size": AttentionShape(num_heads=2, num_kv_heads=2, head_dim=24, scale=0.2),
    "windowed": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=9),
    "windowed-softcapped": AttentionShape(num_heads=4, num_kv_heads=4, head_dim=8, scale=0.4, window=70, softcap=3.0),
}
MIXES = {
    "decodes": [(1, 1), (1, 16), (1, 17), (1, 130)],
    "one-long-decode": [(1, 700)],
    "chunks": [(7, 30), (3, 90), (40, 41)],
    "mixed": [(1, 33), (12, 12), (30, 75), (1, 64)],
}
"""(Tokens of this step, tokens visible to the last one) of each sequence."""
RAGGED = {"alike": [20, 20], "apart": [3, 70, 1, 33]}


def paged_batch(
    shape: AttentionShape, mix: list[tuple[int, int]], block_size: int, device: str = "cpu"
) -> tuple[Batch, torch.Tensor, torch.Tensor, torch.Tensor]:
    """A batch whose sequences own shuffled blocks, as a pool in use hands them out; q, kv and the cache."""
    query_lens, context_lens = (np.array(values, dtype=np.int64) for values in zip(*mix, strict=True))
    needed = -(-context_lens // block_size)
    num_blocks = int(needed.sum()) + 3
    free = np.random.default_rng(1).permutation(np.arange(1, num_blocks))
    tables = np.zeros((len(mix), needed.max()), dtype=np.int64)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    positions = np.concatenate([np.arange(c - q, c) for q, c in mix])
    rows = np.repeat(np.arange(len(mix)), query_lens)
    slots = tables[rows, positions // block_size] * block_size + positions % block_size
    host = HostBatch(
        input_ids=np.zeros(len(positions), dtype=np.int64),
        positions=positions,
        logits_idx=np.cumsum(query_lens) - 1,
        slot_mapping=slots,
        block_tables=tables,
        query_lens=query_lens,
        context_lens=context_lens,
        block_size=block_size,
    )
    batch = Batch.of(host, [torch.from_numpy(array).to(device) for array in host.arrays()])
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(num_blocks, block_size, 2, shape.num_kv_heads, shape.head_dim, generator=generator)
    q = torch.randn(batch.num_tokens, shape.num_heads, shape.head_dim, generator=generator)
    kv = cache.flatten(0, 1)[torch.from_numpy(slots)].flatten(1, 2)
    return batch, q.to(device), kv.to(device), cache.to(device)


def ragged_batch(
    shape: AttentionShape, lengths: list[int], device: str = "cpu"
) -> tuple[Batch, torch.Tensor, torch.Tensor]:
    """A batch without a cache; q and kv."""
    lens = np.array(lengths, dtype=np.int64)
    host = HostBatch(
        input_ids=np.zeros(lens.sum(), dtype=np.int64),
        positions=np.concatenate([np.arange(length) for length in lengths]),
        logits_idx=np.cumsum(lens) - 1,
        slot_mapping=None,
        block_tables=None,
        query_lens=lens,
        context_lens=lens,
        block_size=1,
    )
    batch = Batch.of(host, [torch.from_numpy(array).to(device) for array in host.arrays()])
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(batch.num_tokens, shape.num_heads, shape.head_dim, generator=generator)
    kv = torch.randn(batch.num_tokens, 2 * shape.num_kv_heads, shape.head_dim, generator=generator)
    return batch, q.to(device), kv.to(device)
