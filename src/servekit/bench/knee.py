"""Searches the knee: the highest rate at which enough requests keep the SLO. It knows not how one is measured."""

import math
from collections.abc import Awaitable, Callable

from servekit.bench.result import Knee, Run

_PRECISION = 1.1
_MAX_RUNS = 12
_LOWEST = 1 / 64


async def find_knee(
    measure_at: Callable[[float], Awaitable[Run]], start: float, *, min_attainment: float
) -> tuple[Knee, list[Run]]:
    """Double or halve from `start` until one rate keeps the SLO and another misses it, then close in to 10 %.

    A rate misses when fewer than `min_attainment` of its requests keep the SLO, or when they pile up, for then it is
    only a matter of time. The search ends at a run that is not valid: there the generator is what is measured.
    """
    met: float | None = None
    missed: float | None = None
    runs: list[Run] = []
    rate = start
    while len(runs) < _MAX_RUNS:
        run = await measure_at(rate)
        runs.append(run)
        if not run.valid:
            break
        if _keeps(run, min_attainment):
            met = rate
        else:
            missed = rate
        if met is None and rate <= start * _LOWEST:
            break
        if met is not None and missed is not None and missed / met <= _PRECISION:
            break
        rate = _next_rate(met, missed)
    return Knee(rate=met, missed_rate=missed, min_attainment=min_attainment), runs


def _keeps(run: Run, min_attainment: float) -> bool:
    piles_up = run.window is not None and not run.window.steady
    return run.goodput is not None and run.goodput.attainment >= min_attainment and not piles_up


def _next_rate(met: float | None, missed: float | None) -> float:
    if met is None:
        assert missed is not None
        return _round(missed / 2)
    return _round(met * 2 if missed is None else math.sqrt(met * missed))


def _round(rate: float) -> float:
    """Three significant digits: what the schedule and the reader both keep."""
    return float(f"{rate:.3g}")
