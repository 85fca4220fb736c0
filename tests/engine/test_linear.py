"""Every weight format computes the same product."""

import pytest
import torch

from servekit.engine.layers.linear import Dense, DenseWeight, LinearFormat
from servekit.engine.layers.packed import Packed, packing_problem, unquantised_format

_CPU = torch.device("cpu")


@pytest.mark.parametrize("rows", [1, 2, 5, 16, 33, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("kind", ["dense", "packed"])
def test_equals_the_plain_product_with_stacked_parts(kind: str, dtype: torch.dtype, rows: int) -> None:
    if kind == "packed" and (problem := packing_problem(dtype)):
        assert problem  # a torch without the packed layout: Dense serves, as the next test shows
        return
    chosen: LinearFormat = Dense(dtype, _CPU) if kind == "dense" else Packed(dtype)
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, 40, generator=generator) for n in (24, 7, 9)]
    biases = [torch.randn(n, generator=generator) for n in (24, 7, 9)]
    x = torch.randn(rows, 40, generator=generator).to(dtype)
    linear = chosen.build([DenseWeight(tensor) for tensor in tensors], biases)
    expected = x.double() @ torch.cat(tensors).to(dtype).double().T + torch.cat(biases).to(dtype).double()
    bounds = {torch.float32: 1e-4, torch.bfloat16: 0.15}
    torch.testing.assert_close(linear(x).double(), expected, atol=bounds[dtype], rtol=0)
    assert linear.nbytes == 40 * 41 * dtype.itemsize


def test_the_unpacked_layout_serves_where_packing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servekit.engine.layers.packed.packing_problem", lambda _: "no such operator")
    chosen, reason = unquantised_format(torch.float32, _CPU)
    assert chosen.name == "dense"
    assert "no such operator" in reason


def test_a_layout_that_gives_another_product_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(*_: object) -> torch.Tensor:
        return torch.zeros(3, 48)

    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", wrong)
    assert packing_problem(torch.float32) is not None
