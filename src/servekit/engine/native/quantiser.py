"""Quantiser: rows of a checkpoint -> packed matrices of four, eight or sixteen bits. It must not know torch.

What a GGUF file has quantised is taken as it is wherever the packed formats hold it; nothing is rounded twice that need
not be, and nothing gets fewer bits than were asked for.
"""

from collections.abc import Sequence
from typing import Literal, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from servekit.engine.native import structs
from servekit.engine.native.library import Library
from servekit.engine.native.matrix import ByteArray, FloatArray, PackedMatrix, pack, unpack
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


class Rows(Protocol):
    """One matrix of a checkpoint, read when asked. `shape` is (out, in).

    `stored` is ggml's name of what it is stored in, such as Q4_1; "float" for everything that is not quantised.
    """

    shape: tuple[int, int]
    stored: str

    def numbers(self) -> FloatArray:
        """Its numbers [out, in]."""
        ...

    def blocks(self) -> ByteArray | None:
        """Its rows as ggml's blocks of `stored`, bytes [out, row bytes]; None where it has none."""
        ...


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
        weights: Sequence[Rows],
        biases: Sequence[FloatArray] | None = None,
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
        bias = None if biases is None else join(biases)
        kind = (stored[0], format_)
        matrix = None
        if len(set(stored)) == 1 and kind in _FROM_BLOCKS:
            blocks = [stored_rows for weight in weights if (stored_rows := weight.blocks()) is not None]
            assert len(blocks) == len(weights)
            matrix = pack(self._library, format_, stored[0], join(blocks), k, bias)
            if matrix is not None and kind in _EXACT:
                return matrix, 0.0
        rows = join([weight.numbers() for weight in weights])
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
