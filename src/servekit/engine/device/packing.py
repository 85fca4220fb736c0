"""Many small arrays as one block of bytes, so that a step needs one copy to the device.

It must not know devices: bytes in, views out.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

_ALIGNMENT = 16
"""Bytes; as much as the widest load of a GPU."""

_DTYPES = {
    np.dtype(np.int64): torch.int64,
    np.dtype(np.int32): torch.int32,
    np.dtype(np.float64): torch.float64,
    np.dtype(np.float32): torch.float32,
    np.dtype(np.bool_): torch.bool,
}


def packed_size(arrays: Sequence[npt.NDArray[Any]]) -> int:
    """Bytes that `arrays` take together, each aligned."""
    return sum(_aligned(array.nbytes) for array in arrays)


def pack(arrays: Sequence[npt.NDArray[Any]], block: npt.NDArray[np.uint8]) -> None:
    """Copy `arrays` one after the other into `block`, which has their `packed_size`."""
    first = 0
    for array in arrays:
        block[first : first + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        first += _aligned(array.nbytes)


def unpack(block: torch.Tensor, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
    """Views into `block` [packed_size] uint8 that have the types and shapes of `arrays`."""
    views, first = [], 0
    for array in arrays:
        part = block[first : first + array.nbytes]
        views.append(part.view(_DTYPES[array.dtype]).view(array.shape))
        first += _aligned(array.nbytes)
    return views


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT
