"""Which device serves, and why."""

import torch

from servekit.engine.device.base import Device
from servekit.engine.device.cpu import CpuDevice
from servekit.engine.device.cuda import CudaDevice


def select_device(choice: str) -> tuple[Device, str]:
    """The device for `auto`, `cpu` or `cuda`, and the reason. Raises ConfigError when it is not there."""
    if choice == "cuda" or (choice == "auto" and torch.cuda.is_available()):
        return CudaDevice(), "asked for" if choice == "cuda" else "torch sees a CUDA GPU"
    return CpuDevice(), "asked for" if choice == "cpu" else "torch sees no CUDA GPU"
