"""The embedding suites against a server with known vectors: checked before timed, refused where there are none."""

import hashlib
import json
import math
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from servekit.bench import embed_run
from servekit.bench.embed import SUITES, Case, cases_of, cosine
from servekit.bench.result import RunFile, decode_run_file
from servekit.cli.main import run
from tests.bench.fake_server import Answer, FakeServer, Script, Seen, json_answer

BinaryCaptured = pytest.CaptureFixture[bytes]
SPECIAL_TOKENS = 2
PER_WORD = 1.25


def vector_of(text: str) -> list[float]:
    """The same text gives the same vector, another text another one."""
    rng = Random(hashlib.sha256(text.encode()).digest())
    return [rng.uniform(-1, 1) for _ in range(8)]


def count_tokens(text: str) -> int:
    """Every fourth word is two tokens, and every text gets two special ones."""
    return SPECIAL_TOKENS + int(PER_WORD * len(text.split()))


def embedder(*, context: int = 10_000, vector: Callable[[str, int], list[float]] | None = None) -> Script:
    """A server of texts up to `context` tokens; `vector` gets the text and how many came with it."""

    def answer(number: int, seen: Seen) -> Answer:
        texts: list[str] = seen.body["input"]
        longest = max(map(count_tokens, texts))
        if longest > context:
            return json_answer({"error": {"message": f"{longest} tokens are more than {context}"}}, status=400)
        rows = [
            {"index": index, "embedding": vector(text, len(texts)) if vector else vector_of(text)}
            for index, text in enumerate(texts)
        ]
        usage = {"prompt_tokens": sum(map(count_tokens, texts)), "total_tokens": sum(map(count_tokens, texts))}
        return json_answer({"data": rows[::-1], "usage": usage})

    return answer


def bench(server: FakeServer, *args: str) -> int:
    return run(["bench", "embed", "--url", server.url, "--requests", "4", "--warmup", "0", "--json", *args])


def run_file(captured: BinaryCaptured) -> RunFile:
    return decode_run_file(captured.readouterr().out, name="standard output")


def test_the_four_suites() -> None:
    latency, scoring, throughput, concurrency = (cases_of(suite) for suite in SUITES)

    assert [(case.batch, case.tokens) for case in latency] == [(1, 128), (1, 512), (1, 4096)]
    assert [(case.batch, case.tokens) for case in scoring] == [(5, 512), (25, 512), (50, 512)]
    assert [(case.batch, case.tokens, case.clients) for case in throughput] == [
        (100, 512, 4),
        (100, 1024, 4),
        (100, 4096, 4),
    ]
    assert [case.clients for case in concurrency] == [1, 2, 4, 8, 16]
    assert {case.tokens for case in concurrency} == {512}


def test_texts_have_the_length_in_the_server_s_own_tokens(capfdbinary: BinaryCaptured) -> None:
    with FakeServer(embedder()) as server:
        code = bench(server, "--suite", "latency,scoring", "--tokens", "512")
        seen = list(server.seen)

    found = run_file(capfdbinary)
    assert code in (0, 3)
    cases = [(case["batch"], case["tokens"]) for case in found.load["cases"]]
    assert cases == [(1, 128), (1, 512), (5, 512), (25, 512), (50, 512)]
    for (batch, tokens), measured in zip(cases, found.runs, strict=True):
        assert measured.requests.ok == 4
        for record in measured.records:
            assert record.input_tokens == pytest.approx(batch * tokens, rel=0.01)
    texts = [text for one in seen for text in one.body["input"]]
    assert len(set(texts[-40:])) == 40, "every text is another one, so that no cache can know it"
    assert [round(rate) for rate in found.load["embeddings_per_s"]] == [
        round(measured.throughput.requests_per_s * batch)
        for (batch, _), measured in zip(cases, found.runs, strict=True)
    ]


def test_lengths_that_the_server_refuses_are_left_out(capfd: pytest.CaptureFixture[str]) -> None:
    with FakeServer(embedder(context=512)) as server:
        args = ["bench", "embed", "--url", server.url, "--requests", "2", "--warmup", "0", "--suite", "latency"]
        code = run(args)

    shown = capfd.readouterr().out
    assert code in (0, 3)
    assert "texts of 4,096 tokens were left out" in " ".join(shown.split())
    assert "no --reference was given" in shown
    assert shown.count("latency") == 2


