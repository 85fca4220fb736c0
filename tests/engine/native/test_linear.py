"""Products of packed weights, by every instruction set: exactly those of the rounded weights and inputs."""

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from servekit.engine.layers.linear import DenseWeight
from servekit.engine.layers.quantised import NativeLinear, Quantised
from servekit.engine.native import structs
from servekit.engine.native.matrix import FloatArray, PackedMatrix, pack, unpack
from servekit.engine.native.quantiser import Bits
from tests.engine.native.kernels import ISAS, library, needs_kernels, opened, rounded_inputs

pytestmark = needs_kernels

_FORMATS = {"int4": structs.Q4, "int8": structs.Q8, "bfloat16": structs.BF16}


def _random(*shape: int, seed: int = 0) -> FloatArray:
    return np.random.default_rng([seed, *shape]).standard_normal(shape, dtype=np.float32)


def _packed(format_: int, n: int, k: int) -> PackedMatrix:
    matrix = pack(library(), format_, "F32", _random(n, k), k, _random(n, seed=1))
    assert matrix is not None
    return matrix


def _expected(matrix: PackedMatrix, x: FloatArray) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The product in float64, and for each number the sum of the sizes of what was added up."""
    assert matrix.bias is not None
    weights, bias = unpack(library(), matrix).astype(np.float64), matrix.bias[: matrix.n].astype(np.float64)
    if matrix.format == structs.BF16:
        inputs = torch.from_numpy(x).bfloat16().double().numpy()
    else:
        inputs = rounded_inputs(x).astype(np.float64)
    return inputs @ weights.T + bias, np.abs(inputs) @ np.abs(weights).T + np.abs(bias)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", _FORMATS)
@pytest.mark.parametrize(("n", "k"), [(1, 1), (15, 31), (16, 32), (17, 33), (48, 64), (50, 96), (33, 200), (130, 576)])
def test_equals_the_product_of_what_was_rounded(isa: str, kind: str, n: int, k: int) -> None:
    matrix = _packed(_FORMATS[kind], n, k)
    with opened(isa) as kernels:
        linear = NativeLinear(kernels, matrix)
        for rows in (1, 2, 3, 4, 5, 7, 8, 12, 13, 16, 25, 33, 70):
            x = _random(rows, k, seed=rows)
            expected, sizes = _expected(matrix, x)
            found = linear(torch.from_numpy(x)).double().numpy()
            assert (np.abs(found - expected) <= 2e-5 * sizes).all(), (rows, np.abs(found - expected).max())


@pytest.mark.parametrize("isa", ISAS)
def test_no_rows_give_no_rows(isa: str) -> None:
    with opened(isa) as kernels:
        assert NativeLinear(kernels, _packed(structs.Q4, 20, 40))(torch.empty(0, 40)).shape == (0, 20)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("kind", _FORMATS)
def test_a_row_of_zeros_and_a_tiny_row_stay_finite(isa: str, kind: str) -> None:
    matrix = _packed(_FORMATS[kind], 20, 64)
    x = torch.zeros(3, 64)
    x[1] = 1e-39
    x[2, 5] = 1e-30
    with opened(isa) as kernels:
        found = NativeLinear(kernels, matrix)(x)
    assert matrix.bias is not None
    torch.testing.assert_close(found, torch.from_numpy(matrix.bias[:20]).expand(3, -1), atol=1e-6, rtol=0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_a_row_is_the_same_whatever_stands_beside_it(isa: str, bits: Bits) -> None:
    matrix = _packed(_FORMATS[bits], 50, 200)
    x = torch.from_numpy(_random(70, 200))
    with opened(isa) as kernels:
        linear = NativeLinear(kernels, matrix)
        alone = torch.cat([linear(row.unsqueeze(0)) for row in x])
        assert torch.equal(linear(x), alone)


def test_the_format_keeps_the_dtype_of_its_inputs() -> None:
    weight = torch.from_numpy(_random(40, 64))
    with opened() as kernels:
        linear = Quantised(kernels, "int8").build([DenseWeight(weight[:24]), DenseWeight(weight[24:])], None)
        x = torch.from_numpy(_random(5, 64))
        assert linear(x.bfloat16()).dtype == torch.bfloat16
        torch.testing.assert_close(linear(x), x @ weight.T, atol=0.3, rtol=0)
        # A view with gaps between its numbers is read as what it shows.
        assert torch.equal(linear(x.T.contiguous().T), linear(x))
        assert linear.nbytes == 48 * 64 * 1088 // 1024


def test_threads_change_nothing() -> None:
    matrix = _packed(structs.Q4, 130, 576)
    x = torch.from_numpy(_random(33, 576))
    found = []
    for threads in (1, 2, 5):
        with opened(threads=threads) as kernels:
            found.append(NativeLinear(kernels, matrix)(x))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])
