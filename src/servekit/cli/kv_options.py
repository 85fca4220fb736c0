"""Values of `servekit kv` options as people write them: 10%, 8GiB, 3.35TB/s."""

from fractions import Fraction
from math import isfinite

from servekit.errors import ConfigError
from servekit.kvcalc.machine import MachineMemory, machine_memory, measure_copy_bandwidth
from servekit.kvcalc.plan import Arrivals
from servekit.units import parse_bytes


def parse_memory(text: str) -> MachineMemory:
    """`auto` is this machine's GPU or RAM, anything else a size. Raises ConfigError naming the option."""
    if text == "auto":
        return machine_memory()
    return MachineMemory(_positive(text, "--memory"), "given")


def parse_kv_memory(text: str | None) -> int | None:
    """A size, or None when the option was not given."""
    return None if text is None else _positive(text, "--kv-memory")


def parse_reserve(text: str) -> Fraction | int:
    """A share such as 10%, or a size."""
    if not text.endswith("%"):
        return parse_bytes(text, name="--reserve")
    try:
        share = Fraction(text[:-1].strip()) / 100
    except ValueError as error:
        raise ConfigError(f"--reserve: {text!r} is not a share", hint="write it like 10% or 1GiB") from error
    if not 0 <= share < 1:
        raise ConfigError(f"--reserve: {text!r} must be from 0% to below 100%", param="reserve")
    return share


def parse_bandwidth(text: str | None) -> float | None:
    """Bytes a second: `3.35TB/s`, `400GB/s`; the `/s` may be left out."""
    return None if text is None else float(_positive(text.strip().removesuffix("/s"), "--bandwidth"))


def measured_bandwidth() -> float:
    """Bytes a second of this machine's RAM, all threads copying."""
    return measure_copy_bandwidth()


def parse_arrivals(rate: float | None, ttft: float | None, tpot: float | None) -> Arrivals | None:
    """--rate, --ttft and --tpot go together. Raises ConfigError naming the one that is missing or not positive."""
    given = {"--rate": rate, "--ttft": ttft, "--tpot": tpot}
    if all(value is None for value in given.values()):
        return None
    for name, value in given.items():
        if value is None:
            raise ConfigError(f"{name} is missing: --rate, --ttft and --tpot go together", param=name)
        if not isfinite(value) or value < 0 or (value == 0 and name == "--rate"):
            raise ConfigError(f"{name} must be a positive number, not {value:g}", param=name)
    return Arrivals(rate or 0.0, ttft or 0.0, tpot or 0.0)


def _positive(text: str, name: str) -> int:
    size = parse_bytes(text, name=name)
    if size <= 0:
        raise ConfigError(f"{name}: must be more than 0 bytes, not {text!r}", param=name)
    return size
