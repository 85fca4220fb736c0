"""Two run files side by side."""

import pytest

from servekit.bench.compare import Change, compare, different_loads
from servekit.bench.measure import measure
from servekit.bench.result import Record, RunFile, Target
from servekit.errors import InputError, InvalidMeasurement
from tests.bench.records import answered


def made(factor: float, *, rate: float = 2.0, shift: float = 0.0, repeats: int = 1) -> RunFile:
    """Sixty requests whose TTFT varies between 0.1 and 0.7 s, all of them times `factor`."""

    def records() -> list[Record]:
        return [
            answered(n, at=n / 2 + shift, ttft=factor * (0.1 + 0.01 * (n * 37 % 60)), gap=0.02 * factor)
            for n in range(60)
        ]

    runs = [measure(records(), rate=rate, repeat=repeat) for repeat in range(repeats)]
    return RunFile(target=Target(url="http://x"), seed=1, load={"prompts": "builtin:en"}, runs=runs)


def by_metric(before: RunFile, after: RunFile) -> dict[str, Change]:
    return {change.metric: change for change in compare(before, after)}


def test_the_same_file_has_not_changed() -> None:
    for change in compare(made(1.0), made(1.0)):
        assert change.change == 0.0
        assert not change.is_beyond_chance
        assert not change.is_regression(0.0)


def test_ten_percent_slower_is_seen_request_by_request() -> None:
    change = by_metric(made(1.0), made(1.1))["TTFT p95"]

    assert change.is_paired
    assert change.change == pytest.approx(0.1, abs=1e-3)
    assert change.interval is not None
    assert list(change.interval) == pytest.approx([0.1, 0.1], abs=1e-3)
    assert change.is_regression(0.05)
    assert not change.is_regression(0.2)
    assert not by_metric(made(1.1), made(1.0))["TTFT p95"].is_regression(0.05)


def test_other_arrivals_are_not_paired() -> None:
    change = by_metric(made(1.0), made(1.1, shift=0.01))["TTFT p50"]

    assert not change.is_paired
    assert change.interval is not None
    assert change.interval[0] < 0 < change.interval[1]
    assert not change.is_regression(0.05)


def test_throughput_needs_repeats_for_an_interval() -> None:
    once, often = (by_metric(made(1.0, repeats=n), made(1.0, repeats=n))["output tokens/s"] for n in (1, 3))

    assert once.interval is None
    assert often.interval == (0.0, 0.0)
    assert once.higher_is_better


def test_less_throughput_is_worse() -> None:
    change = Change(2.0, None, "output tokens/s", "tok/s", 100.0, 80.0, None, higher_is_better=True, is_paired=False)

    assert change.worse_by == pytest.approx(0.2)
    assert change.is_regression(0.1)


def test_what_cannot_be_compared_is_refused() -> None:
    with pytest.raises(InputError, match="no rate"):
        compare(made(1.0), made(1.0, rate=4.0))
    invalid = made(1.0)
    invalid.runs[0].valid, invalid.runs[0].invalid_reasons = False, ["late"]
    with pytest.raises(InvalidMeasurement, match="second file"):
        compare(made(1.0), invalid)


def test_different_loads_are_named() -> None:
    other = made(1.0)
    other.load = {"prompts": "random:9"}

    assert different_loads(made(1.0), other) == ["prompts"]