def test_several_clients_and_several_processes(monkeypatch: pytest.MonkeyPatch, capfdbinary: BinaryCaptured) -> None:
    cases = [Case("throughput", 16, 3, clients=2), Case("concurrency", 16, 1, clients=3)]
    monkeypatch.setattr("servekit.bench.embed.cases_of", lambda suite: [c for c in cases if c.suite == suite])
    monkeypatch.setattr(embed_run, "_START_UP_S", 0.0)

    with FakeServer(embedder()) as server:
        code = bench(server, "--suite", "throughput,concurrency")

    assert code in (0, 3)
    batches, singles = run_file(capfdbinary).runs
    assert [(one.requests.ok, one.concurrency) for one in (batches, singles)] == [(4, 2), (4, 3)]
    assert [record.index for record in batches.records] == [0, 1, 2, 3]
    assert all(record.input_tokens for record in batches.records)


def refusal(capfd: pytest.CaptureFixture[str], script: Script, *args: str) -> tuple[int, str, list[Seen]]:
    with FakeServer(script) as server:
        code = bench(server, "--suite", "latency", *args)
        seen = list(server.seen)
    captured = capfd.readouterr()
    assert captured.out == ""
    return code, captured.err, seen


@pytest.mark.parametrize("status", [400, 404, 501])
def test_a_server_without_embeddings_is_a_negative_result(capfd: pytest.CaptureFixture[str], status: int) -> None:
    def no(number: int, seen: Seen) -> Answer:
        return json_answer({"error": {"message": "this model does not embed"}}, status=status)

    code, said, _ = refusal(capfd, no)

    assert code == 1
    assert f"makes no embeddings with 'fake': {status}: this model does not embed" in said
    assert "Traceback" not in said


def test_a_vector_that_changes_in_a_batch_is_not_timed(capfd: pytest.CaptureFixture[str]) -> None:
    def padded(text: str, batch: int) -> list[float]:
        return [value + (0.3 if batch > 1 else 0.0) for value in vector_of(text)]

    code, said, seen = refusal(capfd, embedder(vector=padded))

    assert code == 1
    assert "against the same text in a batch the cosine is only" in said
    assert len(seen) == 5, "four texts alone and one batch, and nothing after"


@pytest.mark.parametrize("wrong", [False, True])
def test_a_reference_file(capfd: pytest.CaptureFixture[str], tmp_path: Path, wrong: bool) -> None:
    file = tmp_path / "reference.jsonl"
    rows = [{"text": text, "embedding": vector_of(text + ("!" if wrong else ""))} for text in ("one", "two words")]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")

    with FakeServer(embedder()) as server:
        code = bench(server, "--suite", "latency", "--tokens", "128", "--reference", str(file))

    captured = capfd.readouterr()
    if wrong:
        assert code == 1
        assert f"against {file} the cosine is only" in captured.err
    else:
        assert code in (0, 3)
        checks: list[dict[str, Any]] = json.loads(captured.out)["load"]["checks"]
        assert [check["against"] for check in checks] == ["the same text in a batch", str(file)]
        assert all(check["least"] == pytest.approx(1.0) for check in checks)


def test_another_server_as_the_reference(capfd: pytest.CaptureFixture[str]) -> None:
    with FakeServer(embedder()) as server, FakeServer(embedder(vector=lambda text, batch: [1.0] * 8)) as other:
        assert bench(server, "--suite", "latency", "--reference", other.url) == 1

    assert f"against fake at {other.url}" in capfd.readouterr().err


def test_an_answer_that_is_none_is_refused(capfd: pytest.CaptureFixture[str]) -> None:
    code, said, _ = refusal(capfd, lambda number, seen: json_answer({"data": []}))

    assert code == 2
    assert "answered 0 vectors to 1 texts" in said


@pytest.mark.parametrize(
    ("args", "word"),
    [
        (["--suite", "speed"], "--suite"),
        (["--min-cosine", "1.5"], "--min-cosine"),
        (["--suite", "scoring", "--tokens", "100"], "--tokens"),
        (["--duration", "x"], "--duration"),
        (["--url", "ftp://x"], "--url"),
    ],
)
def test_a_wrong_option_is_named(capfd: pytest.CaptureFixture[str], args: list[str], word: str) -> None:
    assert run(["bench", "embed", *args]) == 2
    assert word in capfd.readouterr().err


def test_cosine() -> None:
    assert cosine([1.0, 0.0], [2.0, 0.0]) == 1.0
    assert cosine([1.0, 0.0], [0.0, 1.0]) == 0.0
    assert math.isnan(cosine([0.0], [1.0]))
    assert math.isnan(cosine([1.0], [1.0, 2.0]))
