"""The device seam: where tensors live, how they get there and back, and how much room there is.

Only device/cuda.py may name CUDA. A server whose steps the CPU kernels compute asks no device for a tensor, so torch is
imported by those who do.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy.typing as npt

from servekit.engine.device.lazy import LazyResult, Ready

if TYPE_CHECKING:
    import torch


class CapturedGraph(Protocol):
    """Work that was recorded once and can be launched again as one piece, on the same memory.

    `num_bytes` is what the recording took from the device.
    """

    @property
    def num_bytes(self) -> int: ...

    def replay(self) -> None: ...


class Device(ABC):
    """One place to compute. `kind` is `cpu` or `cuda`; `default_batched_tokens` the token budget that suits it.

    `kv_share` is the share of free memory that the KV cache may take when nobody said how much. `is_queued` says that
    work is queued and the host runs ahead of it: then reading a value waits, a step may be launched before the one
    before it has been read, and graphs can be captured.
    """

    kind: Literal["cpu", "cuda"]
    kv_share: float
    default_batched_tokens: int
    is_queued: bool = False

    @property
    @abstractmethod
    def torch_device(self) -> torch.device:
        """What torch calls it."""

    @abstractmethod
    def describe(self) -> str:
        """Its name for people."""

    @abstractmethod
    def free_memory(self) -> int:
        """Bytes that can be had right now."""

    @abstractmethod
    def default_threads(self) -> int:
        """How many host threads should compute."""

    def peak_memory(self, work: Callable[[], object]) -> int:
        """Bytes that `work` needs for a while beyond what it leaves behind; 0 where the question is not asked.

        A host has no allocator of its own to ask, and its caches are not sized to the last byte.
        """
        return 0

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """`arrays` as tensors on the device, all by one copy that the host does not wait for.

        On the host itself they are tensors already.
        """
        import torch

        return [torch.from_numpy(array) for array in arrays]

    def fetch(self, *tensors: torch.Tensor) -> LazyResult[tuple[torch.Tensor, ...]]:
        """`tensors` on the host, as soon as the device has computed them. On the host itself they are there already."""
        return Ready(tensors)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Memory that stays where it is, for graphs to read and write. What it holds at first is anybody's guess."""
        import torch

        return torch.empty(shape, dtype=dtype, device=self.torch_device)

    def capture(self, compute: Callable[[], None]) -> CapturedGraph:
        """Record what `compute` launches, without running it. Raises CaptureError where that cannot be done."""
        raise CaptureError(f"a {self.kind} device runs everything as it comes")


class CaptureError(Exception):
    """What a device cannot record has to be launched piece by piece; the message says why."""
