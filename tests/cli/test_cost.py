"""`servekit cost` as a user runs it: from a number, a run file, a pipe or a server; every wrong value by its name."""

import io
import json
import sys
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest

from servekit.bench.arrivals import arrival_times
from servekit.bench.measure import measure
from servekit.bench.result import Record, Run, RunFile, Target, Timings, encode_run_file
from servekit.bench.sim import SimRequest, StepTimes, scheduler_config, simulate
from servekit.cli.main import run
from tests.bench.fake_server import FakeServer, json_answer
from tests.bench.records import answered, refused

Captured = pytest.CaptureFixture[str]
PROPS = {
    "config": {"parallel": 4, "max_num_batched_tokens": 256, "scheduling": "continuous", "static_wait": 0.5},
    "kv": {"block_size": 16, "num_blocks": 251, "num_tokens": 4000},
}
TARGET = Target(url="http://127.0.0.1:8080", model="m", kind="servekit", props=PROPS)


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def cost_json(capsys: Captured, *args: str) -> dict[str, Any]:
    assert run(["cost", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: Captured, *args: str, code: int = 2) -> str:
    """The error's lines, after checking that nothing was said on standard output."""
    assert run(["cost", *args]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert "Traceback" not in captured.err
    return captured.err


def served(rate: float, repeat: int = 0, *, slo: dict[str, float] | None = None) -> Run:
    """A recorded run of a server with four slots, as `bench serve` writes it."""
    times = islice(arrival_times("poisson", rate, seed=1, repeat=repeat), 40)
    requests = [SimRequest(at, 100, 20) for at in times]
    simulated = simulate(requests, scheduler_config(requests, slots=4), StepTimes(0.012, 0.003, 0.0008))
    found = measure(simulated.records, rate=rate, repeat=repeat, slo=slo)
    found.server = {"steps": float(len(simulated.steps)), "step_seconds": simulated.busy_s}
    return found


def written(tmp_path: Path, *runs: Run, target: Target = TARGET) -> str:
    file = tmp_path / "run.json"
    file.write_bytes(encode_run_file(RunFile(target=target, seed=1, runs=list(runs))))
    return str(file)


@pytest.mark.parametrize(
    ("tokens_per_second", "seconds"),
    [("58.0", "17,241"), ("709.7", "1,409"), ("78.45", "12,747"), ("188.5", "5,305"), ("60.9", "16,420")],
)
def test_published_rows(capsys: Captured, tokens_per_second: str, seconds: str) -> None:
    assert run(["cost", "--tokens-per-second", tokens_per_second]) == 0

    assert capsys.readouterr().out.startswith(f"{seconds} machine-seconds for a million output tokens")


def test_repeats_give_an_interval(capsys: Captured) -> None:
    found = cost_json(capsys, "--tokens-per-second", "700,712,705")

    output = found["machine_seconds_per_million"]["output"]
    assert output["low"] < output["seconds"] < output["high"]
    assert found["operating_point"]["repeats"] == 3


def test_money_and_energy_only_when_asked(capsys: Captured) -> None:
    plain = cost_json(capsys, "--tokens-per-second", "100")
    asked = cost_json(capsys, "--tokens-per-second", "100", "--price-per-hour", "3.6", "--watts", "360 W")

    assert plain["money_per_million"] is None
    assert (plain["energy"]["source"], plain["energy"]["watt_hours_per_million"]) == ("not measured", None)
    assert asked["money_per_million"]["output"] == pytest.approx(10.0)
    assert asked["energy"]["watt_hours_per_million"]["output"] == pytest.approx(1000.0)
    assert asked["energy"]["is_bound"] is True


def test_every_input_is_echoed(capsys: Captured, tmp_path: Path) -> None:
    args = {
        "from": written(tmp_path, served(1.0)),
        "machines": "2",
        "slo": "ttft=1s",
        "min_attainment": "0.5",
        "load": "50,100",
        "price_per_hour": "2",
        "watts": "250",
        "requests_per_day": "1e5",
        "prompt_tokens": "100",
        "output_tokens": "20",
        "peak_factor": "3",
        "kv_tokens": "5000",
        "slots": "8",
        "api_price_in": "0",
        "api_price_out": "4",
    }
    flags = [part for name, value in args.items() for part in (f"--{name.replace('_', '-')}", value)]

    found = cost_json(capsys, *flags, "--spare", "2")

    given = {name: value for name, value in found["inputs"].items() if value is not None}
    assert given == {**args, "spare": 2}
    assert found["plan"]["spare"] == 2
    assert found["break_even"]["own_per_day"] == found["plan"]["machines"] * 48.0
    assert len(found["source"]["sha256"]) == 64


def test_a_run_file_by_load(capsys: Captured, tmp_path: Path) -> None:
    runs = [served(rate, repeat) for rate in (1.0, 2.0, 4.0) for repeat in range(3)]

    found = cost_json(capsys, "--from", written(tmp_path, *runs))

    loads = found["loads"]
    assert [(load["rate"], load["repeats"]) for load in loads] == [(1.0, 3), (2.0, 3), (4.0, 3)]
    seconds = [load["machine_seconds_per_million"]["output"]["seconds"] for load in loads]
    assert seconds == sorted(seconds, reverse=True), "the more load, the less an idle machine costs"
    assert found["operating_point"]["rate"] == 4.0
    assert found["machine_seconds_per_million"]["output"]["low"] < seconds[-1]
    curve = {point["load"]: point for point in found["load_curve"]}
    assert [curve[load]["is_measured"] for load in (0.1, 0.3, 0.5, 1.0)] == [False, False, True, True]
    assert curve[0.5]["seconds_per_million"] == pytest.approx(seconds[1])
    assert curve[0.1]["seconds_per_million"] > curve[0.3]["seconds_per_million"] > seconds[1]


def test_the_split_is_by_fitted_steps_and_adds_up(capsys: Captured, tmp_path: Path) -> None:
    found = cost_json(capsys, "--from", written(tmp_path, *(served(rate) for rate in (1.0, 2.0, 4.0))))

    per_million, point = found["machine_seconds_per_million"], found["operating_point"]["tokens_per_s"]
    assert found["split"]["rule"].startswith("step times fitted")
    assert 0.1 < found["split"]["prefill_share"] < 0.6
    whole = point["input"]["mean"] * per_million["prefill"]["seconds"]
    whole += point["output"]["mean"] * per_million["decode"]["seconds"]
    assert whole / 1e6 == pytest.approx(1.0)


def timed(index: int, prefill: float, decode: float) -> Record:
    return answered(index, at=float(index), timings=Timings(queue_s=0.1, prefill_s=prefill, decode_s=decode))


def test_without_steps_the_split_is_by_the_requests_own_seconds(capsys: Captured, tmp_path: Path) -> None:
    one = measure([timed(index, 0.25, 0.75) for index in range(10)], rate=1.0)

    found = cost_json(capsys, "--from", written(tmp_path, one, target=Target(url="u")))

    assert found["split"] == {
        "prefill_share": 0.25,
        "rule": "the requests' own prefill and decode seconds, which overlap",
    }
    assert found["operating_point"]["service_s"] == pytest.approx(1.0)


def test_the_server_s_own_phase_seconds_win(capsys: Captured, tmp_path: Path) -> None:
    one = measure([timed(index, 0.25, 0.75) for index in range(10)], rate=1.0)
    one.server = {"prefill_seconds": 4.0, "decode_seconds": 6.0, "steps": 30.0}

    found = cost_json(capsys, "--from", written(tmp_path, one))

    assert found["split"] == {"prefill_share": 0.4, "rule": "the server's own prefill and decode seconds"}


def test_cached_tokens_are_apart(capsys: Captured, tmp_path: Path) -> None:
    records = [timed(index, 0.25, 0.75) for index in range(10)]
    for record in records:
        record.input_tokens, record.cached_tokens = 100, 60
    one = measure(records, rate=1.0)

    per_million = cost_json(capsys, "--from", written(tmp_path, one))["machine_seconds_per_million"]

    assert per_million["cached"]["seconds"] == 0
    assert per_million["prompt"]["seconds"] == pytest.approx(0.4 * per_million["prefill"]["seconds"])
    assert per_million["total"]["seconds"] == pytest.approx(per_million["output"]["seconds"] * 3 / 43)


def test_good_tokens_price_the_load_that_keeps_the_slo(capsys: Captured, tmp_path: Path) -> None:
    runs = [served(rate, slo={"ttft": 0.5}) for rate in (1.0, 2.0, 8.0)]
    assert [run_.goodput.attainment > 0.9 if run_.goodput else None for run_ in runs] == [True, True, False]

    found = cost_json(capsys, "--from", written(tmp_path, *runs))

    assert found["operating_point"]["rate"] == 2.0
    last = found["loads"][-1]
    assert (
        last["machine_seconds_per_million"]["good"]["seconds"]
        > last["machine_seconds_per_million"]["output"]["seconds"]
    )


def test_an_slo_can_be_asked_afterwards(capsys: Captured, tmp_path: Path) -> None:
    path = written(tmp_path, served(1.0), served(8.0))

    strict = refusal(capsys, "--from", path, "--slo", "ttft=1ms", code=1)
    loose = cost_json(capsys, "--from", path, "--slo", "ttft=100s")

    assert "at no measured load" in strict
    assert loose["operating_point"]["rate"] == 8.0


def test_failures_are_paid_for_by_the_answers(capsys: Captured, tmp_path: Path) -> None:
    records = [answered(0, tokens=10), refused(1, at=0.2)]

    found = cost_json(capsys, "--from", written(tmp_path, measure(records, rate=1.0)))

    assert found["operating_point"]["tokens_per_s"]["output"]["mean"] == pytest.approx(10 / 1.4)
    assert any("1 failed requests" in note for note in found["notes"])


def test_the_pipe(monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path) -> None:
    data = Path(written(tmp_path, served(2.0))).read_bytes()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    found = cost_json(capsys, "--from", "-")

    assert found["source"]["name"] == "standard input"
    assert found["machine_seconds_per_million"]["output"]["seconds"] > 0


def test_a_simulation_can_be_priced(monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]) -> None:
    args = ["--step-times", "0.012,0.003,0.0008", "--rate", "1,2", "--requests", "40", "--policy", "continuous"]
    assert run(["bench", "sim", *args, "--json"]) == 0
    data = capfdbinary.readouterr().out
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(data)))

    assert run(["cost", "--from", "-", "--json"]) == 0

    assert [load["rate"] for load in json.loads(capfdbinary.readouterr().out)["loads"]] == [1.0, 2.0]


