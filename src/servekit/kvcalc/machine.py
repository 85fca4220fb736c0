"""What this machine has: the memory of its GPU or its RAM, and its memory bandwidth. It must not know models.

NVML is called through ctypes, since asking torch would cost seconds.
"""

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_CGROUP_LIMITS: Final = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_COPY_BYTES: Final = 64 * 2**20
_COPY_ROUNDS: Final = 5


@dataclass(frozen=True, slots=True)
class MachineMemory:
    """A memory in bytes and what it is: the first GPU's, or this machine's RAM as far as it may be used."""

    num_bytes: int
    name: str


class _NvmlMemory(ctypes.Structure):
    _fields_ = [("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong)]


def machine_memory() -> MachineMemory:
    """The first NVIDIA GPU's memory, else the RAM, capped by the container's limit."""
    return _gpu_memory() or _ram()


def measure_copy_bandwidth() -> float:
    """Bytes a second that all threads together read and write, the best of a few rounds (STREAM's copy)."""
    import numpy as np

    num_threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    sources = [np.ones(_COPY_BYTES, dtype=np.uint8) for _ in range(num_threads)]
    targets = [np.zeros_like(source) for source in sources]
    best = float("inf")
    with ThreadPoolExecutor(num_threads) as pool:
        for _ in range(_COPY_ROUNDS):
            start = time.perf_counter()
            list(pool.map(np.copyto, targets, sources))
            best = min(best, time.perf_counter() - start)
    return 2 * _COPY_BYTES * num_threads / best


def _ram() -> MachineMemory:
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    limits = [limit for path in _CGROUP_LIMITS if (limit := _cgroup_limit(Path(path))) is not None]
    return MachineMemory(min([total, *limits]), "this machine's RAM")


def _cgroup_limit(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _gpu_memory() -> MachineMemory | None:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    if nvml.nvmlInit_v2() != 0:
        return None
    try:
        device, memory = ctypes.c_void_p(), _NvmlMemory()
        name = ctypes.create_string_buffer(96)
        if nvml.nvmlDeviceGetHandleByIndex_v2(0, ctypes.byref(device)) != 0:
            return None
        if nvml.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) != 0:
            return None
        named = nvml.nvmlDeviceGetName(device, name, len(name)) == 0
        return MachineMemory(int(memory.total), name.value.decode("utf-8", "replace") if named else "the first GPU")
    finally:
        nvml.nvmlShutdown()
