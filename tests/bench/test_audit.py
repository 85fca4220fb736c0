"""The generator judged by its own traces."""

from itertools import islice

import pytest

from servekit.bench.arrivals import arrival_times
from servekit.bench.audit import audit
from servekit.bench.load import Trace
from servekit.bench.result import Audit
from tests.bench.records import answered, refused


def judged(
    times: list[float],
    lateness: float = 0.0,
    *,
    arrival: str = "poisson",
    max_in_flight: int | None = None,
    **trace: object,
) -> tuple[Audit, list[str]]:
    records = [answered(number, at=at, late=lateness, ttft=0.1) for number, at in enumerate(times)]
    settings = {"loop_lags": [0.001], "cpu_s": 1.0, "wall_s": 100.0, **trace}
    made = Trace(records, **settings)  # type: ignore[arg-type]
    return audit(made, arrival=arrival, is_open=True, max_in_flight=max_in_flight)


def poisson(count: int) -> list[float]:
    return list(islice(arrival_times("poisson", 10.0, seed=0), count))


def test_a_punctual_generator_passes() -> None:
    found, reasons = judged(poisson(400), 0.001)

    assert reasons == []
    assert found.achieved_rate == pytest.approx(found.offered_rate)
    assert found.cpu_share == 0.01
    assert found.lateness_p99_s == pytest.approx(0.001)
    assert found.late_sends == 0


def test_late_sends_are_named() -> None:
    found, reasons = judged(poisson(400), 0.05)

    assert found.late_sends == 400
    assert reasons == ["requests were sent 50.0 ms after their schedule (p99), more than 20.0 ms"]
    assert judged(poisson(400), 0.05, max_in_flight=4)[1] == []


def test_long_answers_allow_as_much_lateness_as_does_not_matter() -> None:
    records = [answered(number, at=number / 10, late=0.05, ttft=5.0) for number in range(50)]
    _, reasons = audit(Trace(records), arrival="constant", is_open=True, max_in_flight=None)

    assert reasons == []


def test_a_missed_rate_is_named() -> None:
    records = [answered(number, at=number / 10, late=number / 200, ttft=0.5) for number in range(50)]
    _, reasons = audit(Trace(records), arrival="constant", is_open=True, max_in_flight=None)

    assert len(reasons) == 2
    assert reasons[1] == "9.52 requests a second were sent instead of 10.00"


def test_sends_that_bunch_are_not_poisson() -> None:
    """The second of each pair of requests waits for the next but one: half the gaps vanish."""
    times = poisson(400)
    records = [answered(number, at=at, ttft=100.0) for number, at in enumerate(times)]
    for number, record in enumerate(records):
        record.sent_s = times[min(399, number // 8 * 8 + 7)]
    _, reasons = audit(Trace(records), arrival="poisson", is_open=True, max_in_flight=None)

    assert any("index of dispersion" in reason for reason in reasons)


@pytest.mark.parametrize(
    ("trace", "said"),
    [({"cpu_s": 90.0}, "used 90% of a core"), ({"loop_lags": [0.1] * 50}, "event loop was late by 100.0 ms")],
)
def test_a_busy_generator_is_named(trace: dict[str, object], said: str) -> None:
    _, reasons = judged(poisson(50), **trace)  # type: ignore[arg-type]

    assert len(reasons) == 1
    assert said in reasons[0]


def test_a_closed_loop_has_no_schedule_to_miss() -> None:
    records = [answered(number, at=number / 10, late=0.5) for number in range(50)]
    found, reasons = audit(Trace(records), arrival="closed", is_open=False, max_in_flight=None)

    assert reasons == []
    assert found.offered_rate is None


def test_a_run_without_any_answer_is_none() -> None:
    _, reasons = audit(Trace([refused()]), arrival="poisson", is_open=True, max_in_flight=None)

    assert reasons == ["no answer came whole"]
