"""The most memory that a piece of work had in use. It must not know what the work is."""

from pathlib import Path
from typing import Final

from servekit.config import DeviceChoice

_STATUS: Final = Path("/proc/self/status")
_RESET: Final = Path("/proc/self/clear_refs")


class PeakMemory:
    """Bytes at the peak since `restart`: of the whole process on a CPU, of torch's own allocations on a GPU.

    `peak` is None where the system does not say (the process's peak can be reset on Linux only).
    """

    def __init__(self, device: DeviceChoice) -> None:
        self._on_host = device == "cpu"
        self._can_reset = True

    def restart(self) -> None:
        """Forget the peak so far."""
        if not self._on_host:
            import torch

            torch.accelerator.reset_peak_memory_stats()
            return
        try:
            _RESET.write_text("5", encoding="utf-8")  # proc(5): resets the peak resident set size
        except OSError:
            self._can_reset = False

    def peak(self) -> int | None:
        """Bytes, or None when unknown."""
        if not self._on_host:
            import torch

            return int(torch.accelerator.max_memory_allocated())
        if not self._can_reset:
            return None
        try:
            lines = _STATUS.read_text(encoding="utf-8").splitlines()
        except OSError:
            return None
        found = next((line.split() for line in lines if line.startswith("VmHWM:")), None)
        return None if found is None else int(found[1]) * 1024
