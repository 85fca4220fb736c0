"""Packed weights: one matrix in the layout of csrc/servekit.h, and how rows become one. It must not know torch."""

import ctypes
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from servekit.engine.native import structs
from servekit.engine.native.library import Library

ByteArray = npt.NDArray[np.uint8]
FloatArray = npt.NDArray[np.float32]

ALIGNMENT = 64
_GROUP_BYTES = {structs.Q4: 4 * 64 + 2 * 32, structs.Q8: 8 * 64 + 32, structs.BF16: 16 * 64}
"""Of 16 channels and 32 inputs, scales and minimums included."""


def aligned_empty(num_bytes: int) -> ByteArray:
    """Bytes that begin at a multiple of 64, which is what the kernels read at once."""
    return _from_boundary(np.empty(num_bytes + ALIGNMENT, dtype=np.uint8))


def aligned_zeros(num_bytes: int) -> ByteArray:
    """The same, zeroed. From calloc: a page costs memory only once it is written."""
    return _from_boundary(np.zeros(num_bytes + ALIGNMENT, dtype=np.uint8))


def _from_boundary(whole: ByteArray) -> ByteArray:
    start = -whole.ctypes.data % ALIGNMENT
    return whole[start : start + len(whole) - ALIGNMENT]


def aligned(values: npt.ArrayLike) -> FloatArray:
    """A float32 copy that begins at a multiple of 64 bytes."""
    array = np.asarray(values, dtype=np.float32)
    copy = aligned_empty(array.nbytes).view(np.float32).reshape(array.shape)
    copy[...] = array
    return copy


@dataclass(frozen=True, slots=True)
class PackedMatrix:
    """y = x W^T + bias for x [T, k] -> [T, n]. `format` is structs.Q4, Q8 or BF16; `bias` is padded to whole panels."""

    format: int
    n: int
    k: int
    packed: ByteArray
    bias: FloatArray | None = None

    @property
    def nbytes(self) -> int:
        """What weights and bias occupy, padding included."""
        return self.packed.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def struct(self) -> structs.Matrix:
        """As C sees it. It points into this object's memory, so this object must outlive it."""
        return structs.Matrix(
            format=self.format,
            n=self.n,
            k=self.k,
            n_padded=padded_channels(self.n),
            k_padded=_round_up(self.k, 2 * structs.GROUP),
            packed=self.packed.ctypes.data,
            bias=None if self.bias is None else self.bias.ctypes.data,
        )


def padded_channels(n: int) -> int:
    """Output channels with those that fill the last panel."""
    return _round_up(n, structs.PANEL)


def packed_bytes(format_: int, n: int, k: int) -> int:
    """The size of a packed matrix. Raises ValueError for a format that there is not."""
    if format_ not in _GROUP_BYTES:
        raise ValueError(f"there is no packed format {format_}")
    groups = _round_up(k, 2 * structs.GROUP) // structs.GROUP
    return padded_channels(n) // structs.PANEL * groups * _GROUP_BYTES[format_]


def pack(
    library: Library, format_: int, source: str, rows: npt.NDArray[np.generic], k: int, bias: FloatArray | None = None
) -> PackedMatrix | None:
    """Rows [n, .] of float32 or of ggml's blocks (`source` is ggml's name) as a packed matrix.

    None where this source cannot become this format: other kinds of blocks, or numbers beyond float16's.
    """
    rows = np.ascontiguousarray(rows)
    n = rows.shape[0]
    packed = aligned_empty(packed_bytes(format_, n, k))
    row_bytes = rows.strides[0]
    if library.c.sk_pack(format_, structs.SOURCES[source], rows.ctypes.data, row_bytes, n, k, packed.ctypes.data):
        return None
    return PackedMatrix(format_, n, k, packed, None if bias is None else _padded(bias))


def unpack(library: Library, matrix: PackedMatrix, first: int = 0, count: int | None = None) -> FloatArray:
    """The weights of `count` channels (all that follow) from `first` as float32 [count, k]: as the kernels see them."""
    rows = np.arange(first, matrix.n if count is None else first + count, dtype=np.int64)
    out = np.empty((len(rows), matrix.k), dtype=np.float32)
    library.c.sk_unpack(ctypes.byref(matrix.struct()), rows.ctypes.data, len(rows), out.ctypes.data)
    return out


def _padded(bias: FloatArray) -> FloatArray:
    whole = np.zeros(padded_channels(len(bias)), dtype=np.float32)
    whole[: len(bias)] = bias
    return aligned(whole)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple
