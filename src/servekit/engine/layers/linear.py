"""Linear: the one seam behind which a weight format lives. Models name no format and hold no bare weight matrix."""

from collections.abc import Sequence
from typing import Protocol

import torch


class Linear(Protocol):
    """y = x W^T + b for x [T, in_features]. `nbytes` counts what the weights occupy."""

    out_features: int
    nbytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class DenseLinear:
    """Weights as they are, in the compute dtype: `weight` [out, in], `bias` [out] or None."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight = weight
        self._bias = bias
        self.out_features = weight.shape[0]
        self.nbytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, in] -> [T, out]."""
        return torch.nn.functional.linear(x, self._weight, self._bias)


class LinearFormat(Protocol):
    """Builds a Linear from float tensors; one instance for each value of --quantize."""

    def build(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None) -> Linear: ...


class Dense:
    """The format "none". Parts are stacked along the output, so that q, k and v are one matrix product."""

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._dtype = dtype
        self._device = device

    def build(self, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor] | None) -> Linear:
        """`weights` each [out_i, in] -> one Linear of sum(out_i) outputs."""
        weight = weights[0] if len(weights) == 1 else torch.cat(list(weights))
        bias = None if biases is None else torch.cat(list(biases)).to(self._device, self._dtype)
        return DenseLinear(weight.to(self._device, self._dtype).contiguous(), bias)
