"""Energy counters of this machine: RAPL of its processors, NVML of its NVIDIA GPUs. It must not know what ran."""

import ctypes
from dataclasses import dataclass
from pathlib import Path

_POWERCAP = Path("/sys/class/powercap")


@dataclass(frozen=True, slots=True)
class EnergyReading:
    """Joules on every counter that could be read, by its name. RAPL counters wrap at `wraps`."""

    joules: dict[str, float]
    wraps: dict[str, float]

    def since(self, before: "EnergyReading") -> float | None:
        """Joules used in between, over the counters that both have; None without any."""
        names = self.joules.keys() & before.joules.keys()
        if not names:
            return None
        used = 0.0
        for name in names:
            change = self.joules[name] - before.joules[name]
            used += change if change >= 0 else change + self.wraps.get(name, 0.0)
        return used


def read_energy(root: Path = _POWERCAP) -> EnergyReading:
    """All counters that this user may read; often none: RAPL is the superuser's on most systems."""
    joules, wraps = {}, {}
    for folder in sorted(root.glob("intel-rapl:?")):  # whole packages; their parts have a second colon
        used, most = _number(folder / "energy_uj"), _number(folder / "max_energy_range_uj")
        if used is not None:
            joules[folder.name] = used / 1e6
            wraps[folder.name] = (most or 0) / 1e6
    joules |= _gpu_joules()
    return EnergyReading(joules, wraps)


def _number(path: Path) -> int | None:
    try:
        text = path.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return int(text) if text.isdecimal() else None


def _gpu_joules() -> dict[str, float]:
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return {}
    if nvml.nvmlInit_v2() != 0:
        return {}
    try:
        count, found = ctypes.c_uint(), {}
        if nvml.nvmlDeviceGetCount_v2(ctypes.byref(count)) != 0:
            return {}
        for index in range(count.value):
            device, millijoules = ctypes.c_void_p(), ctypes.c_ulonglong()
            if nvml.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) != 0:
                continue
            if nvml.nvmlDeviceGetTotalEnergyConsumption(device, ctypes.byref(millijoules)) == 0:
                found[f"gpu{index}"] = millijoules.value / 1e3
        return found
    finally:
        nvml.nvmlShutdown()
