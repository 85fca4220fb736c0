"""Models in torch whose numbers are rounded as the kernels round them: what native models are held against."""

from collections.abc import Callable, Mapping, Sequence

import torch

from servekit.engine.layers.linear import Linear, Weight, as_numbers, stack
from servekit.engine.models.parameters import Shape
from servekit.engine.models.weights import WeightSource
from servekit.engine.native.matrix import ByteArray, FloatArray


class RoundedSource:
    """A checkpoint whose matrices `rounded(name, tensor)` has rounded."""

    def __init__(self, source: WeightSource, rounded: Callable[[str, torch.Tensor], torch.Tensor]) -> None:
        self._source = source
        self._rounded = rounded

    def shapes(self) -> Mapping[str, Shape]:
        return self._source.shapes()

    def load(self, name: str) -> torch.Tensor:
        tensor = self._source.load(name)
        return self._rounded(name, tensor) if tensor.dim() == 2 else tensor

    def numbers(self, name: str) -> FloatArray:
        return as_numbers(self.load(name))

    def stored(self, name: str) -> str:
        return "float"

    def blocks(self, name: str) -> ByteArray | None:
        return None

    def close(self) -> None:
        self._source.close()


class RoundedLinear:
    """A dense product whose inputs are rounded."""

    def __init__(
        self, weight: torch.Tensor, bias: torch.Tensor | None, rounded: Callable[[torch.Tensor], torch.Tensor]
    ) -> None:
        self.nbytes = weight.nbytes
        self._weight = weight
        self._bias = bias
        self._rounded = rounded

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(self._rounded(x), self._weight, self._bias)


class RoundedFormat:
    """The format of RoundedLinear."""

    name = "rounded"

    def __init__(self, rounded: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self._rounded = rounded

    def build(
        self, weights: Sequence[Weight], biases: Sequence[torch.Tensor] | None, *, is_head: bool = False
    ) -> Linear:
        weight, bias = stack(weights, biases, torch.float32, torch.device("cpu"))
        return RoundedLinear(weight, bias, self._rounded)
