"""Keys and values in eight bits, by every instruction set: how they lie, and attention in double precision."""

from dataclasses import dataclass, field

import numpy as np
import pytest
from numpy.typing import NDArray

from servekit.engine.native import structs
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.matrix import ByteArray, FloatArray, aligned_empty
from tests.engine.native.kernels import ISAS, needs_kernels, opened, rounded_inputs

pytestmark = needs_kernels

Doubles = NDArray[np.float64]


@dataclass(frozen=True)
class Case:
    """One sequence of `context` tokens whose last `queries` are asked for."""

    context: int
    queries: int
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 64
    window: int = 0
    softcap: float = 0.0
    causal: bool = True
    block_size: int = 16
    whole_values: bool = False
    """Values of whole numbers to 127 have scales of exactly 1."""

    @property
    def scale(self) -> float:
        return float(np.float32(self.head_dim**-0.5))

    def attention(self) -> structs.Attention:
        return structs.Attention(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            window=self.window,
            scale=self.scale,
            softcap=self.softcap,
            causal=self.causal,
        )

    def kv(self) -> FloatArray:
        """[context, 2, kv_heads, head_dim] before rounding."""
        random = np.random.default_rng([self.context, self.head_dim])
        kv = random.standard_normal((self.context, 2, self.kv_heads, self.head_dim), dtype=np.float32)
        if self.whole_values:
            kv[:, 1] = random.integers(-127, 128, kv[:, 1].shape)
            kv[:, 1, :, ::32] = 127
        return kv

    def q(self) -> FloatArray:
        """[queries, heads, head_dim]: rows are those of the last positions, however many are asked for."""
        random = np.random.default_rng([self.context, self.heads])
        q = random.standard_normal((self.context, self.heads, self.head_dim), dtype=np.float32)
        return np.ascontiguousarray(q[self.context - self.queries :] * np.float32(2))


