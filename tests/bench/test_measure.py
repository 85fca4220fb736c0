"""Numbers of a run from records made by hand."""

import pytest

from servekit.bench.measure import little, mean_in_flight, measure, steady_window
from servekit.bench.result import Record
from servekit.bench.slo import parse_duration, parse_slo
from servekit.bench.times import end_to_end, time_per_output_token, time_to_first_token
from servekit.errors import ConfigError
from tests.bench.records import answered, refused


def test_latency_counts_from_the_schedule_and_from_the_send() -> None:
    record = answered(at=1.0, ttft=0.5, gap=0.25, tokens=5, late=0.125)

    assert time_to_first_token(record) == 0.5
    assert time_to_first_token(record, from_send=True) == 0.375
    assert end_to_end(record) == 1.5
    assert end_to_end(record, from_send=True) == 1.375
    assert time_per_output_token(record) == 0.25


def test_failures_are_counted_and_are_no_zeros() -> None:
    run = measure([answered(0, at=0.0), refused(1, at=0.5), answered(2, at=1.0), Record(index=3, scheduled_s=2.0)])

    assert (run.requests.sent, run.requests.ok, run.requests.failed) == (4, 2, 2)
    assert run.requests.by_status == {"200": 2, "429": 1, "no answer": 1}
    assert run.requests.errors == {"429: full": 1}
    assert run.latency.ttft_s is not None
    assert (run.latency.ttft_s.count, run.latency.ttft_s.p50) == (2, 0.5)
    assert run.tokens.output == 6
    assert run.duration_s == pytest.approx(1.7)
    assert run.throughput.output_tokens_per_s == pytest.approx(6 / 1.7)


def test_what_was_not_measured_is_null() -> None:
    whole = Record(index=0, scheduled_s=0.0, sent_s=0.0, end_s=0.25, status=200, input_tokens=8)
    run = measure([whole])

    assert run.latency.ttft_s is None
    assert run.latency.tpot_s is None
    assert run.latency.e2e_s is not None
    assert (run.tokens.output, run.tokens.cached) == (None, None)


def test_answers_of_another_length_are_counted() -> None:
    short = answered(tokens=3)
    short.asked_tokens = 8

    assert measure([short, answered(1)]).tokens.wrong_length == 1


def test_little_both_ways() -> None:
    found = little([answered(0, at=0.0, ttft=1.0, tokens=1), answered(1, at=0.5, ttft=1.5, tokens=1)])

    assert found is not None
    assert found.arrivals_per_s == 1.0
    assert found.mean_s == 1.25
    assert found.expected == found.time_average == 1.25
    assert found.verdict == "agree"


def test_little_says_when_requests_never_ended() -> None:
    found = little([answered(0, at=0.0, ttft=2.0, tokens=1), Record(index=1, scheduled_s=0.0)])

    assert found is not None
    assert (found.expected, found.time_average) == (1.0, 2.0)
    assert found.verdict == "differ: 1 requests never ended"


def test_mean_in_flight_is_a_time_average() -> None:
    assert mean_in_flight([(0.0, 2.0), (1.0, 4.0)], 0.0, 4.0) == (2 + 3) / 4
    assert mean_in_flight([(0.0, 2.0), (1.0, 4.0)], 1.0, 2.0) == 2.0


def test_the_window_leaves_out_filling_and_draining() -> None:
    window = steady_window([answered(number, at=float(number), ttft=0.5, tokens=1) for number in range(21)])

    assert window is not None
    assert (window.start_s, window.end_s) == (0.5, 20.0)
    assert window.throughput.requests_per_s == pytest.approx(19 / 19.5)
    assert window.throughput.output_tokens_per_s == pytest.approx(19 / 19.5)
    assert window.steady


def test_a_growing_queue_is_not_steady() -> None:
    window = steady_window([answered(n, at=float(n), ttft=0.5 + 0.5 * n, tokens=1) for n in range(31)])

    assert window is not None
    assert not window.steady


def test_a_run_that_only_drains_has_no_window() -> None:
    assert steady_window([answered(n, at=0.0, ttft=1.0 + n, tokens=1) for n in range(20)]) is None


def test_goodput_counts_all_sent() -> None:
    records = [answered(0, ttft=0.5), answered(1, ttft=3.0), refused(2), answered(3, ttft=0.5, gap=0.5)]
    good = measure(records, slo={"ttft": 1.0, "tpot": 0.2}).goodput

    assert good is not None
    assert (good.good_requests, good.attainment) == (1, 0.25)
    assert good.by_metric == {"ttft": 0.5, "tpot": 0.5}
    assert good.good_output_tokens == 3
    assert good.attainment_ci95[0] < 0.25 < good.attainment_ci95[1]


def test_a_single_token_keeps_a_bound_on_the_next() -> None:
    good = measure([answered(tokens=1)], slo={"tpot": 0.001}).goodput

    assert good is not None
    assert good.attainment == 1.0


def test_slo_words() -> None:
    assert parse_slo("ttft=2s,tpot=100ms, e2e=1.5min") == {"ttft": 2.0, "tpot": pytest.approx(0.1), "e2e": 90.0}
    assert parse_duration("3", name="x") == 3.0


@pytest.mark.parametrize("text", ["", "ttft", "ttft=", "ttft=0s", "ttft=-1s", "speed=1s", "ttft=1s,ttft=2s", "ttft=1h"])
def test_wrong_slo_words_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--slo"):
        parse_slo(text)
