"""Packing: what ggml has quantised is taken as it is, floats are rounded little, and everything has its place."""

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType

from servekit.engine.layers.linear import DenseWeight
from servekit.engine.native import structs
from servekit.engine.native.matrix import ByteArray, FloatArray, pack, packed_bytes, unpack
from servekit.engine.native.quantiser import Bits, Quantiser, packed_format
from servekit.errors import ModelError
from tests.engine.native.kernels import BlockWeight, library, needs_kernels

pytestmark = needs_kernels


def _numbers(n: int, k: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng(seed).standard_normal((n, k), dtype=np.float32)


def _blocks(kind: str, n: int, k: int, seed: int = 0) -> tuple[ByteArray, FloatArray]:
    """Blocks and what gguf's own reader makes of them."""
    quantisation = GGMLQuantizationType[kind]
    blocks = gguf.quants.quantize(_numbers(n, k, seed), quantisation)
    return blocks, gguf.quants.dequantize(blocks, quantisation)


def _weight(kind: str, n: int, k: int, seed: int = 0) -> BlockWeight:
    return BlockWeight(kind, *_blocks(kind, n, k, seed))


@pytest.mark.parametrize(("n", "k"), [(1, 32), (16, 64), (17, 96), (50, 576)])
@pytest.mark.parametrize(("kind", "format_"), [("Q4_0", structs.Q4), ("Q4_1", structs.Q4), ("Q8_0", structs.Q8)])
def test_quantised_blocks_come_back_bit_for_bit(kind: str, format_: int, n: int, k: int) -> None:
    blocks, expected = _blocks(kind, n, k)
    matrix = pack(library(), format_, kind, blocks, k)
    assert matrix is not None
    np.testing.assert_array_equal(unpack(library(), matrix), expected)


def test_a_scale_too_small_for_full_precision_is_still_exact() -> None:
    blocks, _ = _blocks("Q4_0", 1, 32)
    for smallest in (1, 3, 0x3FF):  # subnormal float16
        blocks[0, :2] = np.frombuffer(smallest.to_bytes(2, "little"), np.uint8)
        matrix = pack(library(), structs.Q4, "Q4_0", blocks, 32)
        assert matrix is not None
        expected = gguf.quants.dequantize(blocks, GGMLQuantizationType.Q4_0)
        np.testing.assert_array_equal(unpack(library(), matrix), expected)


def test_k_quants_keep_their_nibbles_and_round_only_scales() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (20, 2 * 144), dtype=np.uint8)
    scales = rng.uniform(0.001, 0.01, (20, 2, 2)).astype(np.float16)
    blocks.reshape(20, 2, 144)[..., :4] = scales.view(np.uint8).reshape(20, 2, 4)
    matrix = pack(library(), structs.Q4, "Q4_K", blocks, 512)
    assert matrix is not None
    expected = gguf.quants.dequantize(blocks, GGMLQuantizationType.Q4_K)
    off = unpack(library(), matrix) - expected
    assert 0 < np.sqrt(np.mean(off**2) / np.mean(expected**2)) < 2**-11


def test_eight_bits_hold_blocks_without_minimum_exactly_and_others_better_than_their_numbers() -> None:
    """A scale that divides the steps of four bits hits them, where the range's own would miss each by something."""
    for kind in ("Q4_0", "Q4_1"):
        blocks, expected = _blocks(kind, 50, 576)
        matrix, plain = (
            pack(library(), structs.Q8, kind, blocks, 576),
            pack(library(), structs.Q8, "F32", expected, 576),
        )
        assert matrix is not None
        assert plain is not None
        error = np.mean((unpack(library(), matrix) - expected) ** 2)
        assert error == 0 if kind == "Q4_0" else error < 0.25 * np.mean((unpack(library(), plain) - expected) ** 2)


