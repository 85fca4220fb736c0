"""Weights in the blocked layout of oneDNN, which torch ships: packed once at load instead of in every product.

For the few rows of a decode step the packing costs more than the product: on a Zen 4 core all matrices of a 135 M model
take 52 ms packed and 93 ms unpacked at 16 rows in float32, 30 and 50 ms in bfloat16. The two operators are the ones
that torch's own compiler emits. They are not documented, so they are tried on a small matrix first, and a torch or a
CPU on which they fail is served by DenseLinear.
"""

from collections.abc import Sequence
from typing import Any

import torch

from servekit.engine.layers.linear import Dense, Linear, LinearFormat, Weight, stack

_TYPICAL_ROWS = 16
"""What the layout is chosen for: a decode step of a busy server."""


class PackedLinear:
    """A weight that only oneDNN reads; the unpacked one is not kept."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        mkldnn: Any = torch.ops.mkldnn
        self._packed = mkldnn._reorder_linear_weight(weight, _TYPICAL_ROWS)
        self._multiply = mkldnn._linear_pointwise
        self._bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, in] -> [T, out]."""
        product: torch.Tensor = self._multiply(x, self._packed, self._bias, "none", [], "")
        return product


class Packed:
    """The format of PackedLinear, for a CPU."""

    name = "packed"

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = dtype

    def build(
        self, weights: Sequence[Weight], biases: Sequence[torch.Tensor] | None, *, is_head: bool = False
    ) -> Linear:
        """See LinearFormat.build."""
        return PackedLinear(*stack(weights, biases, self._dtype, torch.device("cpu")))


def unquantised_format(dtype: torch.dtype, device: torch.device) -> tuple[LinearFormat, str]:
    """The fastest format without quantisation that works here, and the reason."""
    if device.type != "cpu":
        return Dense(dtype, device), "dense: the packed layout is for CPUs"
    if problem := packing_problem(dtype):
        return Dense(dtype, device), f"dense: oneDNN's packed layout does not work here ({problem})"
    return Packed(dtype), "packed: oneDNN's blocked layout spares packing in every product"


@torch.inference_mode()
def packing_problem(dtype: torch.dtype) -> str | None:
    """What keeps PackedLinear from giving the same product as torch on this machine; None when nothing does."""
    weight = torch.linspace(-1, 1, 48 * 32).reshape(48, 32).to(dtype)
    x = torch.linspace(1, -1, 3 * 32).reshape(3, 32).to(dtype)
    try:
        product = PackedLinear(weight, weight[:, 0].contiguous())(x)
    except (AttributeError, RuntimeError, NotImplementedError) as error:
        return str(error).splitlines()[0][:120]
    expected = torch.nn.functional.linear(x.float(), weight.float(), weight[:, 0].float())
    return None if torch.allclose(product.float(), expected, atol=0.1, rtol=0.02) else "it gives another product"
