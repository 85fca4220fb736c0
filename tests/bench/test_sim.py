"""The simulator: the textbook's table to the printed digit, steps on paper, and what limits cost."""

import json
from itertools import pairwise
from typing import Any

import pytest

from servekit.bench.limit import KV_BLOCKS, NONE, SLOTS, TOKEN_BUDGET
from servekit.bench.measure import measure
from servekit.bench.result import decode_run_file
from servekit.bench.sim import SimRequest, SimRun, StepTimes, scheduler_config, simulate
from servekit.bench.sim_lesson import RATES, TextbookTimes, lesson_records, textbook_continuous
from servekit.bench.sim_report import BATCH, name_limit
from servekit.bench.sim_steps import count_steps
from servekit.cli.main import run
from servekit.errors import ConfigError, KvCapacityError

Captured = pytest.CaptureFixture[str]
TIMES = StepTimes(base=0.01, per_sequence=0.002, per_prefill_token=0.001)

# policy, rate, tokens/s, TTFT p50 and p95, E2E p50 and p95: a published table.
LESSON = [
    ("static", 0.5, 40.3, 1.22, 3.26, 2.42, 4.95),
    ("dynamic", 0.5, 40.3, 0.80, 2.98, 1.92, 4.85),
    ("continuous", 0.5, 40.3, 0.38, 0.98, 1.91, 4.79),
    ("static", 0.8, 64.3, 2.39, 7.57, 3.97, 9.12),
    ("dynamic", 0.8, 64.2, 2.14, 7.02, 3.70, 8.78),
    ("continuous", 0.8, 64.4, 0.43, 3.57, 2.96, 7.52),
    ("static", 1.0, 77.4, 17.81, 25.85, 19.78, 27.63),
    ("dynamic", 1.0, 77.7, 16.91, 25.05, 18.64, 27.08),
    ("continuous", 1.0, 80.3, 3.49, 12.10, 6.63, 15.79),
]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


@pytest.mark.parametrize(("policy", "rate", "tokens", "ttft50", "ttft95", "e2e50", "e2e95"), LESSON)
def test_every_row_of_the_lesson(
    policy: str, rate: float, tokens: float, ttft50: float, ttft95: float, e2e50: float, e2e95: float
) -> None:
    found = measure(lesson_records(policy, rate), rate=rate)

    ttft, e2e = found.latency.ttft_s, found.latency.e2e_s
    assert ttft is not None
    assert e2e is not None
    assert round(found.throughput.output_tokens_per_s, 1) == tokens
    assert [round(value, 2) for value in (ttft.p50, ttft.p95)] == [ttft50, ttft95]
    assert [round(value, 2) for value in (e2e.p50, e2e.p95)] == [e2e50, e2e95]


def test_the_lesson_as_a_run_file(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    assert run(["bench", "sim", "--preset", "lesson", "--json"]) == 0

    found = decode_run_file(capfdbinary.readouterr().out, name="standard output")
    rows = [
        (policy, one.rate, round(one.throughput.output_tokens_per_s, 1))
        for policy, one in zip(found.load["policies"], found.runs, strict=True)
    ]
    assert rows == [row[:3] for row in LESSON]
    assert {one.rate for one in found.runs} == set(RATES)


@pytest.mark.parametrize(
    ("lengths", "arrivals", "slots", "policy", "steps", "idle"),
    [
        ([4, 2, 3, 2, 1], [0, 0, 0, 1, 2], 3, "static", 6, 6),
        ([4, 2, 3, 2, 1], [0, 0, 0, 1, 2], 3, "continuous", 4, 0),
        ([100, 5, 5, 5, 5, 5, 5, 5], [0] * 8, 4, "static", 105, 285),
        ([100, 5, 5, 5, 5, 5, 5, 5], [0] * 8, 4, "continuous", 100, 265),
        ([2, 1], [0, 5], 2, "continuous", 6, 9),
    ],
)
def test_steps(lengths: list[int], arrivals: list[int], slots: int, policy: str, steps: int, idle: int) -> None:
    count = count_steps(policy, lengths, arrivals, slots=slots)

    assert (count.steps, count.idle_slot_steps) == (steps, idle)
    assert sum(line.count(".") for line in count.chart) == idle


def test_the_chart_shows_who_holds_which_slot(capsys: Captured) -> None:
    args = ["bench", "sim", "steps", "--lengths", "4,2,3,2,1", "--arrive", "0,0,0,1,2", "--slots", "3"]

    assert run(args) == 0

    assert capsys.readouterr().out.splitlines() == [
        "static: 6 steps, 6 idle slot steps",
        "slot 1 AAAADD",
        "slot 2 BB..E.",
        "slot 3 CCC...",
        "",
        "continuous: 4 steps, 0 idle slot steps",
        "slot 1 AAAA",
        "slot 2 BBDD",
        "slot 3 CCCE",
        "",
    ]


def play(requests: list[SimRequest], **limits: Any) -> SimRun:
    return simulate(requests, scheduler_config(requests, **limits), TIMES)


def test_one_request_takes_its_steps() -> None:
    (record,) = play([SimRequest(2.0, 100, 3)], slots=1).records

    assert record.first_token_s == pytest.approx(2.0 + 0.01 + 0.1)
    assert record.end_s == pytest.approx(2.11 + 2 * 0.012)
    assert [tokens for _, tokens in record.chunks] == [1, 2, 3]
    assert record.timings is not None
    assert record.timings.queue_s == 0.0
    assert record.timings.prefill_s == pytest.approx(0.11)


def test_a_long_prompt_comes_in_chunks() -> None:
    (record,) = play([SimRequest(0.0, 100, 1)], slots=1, max_num_batched_tokens=30).records

    assert record.first_token_s == pytest.approx(4 * 0.01 + 0.1)


def test_a_prompt_does_not_stall_who_decodes() -> None:
    found = play([SimRequest(0.0, 1, 20), SimRequest(0.02, 300, 1)], slots=2, max_num_batched_tokens=51)

    times = [at for at, _ in found.records[0].chunks]
    assert max(after - before for before, after in pairwise(times)) == pytest.approx(0.062)


def test_too_few_blocks_preempt_and_everybody_ends() -> None:
    requests = [SimRequest(0.0, 16, 40) for _ in range(4)]

    roomy, tight = play(requests, slots=4), play(requests, slots=4, num_blocks=6)

    assert roomy.num_preemptions == 0
    assert tight.num_preemptions > 0
    assert [record.output_tokens for record in tight.records] == [40] * 4
    assert tight.end_s > roomy.end_s
    assert name_limit(tight).name == KV_BLOCKS


def test_a_request_that_never_fits_is_refused() -> None:
    with pytest.raises(KvCapacityError):
        play([SimRequest(0.0, 100, 1)], slots=1, num_blocks=2)


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"slots": 1}, SLOTS),
        ({"slots": 8, "max_num_batched_tokens": 8}, TOKEN_BUDGET),
        ({"slots": 8, "policy": "dynamic"}, BATCH),
        ({"slots": 8, "max_num_batched_tokens": 400}, NONE),
    ],
)
def test_the_limit_is_named(limits: dict[str, Any], name: str) -> None:
    requests = [SimRequest(0.03 * index, 40, 10) for index in range(8)]

    assert name_limit(play(requests, **limits)).name == name


