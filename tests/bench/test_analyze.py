"""Tables of other tools get our metrics: two published load tests to the printed digit, and refusals by name."""

import io
import json
from pathlib import Path

import pytest

from servekit.bench.analyze import read_measured
from servekit.bench.measure import measure
from servekit.bench.result import Record, Run, RunFile, Target, decode_run_file, encode_run_file
from servekit.cli.main import run
from servekit.errors import InputError
from tests.bench.lesson_load import FOUR_SLOTS, ONE_SLOT
from tests.bench.records import answered

Captured = pytest.CaptureFixture[str]


def read(text: str, *, start: float = 0.0) -> list[Record]:
    return read_measured("-", io.BytesIO(text.encode()), start=start)


@pytest.mark.parametrize(
    ("table", "tokens", "ttft50", "ttft95", "tpot_ms", "e2e95", "arrivals", "mean", "in_system"),
    [
        (ONE_SLOT, 49.8, 2.18, 7.67, 12, 8.5, 0.73, 4.38, 3.20),
        (FOUR_SLOTS, 60.9, 0.58, 2.26, 38, 5.7, 0.90, 3.28, 2.94),
    ],
)
def test_published_load_tests(
    table: str,
    tokens: float,
    ttft50: float,
    ttft95: float,
    tpot_ms: float,
    e2e95: float,
    arrivals: float,
    mean: float,
    in_system: float,
) -> None:
    found = measure(read(table))

    latency, little = found.latency, found.little
    assert latency.ttft_s is not None
    assert latency.tpot_s is not None
    assert latency.e2e_s is not None
    assert little is not None
    assert round(found.throughput.output_tokens_per_s, 1) == tokens
    assert (round(latency.ttft_s.p50, 2), round(latency.ttft_s.p95, 2)) == (ttft50, ttft95)
    assert round(latency.tpot_s.p50 * 1e3) == tpot_ms
    assert round(latency.e2e_s.p95, 1) == e2e95
    assert (round(little.arrivals_per_s, 2), round(little.mean_s, 2)) == (arrivals, mean)
    assert (round(little.expected, 2), round(little.time_average, 2)) == (in_system, in_system)
    assert little.verdict == "agree"


def test_json_lines_and_other_names_say_the_same() -> None:
    lines = '{"arrival": 1, "ttft": 0.5, "e2e": 1.5, "tokens": 11, "prompt_tokens": 7}\n\n'

    assert read(lines) == read("arrival_s, ttft_s, e2e_s, output_tokens, prompt_tokens\n1,0.5,1.5,11,7\n")


def test_the_start_can_be_moved() -> None:
    (record,) = read("arrival_s,ttft_s,e2e_s,output_tokens\n100,1,2,3\n", start=99.0)

    assert (record.scheduled_s, record.first_token_s, record.end_s) == (1.0, 2.0, 3.0)


def test_a_run_file_is_read_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "run.json"
    records = [answered(index, at=float(index)) for index in range(3)]
    file.write_bytes(encode_run_file(RunFile(target=Target(url="u"), runs=[Run(duration_s=3.0, records=records)])))

    assert read_measured(str(file), io.BytesIO()) == records
    with pytest.raises(InputError, match="its own start"):
        read_measured(str(file), io.BytesIO(), start=1.0)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "no requests"),
        ("arrival_s,ttft_s,e2e_s\n1,1,2\n", "output_tokens"),
        ("arrival_s,ttft_s,e2e_s,output_tokens\n1,1,2,x\n", "output_tokens"),
        ("arrival_s,ttft_s,e2e_s,output_tokens\n1,nan,2,3\n", "ttft_s"),
        ("arrival_s,ttft_s,e2e_s,output_tokens\n1,-1,2,3\n", "ttft_s"),
        ("arrival_s,ttft_s,e2e_s,output_tokens\n1,3,2,3\n", "more than e2e_s"),
        ("arrival_s,ttft_s,e2e_s,output_tokens\n1,1,2,2.5\n", "whole number"),
        ("arrival_s,ttft_ms,e2e_ms,output_tokens\n1,900,2000,2\n", "no ttft_s"),
        ('{"arrival_s": true, "ttft_s": 1, "e2e_s": 2, "output_tokens": 2}', "arrival_s"),
        ('{"arrival_s": 1,\n', "not JSON"),
    ],
)
def test_a_wrong_table_is_refused_by_line_and_column(text: str, words: str) -> None:
    with pytest.raises(InputError, match=words):
        read(text)


def test_not_utf8_is_refused() -> None:
    with pytest.raises(InputError, match="UTF-8"):
        read_measured("-", io.BytesIO(b"\xff\xfe1"))


def test_the_command(tmp_path: Path, capfd: Captured) -> None:
    file = tmp_path / "measured.csv"
    file.write_text(FOUR_SLOTS, encoding="utf-8")

    assert run(["bench", "analyze", str(file), "--slo", "ttft=2s"]) == 0
    shown = capfd.readouterr().out
    assert shown.startswith("24 requests in 26.8 s, 60.9 tokens/s")
    assert "0.90/s x 3.28 s = 2.94 in the system, time average 2.94: agree" in shown

    assert run(["bench", "analyze", str(file), "--slo", "ttft=2s", "--json"]) == 0
    out = capfd.readouterr().out
    found = decode_run_file(out.encode(), name="standard output")
    assert found.runs[0].goodput is not None
    assert found.runs[0].goodput.good_requests == 22
    assert json.loads(out)["command"] == "bench analyze"


def test_a_clock_that_began_long_before_gets_a_hint(tmp_path: Path, capfd: Captured) -> None:
    file = tmp_path / "measured.csv"
    file.write_text("arrival_s,ttft_s,e2e_s,output_tokens\n1000,1,2,3\n1001,1,2,3\n", encoding="utf-8")

    assert run(["bench", "analyze", str(file)]) == 0
    assert "--start 1000" in capfd.readouterr().err


def test_a_file_that_is_not_there(capfd: Captured) -> None:
    assert run(["bench", "analyze", "/nowhere/at/all.csv"]) == 2
    assert "cannot be read" in capfd.readouterr().err
