"""What tests of the CPU kernels share: the library of this installation, or the reason why they are skipped."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from servekit.engine.native.kernels import Kernels
from servekit.engine.native.library import Library, load_library
from servekit.engine.native.matrix import ByteArray, FloatArray

_LIBRARY, _WHERE = load_library()

needs_kernels = pytest.mark.skipif(_LIBRARY is None, reason=_WHERE)
ISAS = _LIBRARY.isas if _LIBRARY else ()


def library() -> Library:
    """The library; only tests marked `needs_kernels` ask for it."""
    assert _LIBRARY is not None
    return _LIBRARY


@contextmanager
def opened(isa: str | None = None, threads: int = 2) -> Iterator[Kernels]:
    """Kernels of one instruction set (the best) for the length of a test."""
    kernels = Kernels(library(), threads, isa)
    try:
        yield kernels
    finally:
        kernels.close()


class BlockWeight:
    """A matrix in ggml's blocks: what a GGUF file would hold."""

    def __init__(self, stored: str, blocks: ByteArray, dense: FloatArray) -> None:
        self.stored = stored
        self.shape = (dense.shape[0], dense.shape[1])
        self._blocks = blocks
        self._dense = dense

    def dense(self) -> torch.Tensor:
        return torch.from_numpy(self._dense)

    def numbers(self) -> FloatArray:
        return self._dense

    def blocks(self) -> ByteArray | None:
        return self._blocks


def rounded_inputs(x: FloatArray) -> FloatArray:
    """What the kernels multiply by in the place of `x` [T, k]: eight bits in groups of 32, each with its own scale."""
    rows, k = x.shape
    padded = np.zeros((rows, -(-k // 32) * 32), dtype=np.float32)
    padded[:, :k] = x
    groups = padded.reshape(rows, -1, 32)
    largest = np.abs(groups).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127.0), largest, out=np.zeros_like(largest), where=largest > 0)
    quants = np.rint(groups * inverse)
    result: FloatArray = (quants * (largest / np.float32(127.0))).reshape(rows, -1)[:, :k]
    return np.ascontiguousarray(result, dtype=np.float32)
