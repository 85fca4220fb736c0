"""SDPA attention equals the reference on ragged, paged batches of every mix."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from servekit.engine.attention.groups import group_rows
from servekit.engine.attention.reference import ReferenceAttention
from servekit.engine.attention.sdpa import SdpaAttention
from servekit.engine.batch import Batch
from servekit.engine.spec.attention import AttentionShape

_SHAPES = {
    "grouped": AttentionShape(num_heads=6, num_kv_heads=2, head_dim=16, scale=0.25),
    "one-kv-head": AttentionShape(num_heads=4, num_kv_heads=1, head_dim=8, scale=0.3),
    "windowed": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, window=9),
    "softcapped": AttentionShape(num_heads=4, num_kv_heads=2, head_dim=16, scale=0.25, softcap=5.0),
    "windowed-softcapped": AttentionShape(num_heads=4, num_kv_heads=4, head_dim=8, scale=0.4, window=5, softcap=3.0),
}
# (tokens of this step, tokens visible to the last one) of each sequence
_MIXES = {
    "decodes": [(1, 1), (1, 16), (1, 17), (1, 100)],
    "decodes-far-apart": [(1, 900), (1, 20), (1, 400), (1, 3)],
    "whole-prefills": [(5, 5), (40, 40), (1, 1), (64, 64)],
    "one-whole-prefill": [(70, 70)],
    "long-prefills": [(90, 90), (65, 130), (80, 80)],
    "chunks": [(7, 30), (3, 90), (40, 41), (16, 32)],
    "mixed": [(1, 33), (1, 5), (12, 12), (30, 75), (100, 100), (1, 64)],
    "interleaved": [(20, 60), (1, 40), (2, 2), (1, 300), (66, 99)],
}
_BLOCK_SIZE = 8


def _batch(mix: list[tuple[int, int]], num_blocks: int) -> Batch:
    """A batch whose sequences own shuffled blocks, as a pool that has been in use hands them out."""
    free = np.random.default_rng(1).permutation(np.arange(1, num_blocks))
    query_lens, context_lens = (np.array(values) for values in zip(*mix, strict=True))
    needed = -(-context_lens // _BLOCK_SIZE)
    tables = np.zeros((len(mix), needed.max()), dtype=np.int64)
    for row, count in enumerate(needed):
        tables[row, :count], free = free[:count], free[count:]
    positions = np.concatenate([np.arange(c - q, c) for q, c in mix])
    rows = np.repeat(np.arange(len(mix)), query_lens)
    slots = tables[rows, positions // _BLOCK_SIZE] * _BLOCK_SIZE + positions % _BLOCK_SIZE
    return Batch(
        input_ids=torch.zeros(len(positions), dtype=torch.int64),
        positions=torch.from_numpy(positions),
        logits_idx=torch.from_numpy(np.cumsum(query_lens) - 1),
        slot_mapping=torch.from_numpy(slots),
        block_tables=torch.from_numpy(tables),
        query_lens=query_lens,
        context_lens=context_lens,
        block_size=_BLOCK_SIZE,
        num_tokens=len(positions),
        num_seqs=len(mix),
    )


@pytest.mark.parametrize("mix", _MIXES.values(), ids=_MIXES)
@pytest.mark.parametrize("shape", _SHAPES.values(), ids=_SHAPES)
def test_equals_the_reference(shape: AttentionShape, mix: list[tuple[int, int]]) -> None:
    generator = torch.Generator().manual_seed(0)
    num_blocks = 300
    batch = _batch(mix, num_blocks)
    cache = torch.randn(num_blocks, _BLOCK_SIZE, 2, shape.num_kv_heads, shape.head_dim, generator=generator)
    q = torch.randn(batch.num_tokens, shape.num_heads, shape.head_dim, generator=generator)
    assert batch.slot_mapping is not None
    kv = cache.flatten(0, 1)[batch.slot_mapping].flatten(1, 2)
    expected = ReferenceAttention().forward(shape, q, kv, cache, batch)
    backend = SdpaAttention()
    torch.testing.assert_close(backend.forward(shape, q, kv, cache, backend.plan(batch)), expected, atol=1e-5, rtol=0)


def test_what_another_sequence_left_in_a_block_is_not_seen() -> None:
    """The tail of a last block, and every block of others, may hold anything finite."""
    shape = _SHAPES["grouped"]
    batch = _batch([(1, 11), (3, 20)], 40)
    generator = torch.Generator().manual_seed(0)
    cache = torch.randn(40, _BLOCK_SIZE, 2, 2, 16, generator=generator)
    q = torch.randn(batch.num_tokens, 6, 16, generator=generator)
    backend = SdpaAttention()
    assert batch.slot_mapping is not None
    assert batch.block_tables is not None
    kv = cache.flatten(0, 1)[batch.slot_mapping].flatten(1, 2)
    before = backend.forward(shape, q, kv, cache, backend.plan(batch))
    own = torch.cat([batch.block_tables[0, :2], batch.block_tables[1, :3]])
    foreign = torch.ones(40, dtype=torch.bool)
    foreign[own] = False
    cache[foreign] = 1e30
    cache[batch.block_tables[0, 1], 3:] = 1e30
    cache[batch.block_tables[1, 2], 4:] = 1e30
    torch.testing.assert_close(backend.forward(shape, q, kv, cache, backend.plan(batch)), before, atol=0, rtol=0)


def test_decodes_of_alike_length_are_one_group_however_many() -> None:
    lengths = np.array([*range(129, 257)])
    (group,) = group_rows(np.ones(128, dtype=np.int64), lengths)
    assert (group.rows, group.query_len, group.context_len) == (tuple(range(128)), 1, 256)


def test_the_number_of_groups_follows_the_spread_of_lengths() -> None:
    lengths = np.array([16 * 2**i for i in range(10)] * 20)
    groups = group_rows(np.ones(200, dtype=np.int64), lengths)
    assert [(len(g.rows), g.context_len) for g in groups] == [(40, 8192), (40, 2048), (40, 512), (80, 128)]


def test_decodes_short_and_long_prefills_stay_apart() -> None:
    queries, contexts = np.array([1, 30, 200, 1, 64, 300]), np.array([50, 30, 200, 60, 64, 300])
    assert [g.rows for g in group_rows(queries, contexts)] == [(0, 3), (1, 4), (2,), (5,)]


@pytest.mark.parametrize("window", [None, 20])
@pytest.mark.parametrize("with_bias", [False, True])
def test_both_ways_in_bfloat16_equals_the_reference(window: int | None, with_bias: bool) -> None:
    """Padded groups, single texts, and lengths on both sides of where a CPU takes plain matrix products."""
    lengths = [33, 40, 64, 7, 100, 256, 257]
    batch = replace(_batch([(n, n) for n in lengths], 300), slot_mapping=None, block_tables=None)
    generator = torch.Generator().manual_seed(0)
    shape = AttentionShape(num_heads=3, num_kv_heads=3, head_dim=16, scale=0.25, window=window, causal=False)
    q = torch.randn(batch.num_tokens, 3, 16, generator=generator)
    kv = torch.randn(batch.num_tokens, 6, 16, generator=generator)
    bias = torch.randn(3, 2 * max(lengths) - 1, generator=generator) if with_bias else None
    reference = ReferenceAttention()
    expected = reference.forward(shape, q, kv, None, reference.plan(batch), bias)
    backend = SdpaAttention()
    found = backend.forward(shape, q.bfloat16(), kv.bfloat16(), None, backend.plan(batch), bias)
    torch.testing.assert_close(found.float(), expected, atol=0.03, rtol=0)
