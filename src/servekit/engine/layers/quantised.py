"""Weights of four, eight or sixteen bits behind the Linear seam, multiplied by the CPU kernels of engine/native.

What a GGUF file has quantised is taken as it is wherever the packed formats hold it; nothing is rounded twice that need
not be, and nothing gets fewer bits than were asked for.
"""

from collections.abc import Sequence
from typing import Literal, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from servekit.engine.layers.linear import Linear, Weight
from servekit.engine.native import structs
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.library import Library
from servekit.engine.native.matrix import FloatArray, PackedMatrix, pack, unpack
from servekit.errors import ModelError

T = TypeVar("T", np.float32, np.uint8)

IntBits = Literal["int8", "int4"]
Bits = IntBits | Literal["bfloat16"]

_OWN_FORMAT = {"Q4_0": structs.Q4, "Q4_1": structs.Q4, "Q4_K": structs.Q4, "Q8_0": structs.Q8}
"""Blocks whose quants are kept, and the format that keeps them. Of Q4_K the scales, products of two numbers there, are
rounded to float16."""
_EXACT = frozenset({*_OWN_FORMAT.items(), ("Q4_0", structs.Q8)})
_FROM_BLOCKS = _EXACT | {("Q4_1", structs.Q8), ("Q4_K", structs.Q8)}
"""What is packed from blocks: rounding them, the kernels use that they are steps (see pack.c)."""
_ROWS_A_PIECE = 4096


def packed_format(wanted: Bits, stored: Sequence[str], *, is_head: bool) -> int:
    """What a matrix is packed as, given what its parts are stored in ("float" or ggml's name).

    For int4: four bits where the file has four bits, eight where it has more or mixes, so that nothing it says is lost.
    Floats become four bits, but not those that score the vocabulary.
    """
    kinds = set(stored)
    if wanted == "bfloat16":
        return structs.BF16
    if wanted == "int8":
        return structs.Q8
    if kinds == {"float"}:
        return structs.Q8 if is_head else structs.Q4
    return _OWN_FORMAT.get(kinds.pop(), structs.Q8) if len(kinds) == 1 else structs.Q8


class Quantiser:
    """Packs a checkpoint's matrices for `wanted` bits. It keeps no state, so several threads may use it."""

    def __init__(self, library: Library, wanted: Bits) -> None:
        self.wanted = wanted
        self._library = library

    def pack(
        self,
        weights: Sequence[Weight],
        biases: Sequence[torch.Tensor] | None = None,
        *,
        is_head: bool = False,
        alternating: bool = False,
    ) -> tuple[PackedMatrix, float]:
        """The parts as one matrix, and the relative error (root of mean squares) of its rounding; 0 without any.

        Parts are stacked along the output. `alternating` takes two of one size and lets panels of 16 of the first and
        of the second take turns, each padded to a multiple of 32 with zeros: see sk_layer.gate_up. One alone is only
        padded. Raises ModelError for numbers that are not finite or beyond every scale.
        """

        def join(parts: Sequence[NDArray[T]]) -> NDArray[T]:
            return _alternate(parts) if alternating else _stack(parts)

        stored = [weight.stored for weight in weights]
        format_ = packed_format(self.wanted, stored, is_head=is_head)
        k = weights[0].shape[1]
        bias = None if biases is None else join([_numbers(part) for part in biases])
        kind = (stored[0], format_)
        matrix = None
        if len(set(stored)) == 1 and kind in _FROM_BLOCKS:
            blocks = [stored_rows for weight in weights if (stored_rows := weight.blocks()) is not None]
            assert len(blocks) == len(weights)
            matrix = pack(self._library, format_, stored[0], join(blocks), k, bias)
            if matrix is not None and kind in _EXACT:
                return matrix, 0.0
        rows = join([_numbers(weight.dense()) for weight in weights])
        if matrix is None:
            # Blocks with a scale beyond float16's lose the least in eight bits.
            format_ = structs.Q8 if kind in _FROM_BLOCKS else format_
            matrix = pack(self._library, format_, "F32", rows, k, bias)
        if matrix is None:
            raise ModelError("a weight is not finite, or too large to be quantised", hint="use --quantize none")
        return matrix, self._relative_error(matrix, rows)

    def _relative_error(self, matrix: PackedMatrix, rows: FloatArray) -> float:
        squares, errors = 0.0, 0.0
        for first in range(0, matrix.n, _ROWS_A_PIECE):
            exact = rows[first : first + _ROWS_A_PIECE]
            off = unpack(self._library, matrix, first, len(exact)) - exact
            squares += float(np.vdot(exact, exact))
            errors += float(np.vdot(off, off))
        return (errors / squares) ** 0.5 if squares else 0.0


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
        matrix, _ = self._quantiser.pack(weights, biases, is_head=is_head)
        return NativeLinear(self._kernels, matrix)


def _numbers(tensor: torch.Tensor) -> FloatArray:
    numbers: FloatArray = tensor.float().contiguous().numpy()
    return numbers


def _stack(parts: Sequence[NDArray[T]]) -> NDArray[T]:
    return parts[0] if len(parts) == 1 else np.concatenate(parts)


def _alternate(parts: Sequence[NDArray[T]]) -> NDArray[T]:
    size = parts[0].shape[0]
    rest: tuple[int, ...] = parts[0].shape[1:]
    padded = -(-size // (2 * structs.PANEL)) * 2 * structs.PANEL
    whole = np.zeros((padded // structs.PANEL, len(parts), structs.PANEL, *rest), dtype=parts[0].dtype)
    for place, part in enumerate(parts):
        panels = np.zeros((padded, *rest), dtype=part.dtype)
        panels[:size] = part
        whole[:, place] = panels.reshape(-1, structs.PANEL, *rest)
    return whole.reshape(-1, *rest)
