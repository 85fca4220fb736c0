"""Our Triton kernels equal the reference, run by Triton's interpreter. Skipped where triton is not installed."""

import os
from dataclasses import replace

import pytest
import torch

from servekit.engine.attention.reference import ReferenceAttention
from servekit.engine.attention.triton_paged import MAX_SPLITS, TritonAttention, num_splits
from servekit.engine.spec.attention import AttentionShape
from tests.engine.attention.paged_batches import LAYERS, MIXES, RAGGED, paged_batch, ragged_batch

# Before the kernels are imported: that is when they become interpreted ones.
os.environ["TRITON_INTERPRET"] = "1"
CPU = torch.device("cpu")


@pytest.fixture
def backend() -> TritonAttention:
    pytest.importorskip("triton", reason="triton is not installed: its kernels are tested where it is")
    return TritonAttention()


@pytest.mark.parametrize("block_size", [1, 16, 48])
@pytest.mark.parametrize("mix", MIXES.values(), ids=MIXES)
@pytest.mark.parametrize("shape", LAYERS.values(), ids=LAYERS)
def test_paged_attention_equals_the_reference(
    backend: TritonAttention, shape: AttentionShape, mix: list[tuple[int, int]], block_size: int
) -> None:
    batch, q, kv, cache = paged_batch(shape, mix, block_size)
    expected = ReferenceAttention().forward(shape, q, kv, cache, batch)
    torch.testing.assert_close(backend.forward(shape, q, kv, cache, backend.plan(batch)), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("lengths", RAGGED.values(), ids=RAGGED)
@pytest.mark.parametrize("shape", LAYERS.values(), ids=LAYERS)
def test_attention_inside_a_batch_equals_the_reference(
    backend: TritonAttention, shape: AttentionShape, lengths: list[int], causal: bool
) -> None:
    shape = replace(shape, causal=causal)
    batch, q, kv = ragged_batch(shape, lengths)
    expected = ReferenceAttention().forward(shape, q, kv, None, batch)
    torch.testing.assert_close(backend.forward(shape, q, kv, None, backend.plan(batch)), expected, atol=2e-5, rtol=0)


@pytest.mark.parametrize("mix", ["decodes", "mixed"])
def test_what_lies_beyond_a_context_is_not_read(backend: TritonAttention, mix: str) -> None:
    """Other blocks, the rest of a last block and the rest of a table may hold anything, NaN included."""
    shape = LAYERS["grouped"]
    batch, q, kv, cache = paged_batch(shape, MIXES[mix], 8)
    before = backend.forward(shape, q, kv, cache, backend.plan(batch))
    assert batch.block_tables is not None
    used = torch.zeros(cache.shape[:2], dtype=torch.bool)
    for row, context_len in enumerate(batch.context_lens.tolist()):
        places = torch.arange(context_len)
        used[batch.block_tables[row, places // 8], places % 8] = True
        batch.block_tables[row, -(-context_len // 8) :] = 2**30
    cache[~used] = float("nan")
    assert torch.equal(backend.forward(shape, q, kv, cache, backend.plan(batch)), before)


def test_a_dummy_that_sees_nothing_is_zero_and_not_nan(backend: TritonAttention) -> None:
    shape = LAYERS["grouped"]
    batch, q, kv, cache = paged_batch(shape, [(1, 9), (1, 1)], 8)
    assert batch.seq_lens is not None
    batch.seq_lens[1] = 0
    out = backend.forward(shape, q, kv, cache, backend.plan(batch))
    assert (out[1] == 0).all()
    assert torch.isfinite(out).all()


def test_half_precision_is_close(backend: TritonAttention) -> None:
    """In float16: Triton's interpreter cannot multiply bfloat16."""
    shape = LAYERS["grouped"]
    for mix in ("decodes", "mixed"):
        batch, q, kv, cache = paged_batch(shape, MIXES[mix], 16)
        expected = ReferenceAttention().forward(shape, q, kv, cache, batch)
        out = backend.forward(shape, q.half(), kv.half(), cache.half(), backend.plan(batch))
        assert out.dtype == torch.float16
        torch.testing.assert_close(out.float(), expected, atol=5e-3, rtol=5e-3)


def test_it_says_what_it_cannot_do(backend: TritonAttention) -> None:
    assert backend.unsupported(LAYERS["windowed-softcapped"], torch.float32, CPU) == []
    large = AttentionShape(4, 4, 512, 1.0, has_bias=True)
    assert backend.unsupported(large, torch.float32, CPU) == [
        "heads of 512 are larger than 256",
        "it has no place for a bias by distance",
    ]


def test_splits_fill_a_gpu_but_are_not_smaller_than_they_are_worth() -> None:
    assert [num_splits(programs, 100_000) for programs in (2, 16, 64, 512)] == [MAX_SPLITS, 32, 8, 1]
    assert [num_splits(2, context) for context in (1, 256, 257, 2000)] == [1, 1, 2, 8]
