"""Two run files side by side: how much each metric changed, and whether that is more than chance.

Runs of the same seed, rate and load are compared request by request: both saw the same arrivals, so what remains is the
server. It must not know how the result is shown.
"""

from collections.abc import Callable
from dataclasses import dataclass

from servekit.bench.result import Record, Run, RunFile
from servekit.bench.stats import bootstrap_interval, change_interval, percentile
from servekit.bench.times import end_to_end, time_per_output_token, time_to_first_token
from servekit.errors import InputError, InvalidMeasurement

_METRICS: tuple[tuple[str, Callable[[Record], float | None], float], ...] = (
    ("TTFT p50", time_to_first_token, 0.5),
    ("TTFT p95", time_to_first_token, 0.95),
    ("TPOT p50", time_per_output_token, 0.5),
    ("E2E p50", end_to_end, 0.5),
    ("E2E p95", end_to_end, 0.95),
)
_SAME_LOAD = ("endpoint", "prompts", "outputs", "arrival", "no_cache")
_MIN_REPEATS = 3
_CLOCK_STEP_S = 2e-6

_Point = tuple[float | None, int | None]


@dataclass(frozen=True, slots=True)
class Change:
    """One metric at one point. `change` is relative to `before`, and so is its 95 % `interval`, None if unknown.

    `is_paired` says that the same requests were compared.
    """

    rate: float | None
    concurrency: int | None
    metric: str
    unit: str
    before: float
    after: float
    interval: tuple[float, float] | None
    higher_is_better: bool
    is_paired: bool

    @property
    def change(self) -> float:
        """0.1 for a tenth more than before."""
        return self.after / self.before - 1 if self.before else 0.0

    @property
    def worse_by(self) -> float:
        """The change, positive for the worse."""
        return -self.change if self.higher_is_better else self.change

    @property
    def is_beyond_chance(self) -> bool:
        """Whether the interval excludes no change; an unknown interval cannot."""
        return self.interval is not None and (self.interval[0] > 0 or self.interval[1] < 0)

    def is_regression(self, limit: float) -> bool:
        """Worse by more than `limit`, and not by chance as far as that is known."""
        return self.worse_by > limit and (self.interval is None or self.is_beyond_chance)


def compare(before: RunFile, after: RunFile) -> list[Change]:
    """Every metric at every point that both files have.

    Raises InvalidMeasurement when a run of either is not valid, InputError when they have no point in common.
    """
    for name, run_file in (("first", before), ("second", after)):
        for run in run_file.runs:
            if not run.valid:
                raise InvalidMeasurement(f"the {name} file has a run that is not valid: {run.invalid_reasons[0]}")
    points = _by_point(before), _by_point(after)
    common = [point for point in points[0] if point in points[1]]
    if not common:
        raise InputError("the two files have no rate and no concurrency in common", hint="measure both at one rate")
    seed = before.seed or 0
    return [change for point in common for change in _changes(point, points[0][point], points[1][point], seed)]


def different_loads(before: RunFile, after: RunFile) -> list[str]:
    """The settings of the load in which the two files differ, so that their numbers cannot be compared as they are."""
    return [name for name in _SAME_LOAD if before.load.get(name) != after.load.get(name)]


def _by_point(run_file: RunFile) -> dict[_Point, list[Run]]:
    points: dict[_Point, list[Run]] = {}
    for run in run_file.runs:
        points.setdefault((run.rate, run.concurrency), []).append(run)
    return points


def _changes(point: _Point, before: list[Run], after: list[Run], seed: int) -> list[Change]:
    pairs = _pairs(before, after)
    found = []
    for name, read, share in _METRICS:
        change = _latency_change(point, name, read, share, before, after, pairs, seed)
        if change is not None:
            found.append(change)
    found.append(_rate_change(point, before, after))
    return found


def _pairs(before: list[Run], after: list[Run]) -> list[tuple[Record, Record]] | None:
    """The same requests in both, None when the two schedules differ."""
    firsts, seconds = _records(before), _records(after)
    if len(firsts) != len(seconds):
        return None
    for first, second in zip(firsts, seconds, strict=True):
        is_same = (
            abs(first.scheduled_s - second.scheduled_s) <= _CLOCK_STEP_S and first.asked_tokens == second.asked_tokens
        )
        if not is_same:
            return None
    return list(zip(firsts, seconds, strict=True))


def _records(runs: list[Run]) -> list[Record]:
    return [record for run in sorted(runs, key=lambda run: run.repeat) for record in run.records]


def _latency_change(
    point: _Point,
    name: str,
    read: Callable[[Record], float | None],
    share: float,
    before: list[Run],
    after: list[Run],
    pairs: list[tuple[Record, Record]] | None,
    seed: int,
) -> Change | None:
    if pairs is not None:
        both = [
            (x, y)
            for first, second in pairs
            if first.ok and second.ok and (x := read(first)) is not None and (y := read(second)) is not None
        ]
        firsts, seconds = [x for x, _ in both], [y for _, y in both]
    else:
        firsts, seconds = _values(before, read), _values(after, read)
    if len(firsts) < 2 or len(seconds) < 2:
        return None
    old, new = percentile(firsts, share), percentile(seconds, share)
    if old <= 0:
        return None

    interval = change_interval(firsts, seconds, share, is_paired=pairs is not None, seed=seed)
    return Change(*point, name, "s", old, new, interval, higher_is_better=False, is_paired=pairs is not None)


def _rate_change(point: _Point, before: list[Run], after: list[Run]) -> Change:
    """Output tokens a second (requests, if there are none); an interval takes repeats of both."""
    has_tokens = any(run.throughput.output_tokens_per_s for run in (*before, *after))
    firsts, seconds = _rates(before, has_tokens), _rates(after, has_tokens)
    interval = None
    if len(firsts) == len(seconds) >= _MIN_REPEATS:
        interval = bootstrap_interval(
            len(firsts),
            lambda positions: sum(seconds[i] for i in positions) / max(sum(firsts[i] for i in positions), 1e-12) - 1,
            block=1,
        )
    name, unit = ("output tokens/s", "tok/s") if has_tokens else ("requests/s", "req/s")
    old, new = sum(firsts) / len(firsts), sum(seconds) / len(seconds)
    return Change(*point, name, unit, old, new, interval, higher_is_better=True, is_paired=interval is not None)


def _rates(runs: list[Run], has_tokens: bool) -> list[float]:
    return [run.throughput.output_tokens_per_s if has_tokens else run.throughput.requests_per_s for run in runs]


def _values(runs: list[Run], read: Callable[[Record], float | None]) -> list[float]:
    return [value for record in _records(runs) if record.ok and (value := read(record)) is not None]
