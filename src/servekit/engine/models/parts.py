"""From names in a checkpoint to the parts that every model is made of. It must not know any family."""

from collections.abc import Mapping

import torch

from servekit.engine.layers.linear import Linear, LinearFormat
from servekit.engine.models.weights import SourceRows, WeightSource


class SourceWeight(SourceRows):
    """SourceRows for formats that are torch's."""

    def dense(self) -> torch.Tensor:
        """The tensor as the source gives it."""
        return self._source.load(self._name)


class Parts:
    """Reads tensors by their plain names; `names` maps those to the checkpoint's own.

    Matrices become Linears of one format; what is added or looked up is kept in memory of its own, since the file may
    be unmapped afterwards.
    """

    def __init__(
        self,
        source: WeightSource,
        names: Mapping[str, str],
        linear: LinearFormat,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.dtype = dtype
        self._source = source
        self._names = names
        self._linear = linear
        self._device = device

    def table(self, name: str) -> torch.Tensor:
        """`name`.weight in the compute dtype."""
        return self._load(f"{name}.weight").to(self._device, self.dtype, copy=True)

    def float32(self, name: str) -> torch.Tensor:
        """The tensor `name` in float32, for norms."""
        return self._load(name).to(self._device, torch.float32, copy=True)

    def weight(self, name: str) -> SourceWeight:
        """The matrix `name`.weight, not read yet."""
        return SourceWeight(self._source, self._names[f"{name}.weight"])

    def linear(self, names: list[str], *, has_bias: bool = False, is_head: bool = False) -> Linear:
        """The projections `names`, stacked into one."""
        weights = [self.weight(name) for name in names]
        biases = [self._load(f"{name}.bias") for name in names] if has_bias else None
        return self._linear.build(weights, biases, is_head=is_head)

    def _load(self, name: str) -> torch.Tensor:
        return self._source.load(self._names[name])
