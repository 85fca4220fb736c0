"""Recorded traces: read from every form they come in, sent to a server at their times, or simulated."""

import io
import json
from pathlib import Path

import pytest

from servekit.bench.measure import measure
from servekit.bench.replay import read_trace
from servekit.bench.result import Record, RunFile, Target, decode_run_file, encode_run_file
from servekit.bench.sim import SimRequest, StepTimes, scheduler_config, simulate
from servekit.cli.main import run
from servekit.errors import InputError
from tests.bench.fake_server import DONE, Answer, FakeServer, Seen, Step, event

BinaryCaptured = pytest.CaptureFixture[bytes]
LINES = "".join(
    json.dumps({"arrival_s": 5 + at, "prompt_tokens": prompt, "output_tokens": output}) + "\n"
    for at, prompt, output in ((0.0, 7, 3), (0.25, 30, 2), (0.5, 4, 5))
)
REQUESTS = (SimRequest(0.0, 7, 3), SimRequest(0.25, 30, 2), SimRequest(0.5, 4, 5))
SERVEKIT_PROPS = {"state": {}, "kv": {}, "config": {"parallel": 2, "max_num_batched_tokens": 256}}


def completion(number: int, seen: Seen) -> Answer:
    """As many tokens as asked, one a chunk, and the usage of a prompt of token ids or of words."""
    prompt = seen.body["prompt"]
    count = seen.body["max_tokens"]
    length = len(prompt) if isinstance(prompt, list) else len(prompt.split())
    steps = [Step(0.0, event({"choices": [{"text": " t"}]})) for _ in range(count)]
    usage = {"prompt_tokens": length, "completion_tokens": count}
    return Answer([*steps, Step(0.0, event({"choices": [], "usage": usage}) + DONE)])


def read(text: str) -> tuple[SimRequest, ...]:
    return read_trace("-", io.BytesIO(text.encode())).requests


def test_lines_csv_and_any_order_give_the_same_trace() -> None:
    table = "arrival_s,prompt_tokens,output_tokens\n5.5,4,5\n5.0,7,3\n5.25,30,2\n"

    assert read(LINES) == REQUESTS
    assert read(table) == REQUESTS


def test_a_run_file_is_a_trace() -> None:
    records = [
        Record(index=0, scheduled_s=1.0, input_tokens=7, output_tokens=3, end_s=2.0),
        Record(index=1, scheduled_s=1.5, input_tokens=8, asked_tokens=4, error="cut"),
        Record(index=2, scheduled_s=2.0, error="never sent"),
    ]
    data = encode_run_file(RunFile(target=Target(url="u"), runs=[measure(records)]))

    assert read(data.decode()) == (SimRequest(0.0, 7, 3), SimRequest(0.5, 8, 4))


def test_the_rate_and_the_speed() -> None:
    trace = read_trace("-", io.BytesIO(LINES.encode()))

    assert trace.rate == pytest.approx(4.0)
    assert trace.at_speed(2.0).rate == pytest.approx(8.0)
    assert read_trace("-", io.BytesIO(LINES.splitlines()[0].encode())).rate is None


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no requests"),
        ('{"arrival_s": 0, "prompt_tokens": 3}', "output_tokens"),
        ('{"arrival_s": 0, "prompt_tokens": 0, "output_tokens": 3}', "at least one"),
        ('{"arrival_s": -1, "prompt_tokens": 1, "output_tokens": 3}', "arrival_s"),
        ("arrival_s,prompt_tokens,output_tokens\n0,x,3\n", "line 2"),
    ],
)
def test_a_wrong_trace_is_refused(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(text)


@pytest.mark.parametrize(("pages", "takes_ids"), [({"/props": SERVEKIT_PROPS}, True), ({}, False)])
def test_a_server_gets_the_lengths_at_their_times(
    tmp_path: Path, capfdbinary: BinaryCaptured, pages: dict[str, object], takes_ids: bool
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(LINES, encoding="utf-8")

    with FakeServer(completion, pages) as server:
        code = run(["bench", "replay", str(file), "--url", server.url, "--warmup", "1", "--json"])
        replayed = server.seen[1:]

    found = decode_run_file(capfdbinary.readouterr().out, name="standard output")
    (measured,) = found.runs
    # A busy test machine may fail the audit, which is an answer too; what was sent is the same.
    assert code == (0 if measured.valid else 3)
    assert found.command == "bench replay"
    assert [seen.path for seen in replayed] == ["/v1/completions"] * 3
    assert [isinstance(seen.body["prompt"], list) for seen in replayed] == [takes_ids] * 3
    assert sorted(seen.body["max_tokens"] for seen in replayed) == [2, 3, 5]
    assert [(record.input_tokens, record.output_tokens) for record in measured.records] == [(7, 3), (30, 2), (4, 5)]
    assert [record.scheduled_s for record in measured.records] == pytest.approx([0.0, 0.25, 0.5])


def test_the_same_seed_sends_the_same_prompts(tmp_path: Path, capfdbinary: BinaryCaptured) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(LINES, encoding="utf-8")
    sent = []
    for seed in ("1", "1", "2"):
        with FakeServer(completion, {"/props": SERVEKIT_PROPS}) as server:
            run(["bench", "replay", str(file), "--url", server.url, "--warmup", "0", "--seed", seed, "--json"])
            sent.append(sorted(str(seen.body["prompt"]) for seen in server.seen if len(seen.body["prompt"]) == 30))
        capfdbinary.readouterr()

    assert sent[0] == sent[1] != sent[2]


def test_the_simulator_takes_the_same_trace(tmp_path: Path, capfdbinary: BinaryCaptured) -> None:
    requests = [SimRequest(0.3 * index, 20 + index, 8) for index in range(20)]
    times = StepTimes(0.01, 0.002, 0.001)
    source = measure(simulate(requests, scheduler_config(requests, slots=2), times).records)
    run_path, trace_path = tmp_path / "run.json", tmp_path / "trace.jsonl"
    target = Target(url="u", kind="servekit", props={"config": {"parallel": 2}})
    run_path.write_bytes(encode_run_file(RunFile(target=target, runs=[source])))
    trace_path.write_text(LINES, encoding="utf-8")

    assert run(["bench", "replay", str(trace_path), "--simulate", str(run_path), "--slo", "ttft=1s", "--json"]) == 0

    found = decode_run_file(capfdbinary.readouterr().out, name="standard output")
    (simulated,) = found.runs
    assert found.target.kind == "simulator"
    assert [record.output_tokens for record in simulated.records] == [3, 2, 5]
    assert simulated.latency.ttft_s is not None
    assert simulated.latency.ttft_s.max == pytest.approx(0.05, rel=0.2)
    assert simulated.goodput is not None
    assert simulated.goodput.attainment == 1.0


@pytest.mark.parametrize("speed", ["0", "-1", "nan"])
def test_a_wrong_speed_is_refused(capsys: pytest.CaptureFixture[str], speed: str) -> None:
    assert run(["bench", "replay", "x", "--speed", speed]) == 2
    assert "--speed" in capsys.readouterr().err


def test_options_of_a_server_are_refused_beside_the_simulator(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "trace.jsonl"
    file.write_text(LINES, encoding="utf-8")

    assert run(["bench", "replay", str(file), "--simulate", "x", "--url", "http://127.0.0.1:1"]) == 2
    assert "--url belongs to a server" in capsys.readouterr().err
