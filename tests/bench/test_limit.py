"""The limit is named from what the server shows."""

from collections.abc import Mapping, Sequence

import pytest

from servekit.bench import limit as limits
from servekit.bench.limit import name_limit
from servekit.bench.measure import measure
from servekit.bench.probe import Bounds, Sample, parse_metrics
from servekit.bench.result import Limit, Run, Timings
from tests.bench.records import answered, refused

FOUR = Bounds(slots=4, max_num_batched_tokens=256)


def named(
    samples: Sequence[tuple[float, float, float]],
    server: Mapping[str, float] | None = None,
    timings: Timings | None = None,
    *,
    run: Run | None = None,
) -> Limit:
    """Of samples (running, waiting, share of the KV pool), a second apart."""
    run = run or measure([answered(number, timings=timings) for number in range(4)])
    run.server = dict(server or {})
    made = [Sample(float(at), running, waiting, kv) for at, (running, waiting, kv) in enumerate(samples)]
    return name_limit(run, made, FOUR)


def test_an_idle_server_has_no_limit() -> None:
    found = named([(1, 0, 0.1)] * 11, {"model_seconds": 2.0})

    assert found.name == limits.NONE
    assert found.evidence[0] == "the model was computing only 20% of the time"


def test_full_slots_and_a_busy_device() -> None:
    found = named([(4, 3, 0.2)] * 11, {"model_seconds": 9.5})

    assert (found.name, found.also) == (limits.SLOTS, [limits.DEVICE])
    assert found.evidence == ["in 11 of 11 samples requests waited while all 4 slots were taken"]


def test_preemptions_come_before_the_queue_they_make() -> None:
    found = named([(4, 3, 0.95)] * 11, {"preemptions": 7.0})

    assert (found.name, found.also) == (limits.KV_BLOCKS, [limits.SLOTS])
    assert found.evidence[0].startswith("7 preemptions")


def test_a_full_pool_with_free_slots() -> None:
    assert named([(2, 3, 0.97)] * 4).name == limits.KV_BLOCKS


def test_waiting_with_everything_free_is_the_token_budget() -> None:
    assert named([(2, 3, 0.2)] * 4).name == limits.TOKEN_BUDGET
    found = named([(2, 0, 0.2)] * 4, {"steps": 10.0, "batched_tokens": 2000.0})
    assert found.evidence == ["a step took 200 of the 256 tokens it may take, on average"]


def test_a_busy_device_alone() -> None:
    assert named([(3, 0, 0.2)] * 11, {"model_seconds": 9.0}).name == limits.DEVICE


def test_time_outside_the_engine_is_the_api_layer() -> None:
    timings = Timings(queue_s=0.0, prefill_s=0.1, decode_s=0.1)

    assert named([(1, 0, 0.1)] * 4, timings=timings).name == limits.API_LAYER


def test_timings_alone_can_show_a_queue() -> None:
    run = measure([answered(0, timings=Timings(queue_s=0.4, prefill_s=0.1, decode_s=0.2))])

    assert name_limit(run, [], Bounds()).name == limits.SLOTS


def test_refusals_are_a_full_line() -> None:
    found = named([(1, 0, 0.1)] * 4, run=measure([answered(), refused(1)]))

    assert (found.name, found.evidence) == (
        limits.SLOTS,
        ["1 requests were refused with 429: the waiting line was full"],
    )


def test_an_invalid_run_is_limited_by_its_client() -> None:
    run = measure([answered()])
    run.valid, run.invalid_reasons = False, ["late"]

    found = named([(4, 3, 0.2)] * 4, run=run)
    assert (found.name, found.evidence) == (limits.CLIENT, ["late"])


def test_a_silent_server_has_an_unknown_limit() -> None:
    assert name_limit(measure([answered()]), [Sample(0.0), Sample(1.0)], Bounds()).name == limits.UNKNOWN


def test_prometheus_text_is_summed_over_labels() -> None:
    text = (
        "# HELP vllm:num_requests_running Number\n# TYPE vllm:num_requests_running gauge\n"
        'vllm:num_requests_running{model_name="a",engine="0"} 3.0\n'
        'vllm:num_requests_running{model_name="a",engine="1"} 2.0\n'
        "llamacpp:requests_deferred 1e0\nbroken line\n"
    )

    assert parse_metrics(text) == {"vllm:num_requests_running": 5.0, "llamacpp:requests_deferred": 1.0}


@pytest.mark.parametrize("kind", ["running", "waiting"])
def test_samples_without_a_word_are_not_counted(kind: str) -> None:
    run = measure([answered()])
    samples = [Sample(0.0), Sample(1.0, running=4.0, waiting=2.0, kv_used=0.1), Sample(2.0)]

    assert name_limit(run, samples, FOUR).evidence == ["in 1 of 1 samples requests waited while all 4 slots were taken"]
