"""A CUDA GPU as a device."""

from typing import Literal

import torch

from servekit.engine.device.base import Device
from servekit.engine.device.lazy import Deferred, LazyResult
from servekit.errors import ConfigError


class CudaDevice(Device):
    """Computes on the current GPU. The cache may take nine tenths of what the weights leave.

    Raises ConfigError when torch sees no GPU.
    """

    kind: Literal["cpu", "cuda"] = "cuda"
    kv_share = 0.9
    default_batched_tokens = 2048

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda: torch sees no CUDA GPU here", hint="leave --device out to use the CPU", param="device"
            )

    @property
    def torch_device(self) -> torch.device:
        """torch's current CUDA device."""
        return torch.device("cuda", torch.cuda.current_device())

    def describe(self) -> str:
        """The card's name."""
        return torch.cuda.get_device_name(self.torch_device)

    def free_memory(self) -> int:
        """What the driver says is free."""
        return int(torch.cuda.mem_get_info(self.torch_device)[0])

    def default_threads(self) -> int:
        """One: the host only launches kernels."""
        return 1

    def fetch(self, tensor: torch.Tensor) -> LazyResult[torch.Tensor]:
        """Copied into pinned memory behind the work that is queued, so that more can be queued meanwhile."""
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        host.copy_(tensor, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        return Deferred(copied.query, copied.synchronize, lambda: host)