PLAN = ("--requests-per-day", "864000", "--prompt-tokens", "100", "--output-tokens", "20")


def test_machines_for_a_demand(capsys: Captured, tmp_path: Path) -> None:
    path = written(tmp_path, *(served(rate, slo={"ttft": 0.5}) for rate in (1.0, 2.0, 8.0)))

    plan = cost_json(capsys, "--from", path, *PLAN, "--price-per-hour", "2")["plan"]

    limits = {name: value for name, value in plan["limits"].items() if value is not None}
    assert set(limits) == {"compute", "kv", "slots", "latency"}
    assert plan["binding"] == min(limits, key=lambda name: limits[name])
    assert limits["kv"] == pytest.approx(limits["slots"] * (4000 // 120) / 4)
    assert plan["needed"] == -(-10 // plan["requests_per_s_per_machine"])
    assert plan["machines"] == plan["needed"] + 1
    assert plan["money_per_day"] == plan["machines"] * 48.0


def test_a_small_pool_binds(capsys: Captured, tmp_path: Path) -> None:
    path = written(tmp_path, served(4.0))

    found = cost_json(capsys, "--from", path, *PLAN, "--kv-tokens", "240", "--slots", "64")

    assert found["plan"]["binding"] == "kv"
    assert "more than the 100" in refusal(capsys, "--from", path, *PLAN, "--kv-tokens", "100")


def test_longer_requests_need_more_machines(capsys: Captured, tmp_path: Path) -> None:
    path = written(tmp_path, *(served(rate) for rate in (1.0, 2.0, 4.0)))
    long = ("--requests-per-day", "864000", "--prompt-tokens", "1000", "--output-tokens", "200")

    short_plan = cost_json(capsys, "--from", path, *PLAN)["plan"]
    found = cost_json(capsys, "--from", path, *long)

    assert found["plan"]["limits"]["compute"] == pytest.approx(short_plan["limits"]["compute"] / 10)
    assert any("times the work of the measured ones" in note for note in found["notes"])


def test_the_table_fits_80_columns(capsys: Captured, tmp_path: Path) -> None:
    path = written(tmp_path, *(served(rate, slo={"ttft": 0.5}) for rate in (1.0, 2.0, 8.0)))
    prices = ("--price-per-hour", "2", "--watts", "300", "--api-price-in", "0.5", "--api-price-out", "1.5")

    assert run(["cost", "--from", path, *PLAN, *prices]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 80
    shown = "\n".join(lines)
    for word in ("machine-seconds", "By load", "bound by", "utilisation", "break-even", "split", "a bound"):
        assert word in shown
    assert "…" not in shown


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (("--tokens-per-second", "-3"), "--tokens-per-second"),
        (("--tokens-per-second", "0"), "--tokens-per-second"),
        (("--tokens-per-second", "nan"), "--tokens-per-second"),
        (("--tokens-per-second", "inf"), "--tokens-per-second"),
        (("--tokens-per-second", "700 tok/min"), "'tok/min'"),
        (("--tokens-per-second", "700,7k"), "'k'"),
        (("--tokens-per-second", "fast"), "--tokens-per-second"),
        (("--tokens-per-second", "7", "--price-per-hour", "0"), "--price-per-hour"),
        (("--tokens-per-second", "7", "--price-per-hour", "2 $/day"), "'$/day'"),
        (("--tokens-per-second", "7", "--watts", "0.3kW"), "'kW'"),
        (("--tokens-per-second", "7", "--watts", "-1"), "--watts"),
        (("--tokens-per-second", "7", "--machines", "1.5"), "--machines"),
        (("--tokens-per-second", "7", "--machines", "0"), "--machines"),
        (("--tokens-per-second", "7", "--load", "50,150"), "--load"),
        (("--tokens-per-second", "7", "--load", "0"), "--load"),
        (("--tokens-per-second", "7", "--min-attainment", "90"), "--min-attainment"),
        (("--tokens-per-second", "7", "--slo", "ttft=1s"), "--slo"),
        (("--tokens-per-second", "7", "--load", "50"), "--load needs --from"),
        (("--url", "http://127.0.0.1:1", "--min-attainment", "0.5"), "--min-attainment needs --from"),
        (("--tokens-per-second", "7", "--seconds", "3"), "--seconds"),
        (("--tokens-per-second", "7", "--from", "x"), "exclude each other"),
        (("--tokens-per-second", "7", "--requests-per-day", "5"), "--prompt-tokens"),
        (("--tokens-per-second", "7", "--peak-factor", "2"), "--requests-per-day"),
        (("--tokens-per-second", "7", *PLAN, "--peak-factor", "0.5"), "--peak-factor"),
        (("--tokens-per-second", "7", *PLAN, "--api-price-in", "1"), "--api-price-out"),
        (("--tokens-per-second", "7", "--slots", "4"), "--slots"),
        (("--tokens-per-second", "7", "--api-price-in", "1"), "--api-price-in"),
        (("--from", "/nowhere/run.json"), "cannot be read"),
        ((), "--from"),
    ],
)
def test_a_wrong_value_is_refused_by_name(capsys: Captured, args: tuple[str, ...], word: str) -> None:
    assert word in refusal(capsys, *args)


def test_a_file_that_is_no_run_file(capsys: Captured, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text('{"servekit_bench": 99, "target": {"url": "u"}, "runs": []}', encoding="utf-8")
    assert "version 99" in refusal(capsys, "--from", str(file))
    file.write_text("tokens: 7", encoding="utf-8")
    assert "not a run file" in refusal(capsys, "--from", str(file))


def test_runs_that_failed_their_audit_have_no_price(capsys: Captured, tmp_path: Path) -> None:
    one = served(1.0)
    one.valid = False

    assert "no valid run" in refusal(capsys, "--from", written(tmp_path, one), code=3)


def counting(states: list[dict[str, float]]) -> Callable[[], dict[str, Any]]:
    """The /props of a servekit server whose counters are as given, the last ones for ever."""
    left = iter(states)
    last = states[-1]
    return lambda: {"state": next(left, last), "kv": PROPS["kv"], "config": PROPS["config"]}


class CountingServer(FakeServer):
    """Answers /props anew each time, and /metrics when it has first tokens to count."""

    def __init__(self, states: list[dict[str, float]], first_tokens: Iterator[int] | None = None) -> None:
        super().__init__(lambda number, seen: json_answer({}))
        self._make = counting(states)
        self._first_tokens = first_tokens

    async def _page(self, path: str, writer: Any) -> None:
        if path == "/props":
            self._pages["/props"] = self._make()
        if path == "/metrics" and self._first_tokens is not None:
            self._pages["/metrics"] = f"servekit:time_to_first_token_seconds_count {next(self._first_tokens)}\n"
        await super()._page(path, writer)


def state(batched: float, queried: float, hits: float) -> dict[str, float]:
    return {
        "batched_tokens": batched,
        "prefix_query_tokens": queried,
        "prefix_hit_tokens": hits,
        "steps": batched,
        "preemptions": 0,
        "step_seconds": batched / 1e4,
    }


def test_a_server_in_use(capsys: Captured) -> None:
    states = [state(0, 0, 0), state(1000, 500, 100), state(1900, 1200, 300)]

    first_tokens = iter((3, 3, 13))  # one reading to know the server, then two

    with CountingServer(states, first_tokens) as server:
        found = cost_json(capsys, "--url", server.url, "--seconds", "0.2")

    rates = found["operating_point"]["tokens_per_s"]
    # 900 tokens were computed: 700 of prompts less 200 cached, and the rest decoded; 10 more came with their prompts.
    assert rates["output"]["mean"] / rates["input"]["mean"] == pytest.approx(410 / 500)
    assert rates["cached"]["mean"] / rates["input"]["mean"] == pytest.approx(200 / 500)
    assert rates["total"]["mean"] / rates["input"]["mean"] == pytest.approx(910 / 500)
    assert found["source"]["kind"] == "server"
    assert found["energy"]["source"]


def test_an_idle_server_has_no_price(capsys: Captured) -> None:
    with CountingServer([state(0, 0, 0), state(10, 5, 0)]) as server:
        said = refusal(capsys, "--url", server.url, "--seconds", "0.1", code=1)

    assert "decoded nothing" in said


def test_a_server_without_counters(capsys: Captured) -> None:
    with FakeServer(lambda number, seen: json_answer({})) as server:
        assert "no token counters" in refusal(capsys, "--url", server.url, "--seconds", "0.1")


def test_nobody_there(capsys: Captured) -> None:
    with FakeServer(lambda number, seen: json_answer({})) as server:
        url = server.url

    assert "does not answer" in refusal(capsys, "--url", url, "--seconds", "0.1", code=1)


def test_llama_cpp_counts_its_own_phases(capsys: Captured) -> None:
    texts = [
        "".join(f"llamacpp:{name} {value * scale}\n" for name, value in (
            ("prompt_tokens_total", 400), ("tokens_predicted_total", 100),
            ("prompt_seconds_total", 1.0), ("tokens_predicted_seconds_total", 3.0),
        ))
        for scale in (1, 1, 2)
    ]  # fmt: skip

    class Llama(FakeServer):
        async def _page(self, path: str, writer: Any) -> None:
            if path == "/metrics":
                self._pages["/metrics"] = texts.pop(0)
            await super()._page(path, writer)

    with Llama(lambda number, seen: json_answer({}), {"/metrics": ""}) as server:
        found = cost_json(capsys, "--url", server.url, "--seconds", "0.1")

    assert found["split"] == {"prefill_share": 0.25, "rule": "the server's own prefill and decode seconds"}
    rates = found["operating_point"]["tokens_per_s"]
    assert rates["input"]["mean"] / rates["output"]["mean"] == pytest.approx(4.0)
