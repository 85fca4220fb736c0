"""The CPU as a device."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import psutil

from servekit.engine.device.base import Device

if TYPE_CHECKING:
    import torch

_CGROUP = Path("/sys/fs/cgroup")


class CpuDevice(Device):
    """Computes on the host. A quarter of free memory is the cache's by default: other programs live here too."""

    kind: Literal["cpu", "cuda"] = "cpu"
    kv_share = 0.25
    default_batched_tokens = 256

    @property
    def torch_device(self) -> torch.device:
        """torch's cpu."""
        import torch

        return torch.device("cpu")

    def describe(self) -> str:
        """Model and number of usable cores."""
        return f"{platform.processor() or platform.machine()} CPU, {self.default_threads()} cores"

    def free_memory(self) -> int:
        """What the system calls available, or what is left of a container's limit if that is less."""
        return min(psutil.virtual_memory().available, _left_in_container())

    def default_threads(self) -> int:
        """Physical cores, as far as this process may use them: a second thread on a core adds nothing to matmul."""
        allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        return max(1, min(allowed, psutil.cpu_count(logical=False) or allowed))


def _left_in_container() -> int:
    """Bytes below the limit of this process's control group (v2), or more than any machine has."""
    try:
        limit = (_CGROUP / "memory.max").read_text(encoding="utf-8").strip()
        used = (_CGROUP / "memory.current").read_text(encoding="utf-8").strip()
        return 2**63 if limit == "max" else max(0, int(limit) - int(used))
    except (OSError, ValueError):
        return 2**63
