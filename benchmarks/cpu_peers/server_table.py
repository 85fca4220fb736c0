"""What loads of two servers showed, as a table of 80 columns. Pure functions over run files."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from benchmarks.cpu_peers.table import Spread
from servekit.bench.result import Run, Summary

Values = dict[str, list[float]]
"""One value a round, by metric."""


@dataclass(frozen=True, slots=True)
class Metric:
    """A row: `factor` turns the stored value into the unit shown; more is better, or less."""

    name: str
    label: str
    factor: float
    more_is_better: bool


METRICS = (
    Metric("requests_per_s", "capacity, requests/s", 1, True),
    Metric("tokens_per_s", "capacity, tokens/s", 1, True),
    Metric("ttft_p95_s", "TTFT p95, ms", 1000, False),
    Metric("tpot_p50_s", "TPOT p50, ms", 1000, False),
    Metric("e2e_p95_s", "E2E p95, ms", 1000, False),
)


@dataclass(slots=True)
class ServerOutcome:
    """A server in one weight format. `trial` is its capacity (requests/s) in the loop that chose the format.

    Only the `chosen` one of a side has `values`. `invalid` counts runs whose own audit failed.
    """

    side: str
    name: str
    status: str | None = None
    trial: float | None = None
    chosen: bool = False
    peak_bytes: int | None = None
    invalid: int = 0
    values: Values = field(default_factory=dict)

    @property
    def capacity(self) -> float:
        """Median of the closed loops, requests/s."""
        return statistics.median(self.values["requests_per_s"])


def add(values: Values, loop: str, run: Run) -> Values:
    """Append what a run shows: a closed loop the capacity, between filling and draining, an open one the latencies."""
    if loop == "closed":
        throughput = run.throughput if run.window is None else run.window.throughput
        found = {"requests_per_s": throughput.requests_per_s, "tokens_per_s": throughput.output_tokens_per_s}
    else:
        latency = run.latency
        found = {
            "ttft_p95_s": _of(latency.ttft_s, "p95"),
            "tpot_p50_s": _of(latency.tpot_s, "p50"),
            "e2e_p95_s": _of(latency.e2e_s, "p95"),
        }
    for name, value in found.items():
        values.setdefault(name, []).append(value)
    return values


def render_servers(outcomes: Sequence[ServerOutcome], slots: int) -> str:
    """Metrics of the chosen two with their ratio, then the capacities and memory of all formats tried."""
    ours, rival = (_chosen(outcomes, side) for side in ("servekit", "llama-server"))
    lines = [f"{slots} slots"]
    if ours and rival:
        lines[0] = f"{lines[0]:22}{ours.name:>22}{rival.name:>24}{'ratio':>8}"
        for metric in METRICS:
            pair = [outcome.values.get(metric.name) for outcome in (ours, rival)]
            if pair[0] and pair[1]:
                lines.append(_row(metric, Spread.of(pair[0]), Spread.of(pair[1])))
        if ours.invalid or rival.invalid:
            lines.append(f"{'runs to distrust':22}{ours.invalid:>22}{rival.invalid:>24}")
        lines.append("")
    for outcome in outcomes:
        peak = "" if outcome.peak_bytes is None else f", peak {outcome.peak_bytes / 2**20:.0f} MiB"
        told = outcome.status or f"{outcome.trial or 0:.2f} requests/s in one closed loop{peak}"
        lines.append(f"{outcome.name:24}{told}")
    return "\n".join(lines)


def to_json(outcome: ServerOutcome) -> dict[str, Any]:
    """All that is known of a server in one format, with the values behind each median."""
    found: dict[str, Any] = {
        name: getattr(outcome, name)
        for name in ("side", "name", "status", "trial", "chosen", "peak_bytes", "invalid", "values")
    }
    found["medians"] = {name: statistics.median(values) for name, values in outcome.values.items()}
    return found


def _row(metric: Metric, ours: Spread, rival: Spread) -> str:
    """The ratio says how many times better ours is, whichever way is better."""
    ratio = ours.median / rival.median if metric.more_is_better else rival.median / ours.median
    cells = [f"{_number(s.median * metric.factor)} {s.sides}" for s in (ours, rival)]
    return f"{metric.label:22}{cells[0]:>22}{cells[1]:>24}{ratio:>8.2f}"


def _number(value: float) -> str:
    return f"{value:.0f}" if value >= 100 else f"{value:.3g}"


def _of(summary: Summary | None, name: str) -> float:
    assert summary is not None, "a streamed load has latencies"
    value: float = getattr(summary, name)
    return value


def _chosen(outcomes: Sequence[ServerOutcome], side: str) -> ServerOutcome | None:
    return next((outcome for outcome in outcomes if outcome.side == side and outcome.chosen), None)
