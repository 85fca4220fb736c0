"""Rates of many systems as a table of 80 columns: medians, spreads, the ratio to the best peer. Pure functions."""

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cpu_peers.systems import Role

_NAME, _FIRST, _CELL, _LAST = 18, 8, 8, 6
_ROOM = 6  # what the first number needs beside a long name


@dataclass(frozen=True, slots=True)
class Spread:
    """A median, and the lowest and highest of the values it is taken from."""

    median: float
    low: float
    high: float

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        """Of at least one value."""
        return cls(statistics.median(values), min(values), max(values))

    @property
    def sides(self) -> str:
        """How far the lowest and the highest are from the median, in percent of it: `-3+12%`."""
        return f"-{100 * (1 - self.low / self.median):.0f}+{100 * (self.high / self.median - 1):.0f}%"


@dataclass(slots=True)
class Outcome:
    """What was found of one system. `rates` has a list of tokens/s for each point that was measured.

    `status` says why it was not measured, or not to the end; None when it was. `text` is its answer to a question.
    """

    name: str
    role: Role
    version: str = ""
    status: str | None = None
    text: str = ""
    load_s: float | None = None
    peak_bytes: int | None = None
    rates: dict[str, list[float]] = field(default_factory=dict)

    def spread(self, point: str) -> Spread | None:
        """Of a point, None where it was not measured."""
        values = self.rates.get(point)
        return Spread.of(values) if values else None


@dataclass(frozen=True, slots=True)
class Ratio:
    """The best of ours to the best peer, by the medians of one point."""

    point: str
    ours: str
    ours_rate: float
    peer: str
    peer_rate: float

    @property
    def value(self) -> float:
        """Over 1 where ours is faster."""
        return self.ours_rate / self.peer_rate


def ratios(outcomes: Iterable[Outcome], points: Iterable[str]) -> list[Ratio]:
    """One for each point that one of ours and a peer were measured at."""
    outcomes = list(outcomes)
    found = []
    for point in points:
        ours, peer = _best(outcomes, point, "ours"), _best(outcomes, point, "peer")
        if ours and peer:
            found.append(Ratio(point, *ours, *peer))
    return found


def render(outcomes: Sequence[Outcome], points: Sequence[str]) -> str:
    """A row of medians and a row of spreads for each system, then ratios; what was not measured is named below."""
    found = {ratio.point: ratio for ratio in ratios(outcomes, points)}
    lines = [_row("", [point.split()[0] for point in points], "peak"), _row("", [p.split()[-1] for p in points], "MiB")]
    for outcome in outcomes:
        spreads = [outcome.spread(point) for point in points]
        if not any(spreads):
            continue
        peak = "" if outcome.peak_bytes is None else f"{outcome.peak_bytes / 2**20:.0f}"
        lines.append(_row(outcome.name, [_rate(spread.median) if spread else "" for spread in spreads], peak))
        lines.append(_row("", [spread.sides if spread else "" for spread in spreads], ""))
    if found:
        lines.append(_row("best peer", [_rate(found[p].peer_rate) if p in found else "" for p in points], ""))
        lines.append(_row("best servekit", [_rate(found[p].ours_rate) if p in found else "" for p in points], ""))
        lines.append(_row("ratio", [f"{found[p].value:.2f}" if p in found else "" for p in points], ""))
        lines += ["", *(f"{r.point}: {r.ours} over {r.peer}, {r.value:.2f}" for r in found.values())]
    lines += ["", *(f"{outcome.name}: {outcome.status}" for outcome in outcomes if outcome.status)]
    return "\n".join(lines).rstrip()


def to_json(outcome: Outcome, points: Iterable[str]) -> dict[str, Any]:
    """All that is known of a system, with the values behind each median."""
    found: dict[str, Any] = {
        name: getattr(outcome, name) for name in ("name", "role", "version", "status", "text", "load_s", "peak_bytes")
    }
    measured = {point: spread for point in points if (spread := outcome.spread(point))}
    found["tokens_per_s"] = {
        point: {"median": spread.median, "low": spread.low, "high": spread.high, "values": outcome.rates[point]}
        for point, spread in measured.items()
    }
    return found


def _best(outcomes: Sequence[Outcome], point: str, role: Role) -> tuple[str, float] | None:
    medians = [(o.name, spread.median) for o in outcomes if o.role == role and (spread := o.spread(point))]
    return max(medians, key=lambda item: item[1], default=None)


def _rate(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"


def _row(name: str, cells: Sequence[str], last: str) -> str:
    """A line; a name that leaves no room for the first number stands above it."""
    if len(name) > _NAME + _FIRST - _ROOM:
        return f"{name}\n{_row('', cells, last)}"
    first, *others = cells
    return (
        f"{name}{first:>{_NAME + _FIRST - len(name)}}{''.join(f'{c:>{_CELL}}' for c in others)}{last:>{_LAST}}".rstrip()
    )
