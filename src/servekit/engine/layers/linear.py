"""Linear: the one seam behind which a weight format lives. Models name no format and hold no bare weight matrix."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Linear(Protocol):
    """y = x W^T + b for x [T, in_features]. `nbytes` counts what the weights occupy."""

    nbytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class LinearFormat(Protocol):
    """Builds Linears from float tensors: one class for each way of keeping weights."""

    name: str

    def build(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None) -> Linear:
        """`weights` each [out_i, in], `biases` each [out_i] -> one Linear of sum(out_i) outputs.

        Parts are stacked along the output, so that q, k and v are one matrix product.
        """
        ...


class DenseLinear:
    """Weights as torch keeps them: `weight` [out, in], `bias` [out] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self.weight = weight
        self._bias = bias
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, in] -> [T, out]."""
        return torch.nn.functional.linear(x, self.weight, self._bias)


class Dense:
    """The format of DenseLinear: works everywhere."""

    name = "dense"

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def build(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None) -> Linear:
        """See LinearFormat.build."""
        return DenseLinear(*stack(weights, biases, self._dtype, self._device))


def stack(
    weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All parts as one weight [out, in] and one bias [out], in `dtype` on `device`."""
    weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
    bias = None if biases is None else torch.cat(list(biases)).to(device, dtype)
    return weight.to(device, dtype).contiguous(), bias
