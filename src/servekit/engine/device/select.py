"""Which device serves, and why. torch is asked only where there is an NVIDIA driver: importing it takes a second."""

import ctypes
import sys

from servekit.engine.device.base import Device
from servekit.engine.device.cpu import CpuDevice


def select_device(choice: str) -> tuple[Device, str]:
    """The device for `auto`, `cpu` or `cuda`, and the reason. Raises ConfigError when it is not there."""
    if choice == "cpu":
        return CpuDevice(), "asked for"
    if choice == "auto":
        if not has_driver():
            return CpuDevice(), "there is no NVIDIA driver"
        import torch

        if not torch.cuda.is_available():
            return CpuDevice(), "torch sees no CUDA GPU"
    from servekit.engine.device.cuda import CudaDevice

    return CudaDevice(), "asked for" if choice == "cuda" else "torch sees a CUDA GPU"


def has_driver() -> bool:
    """Whether the library of NVIDIA's driver can be loaded: without it nothing sees a GPU."""
    try:
        ctypes.CDLL("nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1")
    except OSError:
        return False
    return True