def test_the_static_policy_waits_and_the_others_do_not() -> None:
    requests = [SimRequest(1.0, 10, 1)]
    first = {
        policy: play(requests, slots=2, policy=policy).records[0].first_token_s
        for policy in ("static", "dynamic", "continuous")
    }

    assert first["dynamic"] == first["continuous"] == pytest.approx(1.02)
    assert first["static"] == pytest.approx(1.52)


def test_the_textbook_loop_ends_an_answer_of_one_token_with_its_prompt() -> None:
    requests = [SimRequest(0.0, 100, 1), SimRequest(0.0, 100, 3)]

    short, long = textbook_continuous(requests, slots=2, times=TextbookTimes())

    assert short.end_s == short.first_token_s == pytest.approx(0.68)
    assert long.end_s == pytest.approx(0.68 + 2 * (0.00729 + 0.00486))


def test_a_what_if_needs_step_times(capsys: Captured) -> None:
    assert run(["bench", "sim", "--slots", "4"]) == 2
    assert "--fit run.json" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["stepz"], "stepz"),
        (["--preset", "other"], "--preset"),
        (["--preset", "lesson", "--slots", "8"], "--slots is set by --preset lesson"),
        (["steps", "--rate", "2"], "--rate does not belong to sim steps"),
        (["--step-times", "0.1,0,0", "--lengths", "1,2"], "--lengths belongs to `sim steps`"),
        (["--step-times", "0.1,0,0", "--json", "--chart", "9"], "--chart"),
        (["--step-times", "0.1,0,0", "--trace", "x", "--requests", "5"], "--requests is set by the trace"),
        (["--step-times", "1,2"], "--step-times"),
        (["--step-times", "0,0,0"], "--step-times"),
        (["--step-times", "0.1,nan,0"], "--step-times"),
        (["--step-times", "0.1,0,0", "--rate", "0"], "--rate"),
        (["--step-times", "0.1,0,0", "--rate", "1", "--trace", "x"], "--trace"),
        (["--step-times", "0.1,0,0", "--policy", "fifo"], "--policy"),
        (["steps", "--lengths", "1,0"], "--lengths"),
        (["steps", "--lengths", "1,2", "--arrive", "0"], "--arrive"),
    ],
)
def test_a_wrong_option_is_named(capsys: Captured, args: list[str], word: str) -> None:
    assert run(["bench", "sim", *args]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert word in captured.err


def test_slots_that_the_budget_cannot_feed_are_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        play([SimRequest(0.0, 10, 1)], slots=16, max_num_batched_tokens=8)
    assert caught.value.param == "max_num_batched_tokens"


def test_the_same_seed_gives_the_same_simulation(capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    args = ["bench", "sim", "--step-times", "0.01,0.002,0.001", "--rate", "2", "--requests", "30", "--json"]
    outputs = []
    for seed in ("3", "3", "4"):
        assert run([*args, "--seed", seed]) == 0
        outputs.append(capfdbinary.readouterr().out)

    assert outputs[0] == outputs[1] != outputs[2]
    found = decode_run_file(outputs[0], name="standard output")
    assert found.load["policies"] == ["static", "dynamic", "continuous"]
    assert all(one.requests.ok == 30 for one in found.runs)
    assert json.loads(outputs[0])["servekit_bench"] == 1
