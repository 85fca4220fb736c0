"""The machine that the load came from, for the run file. It must not measure."""

import os
import platform
from pathlib import Path

import psutil

from servekit import __version__


def describe_machine() -> dict[str, str | int]:
    """Name of the system and the processor, cores that may be used, memory in bytes, and this program's version."""
    affinity = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return {
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor_name(),
        "cores": affinity,
        "memory_bytes": psutil.virtual_memory().total,
        "python": platform.python_version(),
        "servekit": __version__,
    }


def _processor_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.machine())
