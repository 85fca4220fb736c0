"""Statistics of measured values: percentiles, intervals, rates of success. It must not know what the values mean."""

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

from servekit.bench.result import Summary

_RESAMPLES = 1000
_MAX_DRAWN = 4_000_000
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}


def percentile(values: Sequence[float], share: float) -> float:
    """Linear interpolation between the order statistics, as NumPy does by default; `share` is from 0 to 1."""
    return _quantile(sorted(values), share)


def summarize(values: Sequence[float], *, seed: int = 0, block: int | None = None) -> Summary | None:
    """The summary of at least one value, else None. The intervals are those of `bootstrap_interval`."""
    if not values:
        return None
    ordered = sorted(values)
    points = {name: _quantile(ordered, share) for name, share in _QUANTILES.items()}
    return Summary(
        count=len(ordered),
        mean=math.fsum(ordered) / len(ordered),
        max=ordered[-1],
        ci95=_intervals(values, seed, block),
        **points,
    )


def bootstrap_interval(
    size: int,
    statistic: Callable[[Sequence[int]], float],
    *,
    seed: int = 0,
    block: int | None = None,
    resamples: int = _RESAMPLES,
) -> tuple[float, float]:
    """The 95 % interval of a statistic of `size` observations, from resampled lists of their positions.

    Neighbours share a queue and are no independent draws, so whole blocks of `block` of them are drawn (Kuensch's
    moving blocks); without it the cube root of the size. The same seed gives the same interval.
    """
    rng = random.Random(seed)  # noqa: S311 - resampling, no secret
    block = block or max(1, round(size ** (1 / 3)))
    found = sorted(statistic(_resample(size, block, rng)) for _ in range(resamples))
    return _quantile(found, 0.025), _quantile(found, 0.975)


def change_interval(
    before: Sequence[float], after: Sequence[float], share: float, *, is_paired: bool, seed: int = 0
) -> tuple[float, float]:
    """The 95 % interval of the relative change of a percentile, by blocks as in `bootstrap_interval`.

    Paired values belong to the same request and are drawn together; others are drawn independently.
    """
    import numpy as np

    rng = np.random.default_rng(seed)
    first, second = np.asarray(before, dtype=np.float64), np.asarray(after, dtype=np.float64)
    drawn = _draw(rng, len(first), None, _RESAMPLES)
    old = np.quantile(first[drawn], share, axis=1)
    new = np.quantile(second[drawn if is_paired else _draw(rng, len(second), None, _RESAMPLES)], share, axis=1)
    low, high = np.quantile(new / np.maximum(old, 1e-12) - 1, [0.025, 0.975])
    return float(low), float(high)


def wilson_interval(successes: int, trials: int) -> tuple[float, float]:
    """Wilson's 95 % interval of a share; (0, 1) without trials."""
    if trials == 0:
        return 0.0, 1.0
    z = 1.959963984540054
    share = successes / trials
    spread = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    centre, scale = share + z * z / (2 * trials), 1 + z * z / trials
    return max(0.0, (centre - spread) / scale), min(1.0, (centre + spread) / scale)


def _quantile(ordered: Sequence[float], share: float) -> float:
    position = (len(ordered) - 1) * share
    low = math.floor(position)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (position - low)


def _resample(size: int, block: int, rng: random.Random) -> list[int]:
    starts = size - block + 1
    positions: list[int] = []
    while len(positions) < size:
        start = int(rng.random() * starts)
        positions.extend(range(start, start + block))
    return positions[:size]


def _intervals(values: Sequence[float], seed: int, block: int | None) -> dict[str, tuple[float, float]]:
    """Intervals of the mean and the percentiles, all from the same resamples; none from a single value."""
    if len(values) < 2:
        return {}
    import numpy as np

    data = np.asarray(values, dtype=np.float64)
    rng = np.random.default_rng(seed)
    found = []
    # Long streams of token gaps need fewer resamples for the same precision, and not all of them in memory at once.
    left = max(100, min(_RESAMPLES, _MAX_DRAWN // len(data)))
    while left > 0:
        now = min(left, max(1, _MAX_DRAWN // len(data)))
        left -= now
        samples = data[_draw(rng, len(data), block, now)]
        found.append(np.vstack([samples.mean(axis=1), np.quantile(samples, list(_QUANTILES.values()), axis=1)]))
    low, high = np.quantile(np.hstack(found), [0.025, 0.975], axis=1)
    return {
        name: (float(lower), float(upper)) for name, lower, upper in zip(("mean", *_QUANTILES), low, high, strict=True)
    }


def _draw(rng: Any, size: int, block: int | None, resamples: int) -> Any:
    """Positions of the resamples, [resamples, size]."""
    import numpy as np

    block = block or max(1, round(size ** (1 / 3)))
    starts = rng.integers(0, size - block + 1, size=(resamples, -(-size // block)))
    return (starts[:, :, None] + np.arange(block)).reshape(resamples, -1)[:, :size]
