"""Measured values as people read them: three digits and a unit. It must not know what they measure."""


def seconds(value: float | None) -> str:
    """`12.3 ms`, `1.23 s`, `-` for nothing measured."""
    if value is None:
        return "-"
    if abs(value) < 1.0:
        return f"{_digits(value * 1e3)} ms"
    return f"{_digits(value)} s"


def round_seconds(value: float) -> str:
    """A round number of seconds, as on an axis: `200 ms`, `10 s`."""
    return f"{value * 1e3:g} ms" if 0 < abs(value) < 1.0 else f"{value:g} s"


def number(value: float | None) -> str:
    """Three significant digits, thousands separated."""
    return "-" if value is None else _digits(value)


def share(value: float | None) -> str:
    """A share as percents."""
    return "-" if value is None else f"{value:.1%}" if value < 0.1 else f"{value:.0%}"


def _digits(value: float) -> str:
    size = abs(value)
    if size >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if size >= 9.995 else f"{value:.2f}"
