"""`servekit bench serve` as a shell sees it: output, files, exit status."""

import csv
import json
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from servekit.bench.measure import measure
from servekit.bench.result import RunFile, Target, decode_run_file, encode_run_file
from servekit.cli.main import run
from servekit.errors import InputError
from tests.bench.fake_server import (
    DONE,
    ROLE,
    Answer,
    FakeServer,
    Script,
    Seen,
    Step,
    chat_event,
    event,
    json_answer,
    plain_chat,
)
from tests.bench.records import answered

FAST = ("--rate", "200", "--requests", "20", "--outputs", "4")


@pytest.fixture(autouse=True)
def _busy_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine of the tests may be busy: a late send must not decide whether one passes."""
    monkeypatch.setattr("servekit.bench.audit._MAX_LATENESS_S", 60.0)
    monkeypatch.setattr("servekit.bench.audit._MAX_CPU_SHARE", 10.0)


def plain(number: int, seen: Seen) -> Answer:
    """What was asked, at once."""
    return plain_chat(seen.body["max_tokens"])


@contextmanager
def serving(script: Script = plain, pages: dict[str, Any] | None = None) -> Iterator[FakeServer]:
    with FakeServer(script, pages) as server:
        yield server


def bench(capsys: pytest.CaptureFixture[str], server: FakeServer, *options: str, code: int = 0) -> RunFile:
    """The run file of one command on `server`, without the requests of the warm-up."""
    found = run(["bench", "serve", "--url", server.url, "--json", *options])
    captured = capsys.readouterr()
    assert found == code, captured.err
    return decode_run_file(captured.out.encode(), name="stdout")


def test_json_on_stdout_and_nothing_else(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        found = bench(capsys, server, *FAST, "--seed", "5")

    assert (found.servekit_bench, found.command, found.seed) == (1, "bench serve", 5)
    assert (found.target.model, found.target.kind) == ("fake", "unknown")
    assert {"system", "processor", "cores", "memory_bytes", "servekit"} <= set(found.machine)
    (one,) = found.runs
    assert (one.rate, one.concurrency, one.requests.sent, one.requests.ok) == (200.0, None, 20, 20)
    assert (one.tokens.output, one.tokens.input) == (80, 400)
    assert one.valid
    assert one.little is not None
    assert one.little.verdict == "agree"
    assert len(one.records) == 20


def test_bench_alone_means_serve(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        assert run(["bench", "--url", server.url, *FAST]) == 0

    captured = capsys.readouterr()
    assert "20 of 20 answered" in captured.out
    assert "Little" in captured.out
    assert all(len(line) <= 80 for line in captured.out.splitlines())
    assert "\x1b" not in captured.out


@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}])
def test_the_first_token_is_no_role_and_no_ping(capsys: pytest.CaptureFixture[str], content: dict[str, Any]) -> None:
    steps = [
        Step(0.0, event({"choices": [{"delta": {"role": "assistant", **content}}]})),
        Step(0.05, b": ping\n\n"),
        Step(0.1, chat_event("")),
        Step(0.2, chat_event("Hi")),
        Step(0.2, chat_event(finish_reason="length") + DONE),
    ]
    with serving(lambda number, seen: Answer(steps)) as server:
        found = bench(capsys, server, "--rate", "20", "--requests", "5", "--outputs", "1", "--warmup", "0")

    ttft = found.runs[0].latency.ttft_from_send_s
    assert ttft is not None
    assert ttft.p50 >= 0.199


def test_tokens_are_those_of_usage_not_chunks(capsys: pytest.CaptureFixture[str]) -> None:
    usage = event({"choices": [], "usage": {"prompt_tokens": 5, "completion_tokens": 40}})
    chunks = [Step(0.0, ROLE), *(Step(0.01 * n, chat_event("four tokens in here")) for n in range(10))]
    with serving(lambda number, seen: Answer([*chunks, Step(0.09, usage + DONE)])) as server:
        (one,) = bench(capsys, server, "--rate", "50", "--requests", "4", "--outputs", "40").runs

    assert one.tokens.output == 160
    assert one.latency.tpot_s is not None
    assert one.latency.itl_s is not None
    assert one.latency.chunk_gap_s is not None
    assert one.latency.itl_s.count == 4 * 36
    assert one.latency.chunk_gap_s.count == 4 * 9
    record = one.records[0]
    spent = record.chunks[-1][0] - record.chunks[0][0]
    assert one.latency.tpot_s.max >= spent / 39 > 0


def test_without_usage_counts_are_marked_as_estimated(capsys: pytest.CaptureFixture[str]) -> None:
    answer = Answer([Step(0.0, b"".join(map(chat_event, ["Hel", "lo", " world"])) + DONE)])
    with serving(lambda number, seen: answer) as server:
        (one,) = bench(capsys, server, *FAST).runs

    assert (one.tokens.output, one.tokens.estimated) == (40, 20)
    assert any("ESTIMATED" in note for note in one.notes)


def test_the_same_seed_is_the_same_load(capsys: pytest.CaptureFixture[str]) -> None:
    loads = []
    with serving() as server:
        for options in (["--rate", "100,200"], ["--rate", "100", "--prompts", "builtin:bn"]):
            server.seen.clear()
            found = bench(capsys, server, *options, "--requests", "15", "--outputs", "2,4,8", "--seed", "3")
            loads.append(([[record.scheduled_s for record in one.records] for one in found.runs], found.runs))

    (slow, fast), _ = loads[0][0], loads[0][1]
    assert slow == loads[1][0][0]
    assert fast == pytest.approx([at / 2 for at in slow], abs=2e-6)
    asked = [[record.asked_tokens for record in one.records] for _, runs in loads for one in runs]
    assert asked[0] == asked[1] == asked[2]


def test_repeats_have_arrivals_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        found = bench(capsys, server, *FAST, "--repeats", "2")

    assert [one.repeat for one in found.runs] == [0, 1]
    first, second = ([record.scheduled_s for record in one.records] for one in found.runs)
    assert first != second


def test_a_closed_loop_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        (one,) = bench(capsys, server, "--concurrency", "3", "--requests", "12", "--outputs", "4").runs

    assert (one.rate, one.concurrency, one.arrival) == (None, 3, "closed")
    assert any(note.startswith("closed loop") for note in one.notes)


def test_failures_are_counted(capsys: pytest.CaptureFixture[str]) -> None:
    def sometimes(number: int, seen: Seen) -> Answer:
        full = json_answer({"error": {"message": "full"}}, status=429)
        return full if number >= 2 and number % 4 == 0 else plain(number, seen)

    with serving(sometimes) as server:
        (one,) = bench(capsys, server, *FAST, "--slo", "ttft=5s").runs

    assert (one.requests.ok, one.requests.failed) == (15, 5)
    assert one.requests.by_status == {"200": 15, "429": 5}
    assert one.latency.ttft_s is not None
    assert one.latency.ttft_s.count == 15
    assert one.goodput is not None
    assert one.goodput.attainment == 0.75
    assert one.limit is not None
    assert "429" in one.limit.evidence[-1]


def test_a_missed_slo_is_status_1_when_asked(capsys: pytest.CaptureFixture[str]) -> None:
    slow = ("--rate", "100", "--requests", "5", "--outputs", "1", "--slo", "ttft=10ms")
    with serving(lambda number, seen: plain_chat(1, ttft=0.05)) as server:
        bench(capsys, server, *slow)
        bench(capsys, server, *slow, "--min-attainment", "0.9", code=1)


def test_a_run_that_nobody_answered_is_status_3(capsys: pytest.CaptureFixture[str]) -> None:
    def dies(number: int, seen: Seen) -> Answer:
        return plain(number, seen) if number == 0 else json_answer({"error": "gone"}, status=500)

    with serving(dies) as server:
        found = bench(capsys, server, *FAST, "--warmup", "1", code=3)

    assert not found.runs[0].valid
    assert found.runs[0].invalid_reasons == ["no answer came whole"]
    assert found.runs[0].latency.ttft_s is None


def test_fields_that_a_server_refuses_are_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    def strict(number: int, seen: Seen) -> Answer:
        if "ignore_eos" in seen.body:
            return json_answer({"error": {"message": "unknown field: ignore_eos"}}, status=400)
        return plain_chat(2)

    with serving(strict) as server:
        (one,) = bench(capsys, server, *FAST).runs

    assert one.requests.ok == 20
    assert one.tokens.wrong_length == 20
    assert any("ignore_eos" in note for note in one.notes)


def test_no_cache_makes_every_prompt_new(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(lambda number, seen: plain_chat(1, cached=10)) as server:
        warm = bench(capsys, server, *FAST)
        assert any("warm prefix cache" in note for note in warm.runs[0].notes)
        server.seen.clear()
        bench(capsys, server, *FAST, "--no-cache", "--prompts", "builtin:en")

        prompts = [seen.body["messages"][0]["content"][:9] for seen in server.seen]
    assert len(set(prompts)) == len(prompts)


@pytest.mark.parametrize("endpoint", ["embeddings", "rerank"])
def test_endpoints_without_tokens_have_no_first_token(capsys: pytest.CaptureFixture[str], endpoint: str) -> None:
    answer = json_answer({"data": [], "results": [], "usage": {"prompt_tokens": 9, "total_tokens": 9}})
    with serving(lambda number, seen: answer) as server:
        (one,) = bench(capsys, server, *FAST, "--endpoint", endpoint).runs
        assert {seen.path for seen in server.seen} == {f"/v1/{endpoint}"}

    assert one.latency.ttft_s is None
    assert one.latency.e2e_s is not None
    assert (one.tokens.input, one.tokens.output, one.requests.ok) == (180, None, 20)


def test_completions_are_asked_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    data = event({"choices": [{"text": "a", "finish_reason": "length"}]})
    with serving(lambda number, seen: Answer([Step(0.0, data + DONE)])) as server:
        (one,) = bench(capsys, server, *FAST, "--endpoint", "completions").runs
        assert isinstance(server.seen[-1].body["prompt"], str)

    assert one.latency.ttft_s is not None


def test_servekits_own_state_names_the_limit(capsys: pytest.CaptureFixture[str]) -> None:
    state = {"running": 4, "waiting": 3, "live_blocks": 10, "usable_blocks": 100, "preemptions": 0, "steps": 5}
    props = {"kv": {}, "config": {"parallel": 4, "max_num_batched_tokens": 256}, "state": state}
    with serving(pages={"/props": props}) as server:
        found = bench(capsys, server, *FAST)

    assert found.target.kind == "servekit"
    assert found.target.props == {"kv": {}, "config": {"parallel": 4, "max_num_batched_tokens": 256}}
    assert found.runs[0].limit is not None
    assert found.runs[0].limit.name == "queue (slots)"
    assert found.runs[0].server == {"preemptions": 0.0, "steps": 0.0}


@pytest.mark.parametrize(
    ("pages", "kind"),
    [
        ({"/metrics": 'vllm:num_requests_running{a="b"} 1\nvllm:num_requests_waiting 0\n'}, "vllm"),
        ({"/props": {"total_slots": 2}, "/slots": [{"is_processing": True}, {}]}, "llama.cpp"),
        ({"/metrics": "llamacpp:requests_processing 1\nllamacpp:requests_deferred 0\n"}, "llama.cpp"),
    ],
)
def test_other_servers_are_known(capsys: pytest.CaptureFixture[str], pages: dict[str, Any], kind: str) -> None:
    with serving(pages=pages) as server:
        found = bench(capsys, server, *FAST)

    assert found.target.kind == kind
    assert found.runs[0].limit is not None
    assert found.runs[0].limit.name == "none"


def test_every_file_is_written(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    names = ["save.json", "runs.csv", "requests.jsonl", "report.html"]
    paths = [str(tmp_path / name) for name in names]
    flags = ["--save", "--csv", "--jsonl", "--html"]
    files = [text for pair in zip(flags, paths, strict=True) for text in pair]
    with serving() as server:
        found = bench(capsys, server, *FAST, *files)

    saved, rows, lines, page = (Path(path).read_text(encoding="utf-8") for path in paths)
    assert decode_run_file(saved.encode(), name="saved") == found
    (row,) = csv.DictReader(rows.splitlines())
    assert (row["rate"], row["ok"], row["concurrency"]) == ("200.0", "20", "")
    assert float(row["ttft_p95_s"]) > 0
    requests = [json.loads(line) for line in lines.splitlines()]
    assert [request["index"] for request in requests] == list(range(20))
    assert all(later["arrival_s"] > earlier["arrival_s"] for earlier, later in pairwise(requests))
    assert page.startswith("<!doctype html>")


def test_the_knee_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    """A rate whose requests pile up misses: the server has one worker and 50 ms of work for each."""
    busy_until = 0.0

    def one_worker(number: int, seen: Seen) -> Answer:
        nonlocal busy_until
        busy_until = max(busy_until, seen.received) + 0.05
        return plain_chat(1, ttft=busy_until - seen.received)

    options = ("--arrival", "constant", "--requests", "12", "--outputs", "1", "--slo", "ttft=400ms")
    with serving(one_worker) as server:
        found = bench(capsys, server, "--find-knee", "--rate", "10", *options)

    assert found.knee is not None
    assert found.knee.rate is not None
    assert found.knee.missed_rate is not None
    assert found.knee.rate < found.knee.missed_rate <= 1.1 * found.knee.rate
    # At 10 a second nobody waits; on a quiet machine twelve requests may come at up to 48 a second.
    assert found.knee.rate >= 10


def test_no_rate_keeps_the_slo(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--requests", "2", "--outputs", "1", "--slo", "ttft=1ms", "--rate", "400")
    with serving(lambda number, seen: plain_chat(1, ttft=0.03)) as server:
        found = bench(capsys, server, "--find-knee", *options, code=1)

    assert found.knee is not None
    assert found.knee.rate is None


def test_a_trace_is_followed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    trace = tmp_path / "trace.txt"
    trace.write_text("10\n10.05\n10.2\n", encoding="utf-8")
    with serving() as server:
        (one,) = bench(capsys, server, "--arrival", "trace", "--trace", str(trace), "--outputs", "2").runs

    assert [record.scheduled_s for record in one.records] == [0.0, 0.05, 0.2]
    assert one.rate is None


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--rate", "0"], "--rate: '0' is not a rate"),
        (["--rate", "1,x"], "--rate: 'x' is not a rate"),
        (["--rate", "nan"], "--rate: 'nan'"),
        (["--rate", "1", "--concurrency", "2"], "exclude each other"),
        (["--concurrency", "0"], "--concurrency: '0'"),
        (["--arrival", "uniform"], "--arrival: 'uniform' is not known"),
        (["--arrival", "trace"], "needs --trace FILE"),
        (["--burstiness", "2"], "--burstiness belongs to --arrival gamma"),
        (["--arrival", "gamma", "--burstiness", "-1"], "--burstiness must be more than 0"),
        (["--concurrency", "2", "--max-in-flight", "2"], "--max-in-flight belongs to an open loop"),
        (["--min-attainment", "0.9"], "--min-attainment needs --slo"),
        (["--slo", "ttft=1s", "--min-attainment", "2"], "--min-attainment: 2 is not a share"),
        (["--find-knee"], "--find-knee needs --slo"),
        (["--find-knee", "--slo", "ttft=1s", "--rate", "1,2"], "starts at one --rate"),
        (["--slo", "fast"], "--slo: 'fast' is not a bound"),
        (["--endpoint", "images"], "--endpoint: 'images' is not known"),
        (["--endpoint", "embeddings", "--slo", "ttft=1s"], "need an endpoint that makes tokens"),
        (["--prompts", "builtin:xx"], "--prompts: 'builtin:xx' is not known"),
        (["--outputs", "a"], "--outputs: 'a'"),
        (["--body", "[]"], "--body is not a JSON object"),
        (["--duration", "soon"], "--duration: 'soon' is not a duration"),
        (["--url", "nonsense:x"], "--url: 'nonsense:x'"),
        (["--max-regression", "5%"], "--max-regression needs --compare"),
        (["--html", "/no/such/folder/x.html"], "its folder does not exist"),
        (["--compare", "a", "b", "--rate", "2"], "leave out --rate"),
        (["--tokenizer", "no-such-model"], "there is no model 'no-such-model'"),
    ],
)
def test_wrong_options_are_status_2(capsys: pytest.CaptureFixture[str], options: list[str], said: str) -> None:
    assert run(["bench", "serve", *options]) == 2

    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.out == ""


def test_servers_that_cannot_be_measured(capsys: pytest.CaptureFixture[str]) -> None:
    with serving() as server:
        pass
    assert run(["bench", "--url", server.url]) == 1
    assert "does not answer" in capsys.readouterr().err

    with serving(pages={"/v1/models": {"data": []}}) as server:
        assert run(["bench", "--url", server.url]) == 2
    assert "--model" in capsys.readouterr().err

    for status, code in ((404, 2), (401, 2), (400, 2), (500, 1)):
        refusal = json_answer({"error": {"message": "no"}}, status=status)
        with serving(lambda number, seen, refusal=refusal: refusal) as server:  # type: ignore[misc]
            assert run(["bench", "--url", server.url]) == code
        assert "error: http://127.0.0.1" in capsys.readouterr().err


def write(path: Path, factor: float) -> str:
    """A run file of requests that took `factor` times as long."""
    records = [answered(n, at=n / 2, ttft=factor * (0.1 + 0.01 * (n * 37 % 60)), gap=0.02 * factor) for n in range(60)]
    made = RunFile(target=Target(url="http://x"), seed=1, runs=[measure(records, rate=2.0)])
    path.write_bytes(encode_run_file(made))
    return str(path)


def test_compare_and_its_exit_status(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before, after = write(tmp_path / "a.json", 1.0), write(tmp_path / "b.json", 1.2)

    assert run(["bench", "--compare", before, after]) == 0
    assert "+20.0%" in capsys.readouterr().out
    assert run(["bench", "--compare", before, after, "--max-regression", "30%"]) == 0
    capsys.readouterr()
    assert run(["bench", "--compare", before, after, "--max-regression", "5%", "--json"]) == 1
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["regressed"] is True
    assert found["changes"][0]["is_paired"] is True
    assert captured.err.startswith("error: ")
    assert run(["bench", "--compare", after, before, "--max-regression", "5%"]) == 0
    capsys.readouterr()
    assert run(["bench", "--compare", before, str(tmp_path / "none.json")]) == 2
    assert "cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize("data", [b"", b"{}", b"[]", b'{"servekit_bench": 1, "runs": 3}'])
def test_what_is_no_run_file_is_refused(data: bytes) -> None:
    with pytest.raises(InputError, match="is not a run file"):
        decode_run_file(data, name="x")


def test_a_run_file_of_another_version_is_refused() -> None:
    made = RunFile(servekit_bench=2, target=Target(url="x"), runs=[])

    with pytest.raises(InputError, match="version 2"):
        decode_run_file(encode_run_file(made), name="x")
