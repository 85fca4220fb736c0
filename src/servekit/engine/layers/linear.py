"""Linear: the one seam behind which a weight format lives. Models name no format and hold no bare weight matrix."""

from collections.abc import Sequence
from typing import Protocol

import torch

from servekit.engine.native.matrix import ByteArray, FloatArray
from servekit.engine.native.quantiser import Rows


class Weight(Rows, Protocol):
    """One matrix of a checkpoint, read when asked."""

    def dense(self) -> torch.Tensor:
        """Its numbers, in the dtype they come in."""
        ...


class DenseWeight:
    """A matrix that is in memory as numbers."""

    stored = "float"

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape = (tensor.shape[0], tensor.shape[1])
        self._tensor = tensor

    def dense(self) -> torch.Tensor:
        """The tensor itself."""
        return self._tensor

    def numbers(self) -> FloatArray:
        """The tensor as float32 on the host."""
        return as_numbers(self._tensor)

    def blocks(self) -> ByteArray | None:
        """None."""
        return None


def as_numbers(tensor: torch.Tensor) -> FloatArray:
    """A tensor of the host as a float32 array; its own memory where it is one already."""
    numbers: FloatArray = tensor.float().contiguous().numpy()
    return numbers


class Linear(Protocol):
    """y = x W^T + b for x [T, in_features]. `nbytes` counts what the weights occupy."""

    nbytes: int

    def __call__(self, x: torch.Tensor) -> torch.Tensor: ...


class LinearFormat(Protocol):
    """Builds Linears from a checkpoint's matrices: one class for each way of keeping weights."""

    name: str

    def build(
        self, weights: Sequence[Weight], biases: Sequence[torch.Tensor] | None, *, is_head: bool = False
    ) -> Linear:
        """`weights` each [out_i, in], `biases` each [out_i] -> one Linear of sum(out_i) outputs.

        Parts are stacked along the output, so that q, k and v are one matrix product. `is_head` marks the matrix that
        scores the vocabulary, whose rounding shows most.
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

    def build(
        self, weights: Sequence[Weight], biases: Sequence[torch.Tensor] | None, *, is_head: bool = False
    ) -> Linear:
        """See LinearFormat.build."""
        return DenseLinear(*stack(weights, biases, self._dtype, self._device))


def stack(
    weights: Sequence[Weight], biases: Sequence[torch.Tensor] | None, dtype: torch.dtype, device: torch.device
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """All parts as one weight [out, in] and one bias [out], in `dtype` on `device`."""
    parts = [weight.dense() for weight in weights]
    weight = parts[0] if len(parts) == 1 else torch.cat(parts)
    bias = None if biases is None else torch.cat(list(biases)).to(device, dtype)
    return weight.to(device, dtype).contiguous(), bias