@dataclass
class Cache:
    """A layer's cache whose blocks a sequence uses from last to first; the rest of it stays 0xff, which is NaN."""

    case: Case
    blocks: int = field(init=False)
    table: NDArray[np.int64] = field(init=False)
    memory: ByteArray = field(init=False)

    def __post_init__(self) -> None:
        case = self.case
        self.blocks = -(-case.context // case.block_size) + 1
        self.table = np.arange(self.blocks - 1, 0, -1, dtype=np.int64)
        self.memory = aligned_empty(self.blocks * case.block_size * 2 * case.kv_heads * case.head_dim // 32 * 34)
        self.memory[...] = 0xFF

    def slots(self, first: int, last: int) -> NDArray[np.int64]:
        positions = np.arange(first, last, dtype=np.int64)
        return self.table[positions // self.case.block_size] * self.case.block_size + positions % self.case.block_size

    def write(self, kernels: Kernels, kv: FloatArray, first: int = 0) -> None:
        """Tokens first, first + 1 ... of the sequence."""
        slots = self.slots(first, first + len(kv))
        step = structs.Step(tokens=len(kv), seqs=1, slot_mapping=slots.ctypes.data)
        kernels.write_kv(self.case.attention(), step, kv.ctypes.data, structs.KV_Q8_0, self.memory.ctypes.data)

    def attend(self, kernels: Kernels, q: FloatArray, context: int) -> FloatArray:
        """Of the queries at positions context - len(q) .. context."""
        starts, contexts = np.array([0, len(q)], dtype=np.int64), np.array([context], dtype=np.int64)
        step = structs.Step(
            tokens=len(q),
            seqs=1,
            block_size=self.case.block_size,
            max_blocks=len(self.table),
            slot_mapping=starts.ctypes.data,  # attention asks only whether there is one
            block_tables=self.table.ctypes.data,
            starts=starts.ctypes.data,
            context_lens=contexts.ctypes.data,
        )
        out = np.full(q.shape, np.nan, dtype=np.float32)
        attention, memory = self.case.attention(), self.memory.ctypes.data
        kernels.attend(attention, step, q.ctypes.data, memory, structs.KV_Q8_0, out.ctypes.data)
        return out


def _quantised(x: FloatArray) -> tuple[NDArray[np.int8], NDArray[np.float16]]:
    """[..., n] as int8 [..., n / 32, 32] and scales [..., n / 32] for which the largest is 127."""
    groups = x.reshape(*x.shape[:-1], -1, 32)
    largest = np.abs(groups).max(-1)
    scales = (largest / np.float32(127)).astype(np.float16)
    is_short = (scales < np.float16(2**-14)) & (scales.astype(np.float32) * 127 < largest)
    scales = np.where(is_short, np.nextafter(scales, np.float16(1)), scales)
    inverse = np.divide(
        np.float32(1), scales, out=np.zeros(scales.shape, np.float32), where=scales > 0, dtype=np.float32
    )
    return np.clip(np.rint(groups * inverse[..., None]), -127, 127).astype(np.int8), scales


def _rounded(x: FloatArray) -> Doubles:
    """What a cache in eight bits holds of x [..., n]."""
    quants, scales = _quantised(x)
    return (quants * scales.astype(np.float64)[..., None]).reshape(x.shape)


def _expected(case: Case) -> Doubles:
    """[queries, heads, head_dim] in double precision, from the rounded keys, values and queries."""
    kv, group = _rounded(case.kv()), case.heads // case.kv_heads
    factor = np.float32(case.scale / case.softcap if case.softcap else case.scale)
    q = rounded_inputs((case.q() * factor).reshape(-1, case.head_dim)).astype(np.float64)
    q = q.reshape(case.queries, case.kv_heads, group, case.head_dim)
    scores = np.einsum("qhgd,phd->hgqp", q, kv[:, 0])
    if case.softcap:
        scores = case.softcap * np.tanh(scores)
    query = np.arange(case.context - case.queries, case.context)[:, None]
    key = np.arange(case.context)[None, :]
    seen = key <= query if case.causal else np.ones((case.queries, case.context), dtype=bool)
    if case.window:
        seen &= np.abs(query - key) < case.window
    scores = np.where(seen, scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)
    out: Doubles = np.einsum("hgqp,phd->qhgd", weights, kv[:, 1])
    return out.reshape(case.queries, case.heads, case.head_dim)


@pytest.mark.parametrize("isa", ISAS)
def test_every_byte_of_the_cache(isa: str) -> None:
    """34 bytes for 32 numbers: as the header describes the tiles, with the ends of what float16 can scale."""
    case = Case(context=37, queries=1, head_dim=96, block_size=32)
    kv = case.kv()
    kv[3] *= np.float32(1e-6)  # below float16's smallest scale
    kv[4] *= np.float32(2e-3)  # a scale among its subnormals
    kv[5] = 0
    kv[6] *= np.float32(1e4)
    kv[7, :, :, 5] = np.float32(3e7)  # beyond its largest
    quants, scales = _quantised(np.minimum(kv, np.float32(65504 * 127)))
    cache = Cache(case)
    with opened(isa) as kernels:
        cache.write(kernels, kv[:20])
        cache.write(kernels, kv[20:], first=20)
    heads = cache.memory.reshape(-1, case.kv_heads, 34 * case.head_dim)
    parts = np.split(heads, [16 * 96, 17 * 96, 33 * 96], axis=-1)
    slots = cache.slots(0, case.context)
    tile, place = slots // 16, slots % 16
    keys = parts[0].reshape(-1, case.kv_heads, 24, 16, 4)[tile, :, :, place].reshape(-1, case.kv_heads, 3, 32)
    values = parts[2].reshape(-1, case.kv_heads, 16, 3, 32)[tile, :, place]
    assert (keys.astype(np.int32) - 128 == quants[:, 0]).all()
    assert (values.view(np.int8) == quants[:, 1]).all()
    for part, scale in ((parts[1], scales[:, 0]), (parts[3], scales[:, 1])):
        assert (part.view(np.float16).reshape(-1, case.kv_heads, 3, 16)[tile, :, :, place] == scale).all()
    written = len(slots) * case.kv_heads * 2 * 3 * 34
    assert (cache.memory != 0xFF).sum() <= written < cache.memory.size
    untouched = np.delete(heads.reshape(-1, case.kv_heads * 34 * case.head_dim), np.unique(tile), axis=0)
    assert (untouched == 0xFF).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize(
    "case",
    [
        Case(context=1, queries=1),
        Case(context=63, queries=1),
        Case(context=65, queries=65),
        Case(context=161, queries=1, block_size=48),
        Case(context=300, queries=1, window=70, block_size=32),
        Case(context=300, queries=90, window=70, block_size=48),
        Case(context=130, queries=1, softcap=20.0),
        Case(context=130, queries=33, softcap=20.0, block_size=32),
        Case(context=100, queries=100, causal=False),
        Case(context=100, queries=100, causal=False, window=9),
        Case(context=200, queries=1, heads=3, kv_heads=3, head_dim=32),
        Case(context=200, queries=45, heads=9, kv_heads=3, head_dim=96),
        Case(context=90, queries=1, heads=13, kv_heads=1, head_dim=160),
        Case(context=90, queries=7, heads=28, kv_heads=2, head_dim=128),
        Case(context=90, queries=1, heads=28, kv_heads=2, head_dim=256),
    ],
    ids=str,
)
def test_attention_is_that_of_the_rounded_numbers(isa: str, case: Case) -> None:
    cache = Cache(case)
    with opened(isa, threads=3) as kernels:
        cache.write(kernels, case.kv())
        found = cache.attend(kernels, case.q(), case.context)
    np.testing.assert_allclose(found, _expected(case), rtol=0, atol=3e-5)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("window", [0, 40])
def test_a_prompt_in_chunks_is_the_whole_prompt(isa: str, window: int) -> None:
    """Bit for bit, keys and values of a chunk being written before it attends."""
    case = Case(context=150, queries=150, window=window)
    kv, q, whole, pieces = case.kv(), case.q(), Cache(case), Cache(case)
    with opened(isa) as kernels:
        whole.write(kernels, kv)
        expected = whole.attend(kernels, q, case.context)
        for first, last in ((0, 2), (2, 35), (35, 99), (99, 101), (101, 150)):
            pieces.write(kernels, kv[first:last], first)
            found = pieces.attend(kernels, q[first:last], last)
            assert (found == expected[first:last]).all(), (first, last)
    assert (pieces.memory == whole.memory).all()


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("context", [2, 17, 49, 64])
def test_decoding_scores_as_a_prompt_does(isa: str, context: int) -> None:
    """Bit for bit: with scales of 1 for the values and one block of keys, all else is the same in both."""
    case = Case(context=context, queries=context, heads=14, whole_values=True)
    cache = Cache(case)
    with opened(isa) as kernels:
        cache.write(kernels, case.kv())
        prompt = cache.attend(kernels, case.q(), context)
        single = cache.attend(kernels, np.ascontiguousarray(case.q()[-1:]), context)
    assert (single[0] == prompt[-1]).all()
