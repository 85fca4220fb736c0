"""The device seam: where tensors live and how much room there is. Only device/cuda.py may name CUDA."""

from abc import ABC, abstractmethod
from typing import Literal

import torch

from servekit.engine.device.lazy import LazyResult, Ready


class Device(ABC):
    """One place to compute. `kind` is `cpu` or `cuda`; `default_batched_tokens` the token budget that suits it.

    `kv_share` is the share of free memory that the KV cache may take when nobody said how much.
    """

    kind: Literal["cpu", "cuda"]
    kv_share: float
    default_batched_tokens: int

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

    def fetch(self, tensor: torch.Tensor) -> LazyResult[torch.Tensor]:
        """`tensor` on the host, as soon as the device has computed it. On the host itself it is there already."""
        return Ready(tensor)
