"""When requests arrive: the pattern is a matter of the seed alone, and Poisson is Poisson."""

import subprocess
import sys
from itertools import islice
from pathlib import Path
from statistics import fmean, pvariance

import pytest

from servekit.bench.arrivals import (
    arrival_times,
    dispersion,
    lag1_correlation,
    limited,
    read_trace,
    stretched,
)
from servekit.errors import ConfigError


def first(kind: str, count: int, rate: float = 1.0, **settings: float) -> list[float]:
    return list(islice(arrival_times(kind, rate, seed=7, **settings), count))  # type: ignore[arg-type]


def gaps(times: list[float]) -> list[float]:
    return [later - earlier for earlier, later in zip([0.0, *times], times, strict=False)]


def test_the_pattern_scales_with_the_rate() -> None:
    slow, fast = first("poisson", 500, 1.0), first("poisson", 500, 8.0)

    assert fast == pytest.approx([time / 8 for time in slow], rel=1e-12)


def test_a_longer_run_continues_a_shorter_one() -> None:
    assert first("poisson", 10) == first("poisson", 500)[:10]
    assert limited(arrival_times("poisson", 2.0, seed=7), requests=None, duration=30.0) == [
        time for time in first("poisson", 500, 2.0) if time < 30.0
    ]


def test_repeats_and_seeds_are_different_patterns() -> None:
    patterns = [list(islice(arrival_times("poisson", 1.0, seed=s, repeat=r), 5)) for s in (0, 1) for r in (0, 1)]

    assert len({tuple(pattern) for pattern in patterns}) == 4


def test_the_same_seed_is_the_same_in_another_process() -> None:
    program = (
        "from itertools import islice; from servekit.bench.arrivals import arrival_times;"
        "print(list(islice(arrival_times('poisson', 1.0, seed=7), 20)))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)

    assert done.stdout.strip() == str(first("poisson", 20))


def test_poisson_arrivals_have_a_dispersion_of_one_and_independent_gaps() -> None:
    times = first("poisson", 20_000, 50.0)
    spread, windows = dispersion(times)

    assert windows == 5000
    assert spread == pytest.approx(1.0, abs=0.06)
    assert lag1_correlation(times) == pytest.approx(0.0, abs=0.02)
    assert len(times) / times[-1] == pytest.approx(50.0, rel=0.02)


def test_shared_generators_would_be_seen() -> None:
    """Four senders that each draw the same gaps and send in turn: what looks like Poisson is not."""
    single = gaps(first("poisson", 2000))
    faked, now = [], 0.0
    for gap in single:
        for _ in range(4):
            now += gap
            faked.append(now)

    assert dispersion(faked)[0] > 2
    assert lag1_correlation(faked) > 0.5


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_gamma_gaps_have_a_variance_of_one_over_the_burstiness(burstiness: float) -> None:
    found = gaps(first("gamma", 20_000, burstiness=burstiness))

    assert fmean(found) == pytest.approx(1.0, rel=0.05)
    assert pvariance(found) == pytest.approx(1 / burstiness, rel=0.1)


def test_constant_gaps_are_equal() -> None:
    assert first("constant", 4, 4.0) == [0.25, 0.5, 0.75, 1.0]


def test_a_trace_starts_at_zero_and_can_be_stretched(tmp_path: Path) -> None:
    plain, lines = tmp_path / "a.txt", tmp_path / "b.jsonl"
    plain.write_text("5\n6.5\n\n9\n", encoding="utf-8")
    lines.write_text('{"arrival_s": 9, "output_tokens": 3}\n{"timestamp": 5}\n{"arrival_s": 6.5}\n', encoding="utf-8")

    assert read_trace(str(plain)) == [0.0, 1.5, 4.0]
    assert read_trace(str(lines)) == [0.0, 1.5, 4.0]
    assert stretched([0.0, 1.5, 4.0], 1.0) == [0.0, 0.75, 2.0]


@pytest.mark.parametrize("text", ["", "soon\n", "{}\n", "-1\n", "NaN\n", '{"arrival_s": "1"}\n'])
def test_a_trace_without_times_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "trace"
    path.write_text(text, encoding="utf-8")

    with pytest.raises(ConfigError, match="trace"):
        read_trace(str(path))
