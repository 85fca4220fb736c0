"""When requests arrive: seconds from the start of a run. It must not know what is asked.

A schedule comes from a stream of its own, drawn for a rate of one and then scaled: the same seed gives the same pattern
at every rate, whatever the prompts, in every process, and a longer run continues a shorter one.
"""

import math
import random
from collections.abc import Iterator, Sequence
from itertools import islice, pairwise, takewhile
from pathlib import Path

import msgspec

from servekit.errors import ConfigError

ARRIVALS = ("poisson", "gamma", "constant", "trace")


def stream(seed: int, repeat: int, what: str) -> random.Random:
    """The random stream for one purpose; streams of different names are independent of each other."""
    return random.Random(f"servekit/{seed}/{repeat}/{what}")  # noqa: S311 - a schedule, no secret


def arrival_times(kind: str, rate: float, *, seed: int, repeat: int = 0, burstiness: float = 1.0) -> Iterator[float]:
    """Endless arrival times at `rate` a second; the first gap counts from 0.

    poisson: independent exponential gaps. gamma: gaps of shape `burstiness`, below 1 in bursts, above 1 more even
    (1 is poisson). constant: equal gaps.
    """
    rng = stream(seed, repeat, "arrivals")
    time = 0.0
    while True:
        time += _unit_gap(kind, rng, burstiness)
        yield time / rate


def limited(times: Iterator[float], *, requests: int | None, duration: float | None) -> list[float]:
    """The first `requests` arrivals, those before `duration` seconds, or what meets both."""
    if duration is not None:
        times = takewhile(lambda time: time < duration, times)
    if requests is None and duration is None:
        raise ValueError("an endless schedule")
    return list(islice(times, requests))


def read_trace(path: str) -> list[float]:
    """Arrival times from a file, the first at 0: one number a line, or JSON lines with `arrival_s` (or `timestamp`).

    Raises ConfigError.
    """
    times = sorted(row["arrival_s"] for row in read_trace_rows(path))
    return [time - times[0] for time in times]


def stretched(times: Sequence[float], rate: float) -> list[float]:
    """The same pattern at another mean rate."""
    span = times[-1] - times[0] if times else 0.0
    factor = (len(times) - 1) / rate / span if span > 0 else 1.0
    return [time * factor for time in times]


def read_trace_rows(path: str) -> list[dict[str, float]]:
    """Every row of a trace: `arrival_s`, and whatever other numbers its JSON lines have. Raises ConfigError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the trace {path} cannot be read: {error}", param="trace") from error
    rows = [_trace_row(line, path, number) for number, line in enumerate(lines, start=1) if line.strip()]
    if not rows:
        raise ConfigError(f"the trace {path} has no arrivals", param="trace")
    return rows


def dispersion(times: Sequence[float]) -> tuple[float, int]:
    """Variance over mean of the counts in equal windows, and the number of windows; 1 for a Poisson process.

    The windows hold four arrivals on average. With fewer than ten windows the answer is NaN.
    """
    if len(times) < 2 or times[-1] <= times[0]:
        return math.nan, 0
    start, span = times[0], times[-1] - times[0]
    windows = len(times) // 4
    if windows < 10:
        return math.nan, windows
    counts = [0] * windows
    for time in times[1:]:
        counts[min(int((time - start) / span * windows), windows - 1)] += 1
    mean = sum(counts) / windows
    return sum((count - mean) ** 2 for count in counts) / (windows - 1) / mean, windows


def lag1_correlation(times: Sequence[float]) -> float:
    """Correlation of each gap with the next; near 0 for independent gaps, NaN for equal ones or fewer than ten."""
    gaps = [later - earlier for earlier, later in pairwise(times)]
    if len(gaps) < 10:
        return math.nan
    mean = sum(gaps) / len(gaps)
    spread = sum((gap - mean) ** 2 for gap in gaps)
    if spread <= 1e-12 * mean * mean * len(gaps):
        return math.nan
    return sum((a - mean) * (b - mean) for a, b in pairwise(gaps)) / spread


def _unit_gap(kind: str, rng: random.Random, burstiness: float) -> float:
    if kind == "constant":
        return 1.0
    if kind == "gamma":
        return rng.gammavariate(burstiness, 1.0 / burstiness)
    return rng.expovariate(1.0)


def _trace_row(line: str, path: str, number: int) -> dict[str, float]:
    wrong = ConfigError(
        f"line {number} of the trace {path} has no arrival time",
        hint='write a number of seconds, or {"arrival_s": 0.5}',
        param="trace",
    )
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise wrong from error
    if isinstance(row, int | float):
        row = {"arrival_s": row}
    if not isinstance(row, dict):
        raise wrong
    numbers = {key: float(value) for key, value in row.items() if type(value) in (int, float)}
    arrival = numbers.get("arrival_s", numbers.get("timestamp"))
    if arrival is None or not math.isfinite(arrival) or arrival < 0:
        raise wrong
    return {**numbers, "arrival_s": arrival}