def test_eight_bits_of_k_quants_are_near_their_numbers() -> None:
    rng = np.random.default_rng(0)
    blocks = rng.integers(0, 256, (20, 2 * 144), dtype=np.uint8)
    blocks.reshape(20, 2, 144)[..., :4] = (
        rng.uniform(0.001, 0.01, (20, 2, 2)).astype(np.float16).view(np.uint8).reshape(20, 2, 4)
    )
    matrix = pack(library(), structs.Q8, "Q4_K", blocks, 512)
    assert matrix is not None
    expected = gguf.quants.dequantize(blocks, GGMLQuantizationType.Q4_K)
    assert np.sqrt(np.mean((unpack(library(), matrix) - expected) ** 2) / np.mean(expected**2)) < 0.005


@pytest.mark.parametrize(
    ("format_", "kind"), [(structs.Q4, "Q8_0"), (structs.BF16, "Q4_0"), (structs.BF16, "Q8_0"), (9, "Q4_0")]
)
def test_blocks_that_a_format_cannot_hold_are_refused(format_: int, kind: str) -> None:
    rows, packed = np.zeros((16, 256), np.uint8), np.zeros(16 * 4096, np.uint8)
    source = structs.SOURCES[kind]
    assert library().c.sk_pack(format_, source, rows.ctypes.data, 256, 16, 256, packed.ctypes.data) != 0


@pytest.mark.parametrize(("bits", "is_refused"), [(0x6FFF, False), (0x7000, True), (0x7C00, True), (0x7E00, True)])
def test_a_minimum_beyond_float16_is_refused(bits: int, is_refused: bool) -> None:
    blocks, _ = _blocks("Q4_0", 1, 32)
    blocks[0, :2] = np.frombuffer(bits.to_bytes(2, "little"), np.uint8)
    assert (pack(library(), structs.Q4, "Q4_0", blocks, 32) is None) == is_refused


def test_the_lowest_byte_that_the_format_lacks_is_refused() -> None:
    blocks, _ = _blocks("Q8_0", 1, 32)
    blocks[0, 5] = 0x80
    assert pack(library(), structs.Q8, "Q8_0", blocks, 32) is None


@pytest.mark.parametrize(("n", "k"), [(1, 1), (3, 31), (16, 33), (17, 70), (40, 200)])
@pytest.mark.parametrize("format_", [structs.Q4, structs.Q8, structs.BF16])
def test_floats_are_rounded_within_half_a_step(format_: int, n: int, k: int) -> None:
    numbers = _numbers(n, k)
    matrix = pack(library(), format_, "F32", numbers, k)
    assert matrix is not None
    assert len(matrix.packed) == packed_bytes(format_, n, k) == library().c.sk_packed_bytes(format_, n, k)
    unpacked = unpack(library(), matrix)
    if format_ == structs.BF16:
        np.testing.assert_array_equal(unpacked, torch.from_numpy(numbers).bfloat16().float().numpy())
        return
    for first in range(0, k, 32):
        group, found = numbers[:, first : first + 32], unpacked[:, first : first + 32]
        if format_ == structs.Q8:
            step = np.abs(group).max(axis=1) / 127
        else:
            # A short group is filled with zeros, which its range has to hold as well.
            filled = group if group.shape[1] == 32 else np.pad(group, ((0, 0), (0, 1)))
            step = np.ptp(filled, axis=1) / 15
        assert (np.abs(found - group).max(axis=1) <= 0.51 * step * (2 if format_ == structs.Q4 else 1) + 1e-6).all()


def test_the_search_beats_rounding_to_the_range_and_ggmls_own() -> None:
    numbers = _numbers(64, 512)
    matrix = pack(library(), structs.Q4, "F32", numbers, 512)
    assert matrix is not None
    ours = np.mean((unpack(library(), matrix) - numbers) ** 2)
    theirs = np.mean((_blocks("Q4_1", 64, 512)[1] - numbers) ** 2)
    assert ours < 0.85 * theirs


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("format_", [structs.Q4, structs.Q8])
def test_numbers_beyond_every_scale_are_refused(format_: int, bad: float) -> None:
    numbers = _numbers(4, 64)
    numbers[2, 40] = bad
    assert pack(library(), format_, "F32", numbers, 64) is None


