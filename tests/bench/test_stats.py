"""Percentiles and intervals against NumPy and known values."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from servekit.bench.stats import bootstrap_interval, change_interval, percentile, summarize, wilson_interval

E2E = [2.0, 3.0, 2.5, 9.0, 3.5, 2.0, 4.0, 2.5, 3.0, 12.0]


def test_percentiles_interpolate_linearly() -> None:
    summary = summarize(E2E)

    assert summary is not None
    assert summary.p50 == 3.0
    assert summary.p95 == pytest.approx(10.65)
    assert summary.mean == pytest.approx(4.35)
    assert (summary.count, summary.max) == (10, 12.0)
    for share in (0.0, 0.013, 0.5, 0.99, 1.0):
        assert percentile(E2E, share) == pytest.approx(float(np.quantile(E2E, share)), rel=1e-12)


def test_nothing_has_no_summary_and_one_value_no_interval() -> None:
    assert summarize([]) is None
    one = summarize([4.0])
    assert one is not None
    assert (one.p50, one.p99, one.ci95) == (4.0, 4.0, {})


def test_the_same_seed_gives_the_same_interval() -> None:
    first, second, other = (summarize(E2E * 5, seed=seed) for seed in (1, 1, 2))

    assert first == second
    assert other is not None
    assert first is not None
    assert first.ci95 != other.ci95


def test_intervals_cover_as_often_as_they_say() -> None:
    """95 % intervals of the mean of 60 independent values: between 85 and 99 of 100 hold the truth."""
    rng = random.Random(5)
    covered = 0
    for seed in range(100):
        values = [rng.gauss(10.0, 2.0) for _ in range(60)]

        def mean(positions: Sequence[int], values: list[float] = values) -> float:
            return sum(values[position] for position in positions) / 60

        low, high = bootstrap_interval(60, mean, seed=seed, resamples=200)
        covered += low <= 10.0 <= high

    assert 85 <= covered <= 99


def test_blocks_widen_the_interval_of_values_that_follow_each_other() -> None:
    rng, values, level = random.Random(1), [], 0.0
    for _ in range(400):
        level = 0.95 * level + rng.gauss(0.0, 1.0)
        values.append(10 + level)
    apart, together = summarize(values, block=1), summarize(values, block=40)

    assert apart is not None
    assert together is not None
    width = [summary.ci95["mean"][1] - summary.ci95["mean"][0] for summary in (apart, together)]
    assert width[1] > 2 * width[0]


def test_pairing_narrows_the_interval_of_a_change() -> None:
    rng = random.Random(2)
    before = [rng.lognormvariate(0.0, 1.0) for _ in range(200)]
    after = [value * 1.1 for value in before]
    paired = change_interval(before, after, 0.5, is_paired=True)
    apart = change_interval(before, after, 0.5, is_paired=False)

    assert list(paired) == pytest.approx([0.1, 0.1])
    assert apart[1] - apart[0] > 0.2


@pytest.mark.parametrize(
    ("successes", "trials", "expected"),
    [(0, 10, (0.0, 0.2775)), (10, 10, (0.7225, 1.0)), (50, 100, (0.4038, 0.5962)), (0, 0, (0.0, 1.0))],
)
def test_wilson(successes: int, trials: int, expected: tuple[float, float]) -> None:
    assert wilson_interval(successes, trials) == pytest.approx(expected, abs=1e-4)
