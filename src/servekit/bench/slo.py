"""Service-level objectives: bounds on one request's times, and how many requests keep them all."""

import math
import re
from collections.abc import Mapping, Sequence

from servekit.bench.result import Goodput, Record
from servekit.bench.stats import wilson_interval
from servekit.bench.times import end_to_end, time_per_output_token, time_to_first_token
from servekit.errors import ConfigError

_METRICS = {"ttft": time_to_first_token, "tpot": time_per_output_token, "e2e": end_to_end}
_DURATION = re.compile(r"(\d+(?:\.\d+)?|\.\d+)\s*(ms|s|min)?")
_FACTORS = {None: 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0}


def parse_duration(text: str, *, name: str) -> float:
    """`2s`, `100ms`, `1.5min`, or a number of seconds; more than 0. Raises ConfigError naming `name`."""
    match = _DURATION.fullmatch(text.strip())
    seconds = float(match.group(1)) * _FACTORS[match.group(2)] if match else 0.0
    if seconds <= 0 or not math.isfinite(seconds):
        raise ConfigError(f"{name}: {text!r} is not a duration", hint="write it like 2s or 100ms", param=name)
    return seconds


def parse_slo(text: str) -> dict[str, float]:
    """`ttft=2s,tpot=100ms,e2e=10s` as seconds by metric. Raises ConfigError naming --slo."""
    slo: dict[str, float] = {}
    for part in text.split(","):
        name, equals, bound = part.strip().partition("=")
        if not equals or name not in _METRICS or name in slo:
            raise ConfigError(
                f"--slo: {part.strip()!r} is not a bound", hint="write it like ttft=2s,tpot=100ms,e2e=10s", param="slo"
            )
        slo[name] = parse_duration(bound, name=f"--slo {name}")
    return slo


def goodput(records: Sequence[Record], slo: Mapping[str, float], duration: float) -> Goodput:
    """How many of all requests sent keep every bound, over `duration` seconds. A failed request keeps none.

    A bound on what an answer does not have (a gap between tokens, in an answer of one) is kept.
    """
    kept = {name: [_keeps(record, name, bound) for record in records] for name, bound in slo.items()}
    good = [record for position, record in enumerate(records) if all(kept[name][position] for name in kept)]
    tokens = sum(record.output_tokens or 0 for record in good)
    return Goodput(
        slo=dict(slo),
        good_requests=len(good),
        attainment=len(good) / len(records) if records else 0.0,
        attainment_ci95=wilson_interval(len(good), len(records)),
        by_metric={name: sum(values) / len(values) if values else 0.0 for name, values in kept.items()},
        good_requests_per_s=len(good) / duration if duration > 0 else 0.0,
        good_output_tokens=tokens,
        good_output_tokens_per_s=tokens / duration if duration > 0 else 0.0,
    )


def _keeps(record: Record, name: str, bound: float) -> bool:
    if not record.ok:
        return False
    value = _METRICS[name](record)
    return value is None or value <= bound
