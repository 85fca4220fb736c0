"""Quantised weights through torch's operators: close to the float product, smaller, and refused by name elsewhere."""

import pytest
import torch

from servekit.engine.layers import scaled
from servekit.engine.layers.linear import DenseLinear
from servekit.engine.layers.scaled import Fp8Linear, Int8Linear, scaled_format
from servekit.errors import ConfigError

CPU = torch.device("cpu")


@pytest.mark.parametrize(("kind", "error"), [(Int8Linear, 0.01), (Fp8Linear, 0.05)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_products_are_close_and_weights_half_as_large(
    kind: type[Int8Linear] | type[Fp8Linear], error: float, has_bias: bool
) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn(96, 64, generator=generator).bfloat16() * torch.logspace(-3, 1, 96).unsqueeze(1).bfloat16()
    bias = torch.randn(96, generator=generator).bfloat16() if has_bias else None
    x = torch.randn(5, 64, generator=generator).bfloat16()
    expected = DenseLinear(weight.float(), None if bias is None else bias.float())(x.float())
    linear = kind(weight, bias)
    found = linear(x)
    assert found.dtype == torch.bfloat16
    # Each output has its own scale, so small ones are as exact as large ones.
    size = weight.float().norm(dim=1) * x.float().norm(dim=1, keepdim=True)
    assert ((found.float() - expected).abs() / (size + expected.abs())).max() < error
    assert linear.nbytes < 0.6 * weight.nbytes + 96 * 4 + 200


@pytest.mark.parametrize("kind", [Int8Linear, Fp8Linear])
def test_rows_of_zeros_stay_zero(kind: type[Int8Linear] | type[Fp8Linear]) -> None:
    linear = kind(torch.zeros(16, 64).bfloat16())
    assert (linear(torch.ones(2, 64).bfloat16()) == 0).all()
    assert (linear(torch.zeros(2, 64).bfloat16()) == 0).all()


@pytest.mark.parametrize("name", ["int8", "fp8"])
def test_what_works_is_offered(name: str) -> None:
    linear_format, reason = scaled_format(name, torch.bfloat16, CPU)
    assert linear_format.name == name
    assert reason.startswith(f"{name}: ")


def test_what_does_not_work_is_refused_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="--quantize fp8 computes in bfloat16, not float32"):
        scaled_format("fp8", torch.float32, CPU)

    def refuse(self: object, x: torch.Tensor) -> torch.Tensor:
        raise RuntimeError("needs compute capability 8.9\nand more")

    monkeypatch.setattr(scaled.Fp8Linear, "__call__", refuse)
    with pytest.raises(ConfigError, match=r"--quantize fp8 does not work on this cpu: needs compute capability 8\.9$"):
        scaled_format("fp8", torch.bfloat16, CPU)
    monkeypatch.setattr(scaled.Int8Linear, "__call__", lambda self, x: torch.ones(16, 64))
    with pytest.raises(ConfigError, match="computes wrong products"):
        scaled_format("int8", torch.bfloat16, CPU)