@pytest.mark.parametrize(
    ("bits", "stored", "is_head", "expected"),
    [
        ("int4", ["Q4_0", "Q4_0"], False, structs.Q4),
        ("int4", ["Q4_1"], True, structs.Q4),
        ("int4", ["Q4_K"], False, structs.Q4),
        ("int4", ["Q8_0"], True, structs.Q8),
        ("int4", ["Q6_K"], False, structs.Q8),
        ("int4", ["Q4_K", "Q4_K", "Q6_K"], False, structs.Q8),
        ("int4", ["Q4_0", "Q4_1"], False, structs.Q8),
        ("int4", ["float", "float"], False, structs.Q4),
        ("int4", ["float"], True, structs.Q8),
        ("int8", ["Q4_0"], False, structs.Q8),
        ("int8", ["float"], True, structs.Q8),
    ],
)
def test_which_format_a_matrix_takes(bits: Bits, stored: list[str], is_head: bool, expected: int) -> None:
    assert packed_format(bits, stored, is_head=is_head) == expected


def test_parts_are_stacked_and_exact_ones_have_no_error() -> None:
    parts = [_weight("Q4_1", n, 64, seed=n) for n in (24, 7, 9)]
    biases = [np.arange(n, dtype=np.float32) for n in (24, 7, 9)]
    matrix, error = Quantiser(library(), "int4").pack(parts, biases)
    assert (matrix.format, matrix.n, error) == (structs.Q4, 40, 0.0)
    expected = np.concatenate([part.numbers() for part in parts])
    np.testing.assert_array_equal(unpack(library(), matrix), expected)
    assert matrix.bias is not None
    np.testing.assert_array_equal(matrix.bias, [*range(24), *range(7), *range(9), *[0.0] * 8])


def test_parts_of_different_kinds_become_eight_bits() -> None:
    parts = [_weight("Q4_0", 16, 64), _weight("Q8_0", 16, 64)]
    matrix, error = Quantiser(library(), "int4").pack(parts)
    assert matrix.format == structs.Q8
    assert 0 < error < 0.01


def test_a_scale_that_four_bits_cannot_hold_becomes_eight_bits() -> None:
    blocks, _ = _blocks("Q4_0", 1, 32)
    blocks[0, :2] = np.frombuffer((0x7400).to_bytes(2, "little"), np.uint8)  # 16384
    dense = gguf.quants.dequantize(blocks, GGMLQuantizationType.Q4_0)
    matrix, error = Quantiser(library(), "int4").pack([BlockWeight("Q4_0", blocks, dense)])
    assert matrix.format == structs.Q8
    assert error < 0.01


def test_the_error_is_the_one_that_rounding_makes() -> None:
    numbers = _numbers(100, 70)
    matrix, error = Quantiser(library(), "int4").pack([DenseWeight(torch.from_numpy(numbers))])
    off = unpack(library(), matrix).astype(np.float64) - numbers
    assert error == pytest.approx(np.sqrt((off**2).sum() / (numbers.astype(np.float64) ** 2).sum()), rel=1e-4)


def test_panels_of_two_parts_take_turns() -> None:
    gate, up = (_weight("Q8_0", 40, 64, seed=seed) for seed in (1, 2))
    biases = [np.arange(40, dtype=np.float32), np.arange(100, 140, dtype=np.float32)]
    matrix, error = Quantiser(library(), "int8").pack([gate, up], biases, alternating=True)
    assert (matrix.n, error) == (128, 0.0)
    panels = unpack(library(), matrix).reshape(4, 2, 16, 64)
    assert matrix.bias is not None
    shifts = matrix.bias.reshape(4, 2, 16)
    for place, (part, bias) in enumerate(zip((gate, up), biases, strict=True)):
        whole = panels[:, place].reshape(64, 64)
        np.testing.assert_array_equal(whole[:40], part.numbers())
        np.testing.assert_array_equal(whole[40:], 0)
        np.testing.assert_array_equal(shifts[:, place].reshape(-1), [*bias.tolist(), *[0.0] * 24])


def test_a_weight_that_is_no_number_is_refused_with_a_way_out() -> None:
    with pytest.raises(ModelError, match="not finite") as caught:
        Quantiser(library(), "int8").pack([DenseWeight(torch.full((4, 32), float("nan")))])
    assert caught.value.hint == "use --quantize none"
