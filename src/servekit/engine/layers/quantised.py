"""Weights of four, eight or sixteen bits behind the Linear seam, multiplied by the CPU kernels of engine/native."""

from collections.abc import Sequence

import torch

from servekit.engine.layers.linear import Linear, Weight, as_numbers
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.matrix import PackedMatrix
from servekit.engine.native.quantiser import Bits, Quantiser


class NativeLinear:
    """Packed weights, and inputs that are quantised to eight bits a row in groups of 32 on the fly."""

    def __init__(self, kernels: Kernels, matrix: PackedMatrix) -> None:
        self.nbytes = matrix.nbytes
        self._kernels = kernels
        self._matrix = matrix  # owns the memory that the struct points into
        self._struct = matrix.struct()

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, in] -> [T, out] in the dtype of x; computed and summed in float32."""
        inputs = x.float().contiguous()
        out = torch.empty(x.shape[0], self._matrix.n)
        self._kernels.linear(self._struct, inputs.data_ptr(), x.shape[0], out.data_ptr())
        return out.to(x.dtype)


class Quantised:
    """The formats of NativeLinear, named by the bits that were asked for."""

    def __init__(self, kernels: Kernels, bits: Bits) -> None:
        self.name: str = bits
        self._kernels = kernels
        self._quantiser = Quantiser(kernels.library, bits)

    def build(
        self, weights: Sequence[Weight], biases: Sequence[torch.Tensor] | None, *, is_head: bool = False
    ) -> Linear:
        """See LinearFormat.build."""
        numbers = None if biases is None else [as_numbers(bias) for bias in biases]
        matrix, _ = self._quantiser.pack(weights, numbers, is_head=is_head)
        return NativeLinear(self._kernels, matrix)
