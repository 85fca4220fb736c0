"""Values of `servekit cost` options: numbers over 0 in one unit each. A wrong one is refused by the option's name."""

import math
import re

from servekit.errors import ConfigError

_NUMBER = re.compile(
    r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?|[-+]?(?:nan|inf(?:inity)?))\s*(\S.*)?", re.IGNORECASE
)
_UNITS = {
    "--tokens-per-second": ("tok/s", "tokens/s"),
    "--price-per-hour": ("/h",),
    "--watts": ("W",),
    "--seconds": ("s",),
}


def parse_positive(text: str | None, name: str) -> float | None:
    """A finite number over 0, with or without the option's own unit. None stays None. Raises ConfigError."""
    return None if text is None else _number(text, name, least=0.0, is_open=True)


def parse_price(text: str | None, name: str) -> float | None:
    """Like parse_positive, but 0 is allowed: some APIs charge nothing for prompts."""
    return None if text is None else _number(text, name, least=0.0, is_open=False)


def parse_repeats(text: str, name: str) -> list[float]:
    """One or more rates as `700,712,705`, all of them repeats of the same measurement. Raises ConfigError."""
    return [_number(part, name, least=0.0, is_open=True) for part in text.split(",")]


def parse_whole(text: str | None, name: str) -> int | None:
    """A whole number of 1 or more; None stays None. Raises ConfigError."""
    if text is None:
        return None
    value = _number(text, name, least=1.0, is_open=False)
    if value != int(value):
        raise _wrong(name, f"must be a whole number, not {text!r}")
    return int(value)


def parse_loads(text: str) -> list[float]:
    """`10,30,50,100` in percent as shares, each over 0 and up to 100. Raises ConfigError."""
    loads = [
        _number(part.strip().removesuffix("%"), "--load", least=0.0, is_open=True) / 100 for part in text.split(",")
    ]
    if max(loads) > 1:
        raise _wrong("--load", f"is in percent of what one measured machine serves, up to 100, not {text!r}")
    return loads


def _number(text: str, name: str, *, least: float, is_open: bool) -> float:
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        raise _wrong(name, f"must be a number, not {text!r}")
    unit = match.group(2)
    own = _UNITS.get(name, ())
    if unit is not None and unit not in own:
        allowed = f"write it as a plain number, in {own[0]}" if own else "write it as a plain number"
        raise _wrong(name, f"has the unit {unit!r} in {text.strip()!r}", allowed)
    value = float(match.group(1))
    if not math.isfinite(value) or value < least or (is_open and value == least):
        raise _wrong(name, f"must be {'over' if is_open else 'at least'} {least:g}, not {text.strip()}")
    return value


def _wrong(name: str, what: str, hint: str | None = None) -> ConfigError:
    return ConfigError(f"{name} {what}", hint=hint, param=name.strip("-").replace("-", "_"))
