"""Bytes and how people write them. Binary units only: 1 KiB is 1,024 bytes."""

import re

from servekit.errors import ConfigError

_FACTORS = {"": 1, "b": 1, "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_SIZE = re.compile(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*")


def parse_bytes(text: str, *, name: str) -> int:
    """`8GiB`, `512MiB`, `1.5 GiB`, `8GB` (decimal) or a plain number of bytes. Raises ConfigError naming `name`."""
    match = _SIZE.fullmatch(text)
    factor = None
    if match:
        unit = match.group(2).lower()
        factor = _FACTORS.get(unit) or _DECIMAL.get(unit)
    if match is None or factor is None:
        raise ConfigError(f"{name}: {text!r} is not a size", hint="write it like 8GiB, 512MiB or 1000000", param=name)
    return int(float(match.group(1)) * factor)


def format_bytes(count: int) -> str:
    """The largest binary unit that leaves at least one whole: 46080 -> `45.0 KiB`."""
    size = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024.0:
            return f"{count} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024.0
    return f"{size:.1f} TiB"
