"""`servekit kv --check`: a plan against what a server says about itself."""

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from servekit.cli.main import run
from servekit.kvcalc.memory import plan_pool
from servekit.kvcalc.model_shape import read_model_shape

CONFIG_PATH = Path(__file__).parents[2] / "configs" / "models" / "Qwen2.5-0.5B-Instruct.json"
CONFIG: dict[str, Any] = json.loads(CONFIG_PATH.read_text(encoding="utf-8"))


def props() -> dict[str, Any]:
    """What a server with 100 MB of KV memory says."""
    plan = plan_pool(
        read_model_shape(CONFIG), kv_memory=100_000_000, block_size=16, kv_dtype="bfloat16", max_model_len=4096
    )
    return {"model": "qwen", "model_config": CONFIG, "kv": {"dtype": "bfloat16", **asdict(plan)}}


@contextmanager
def serving(body: bytes, status: int = 200) -> Iterator[str]:
    """A server on a free port that answers /props with `body` and anything else with 404."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/props" else 404)
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Says nothing."""

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()
            thread.join()


def test_a_server_that_has_what_was_planned(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(json.dumps(props()).encode()) as url:
        assert run(["kv", "--check", url]) == 0
        assert "DIFFERS" not in capsys.readouterr().out
        assert run(["kv", str(CONFIG_PATH), "--check", url, "--kv-memory", "100000000", "--json"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert found["equal"] is True
    assert {row["name"] for row in found["pool"]} == {
        "block_size",
        "block_bytes",
        "bytes_per_token",
        "num_blocks",
        "kv_bytes",
        "num_tokens",
        "max_seqs_at_context",
        "max_model_len",
    }


@pytest.mark.parametrize("name", ["num_blocks", "block_bytes", "max_seqs_at_context"])
def test_a_server_that_differs_is_status_1(capsys: pytest.CaptureFixture[str], name: str) -> None:
    said = props()
    said["kv"][name] += 1

    with serving(json.dumps(said).encode()) as url:
        assert run(["kv", "--check", url]) == 1

    captured = capsys.readouterr()
    assert "DIFFERS" in captured.out
    assert captured.err == f"error: plan and server differ in {name}\n"


def test_another_model_differs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    other.write_text(json.dumps({**CONFIG, "num_hidden_layers": 12}), encoding="utf-8")

    with serving(json.dumps(props()).encode()) as url:
        assert run(["kv", str(other), "--check", url]) == 1

    assert "block_bytes" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("body", "status", "code", "said"),
    [
        (b"{}", 200, 2, "says nothing about KV memory"),
        (b"<html>", 200, 2, "does not answer in JSON"),
        (b"{}", 503, 1, "answered with status 503"),
        (b'{"kv": {"dtype": "bfloat16"}, "model_config": {}}', 200, 2, "no usable kv.block_size"),
        (b'{"kv": {}}', 200, 2, "does not show its model's configuration"),
    ],
)
def test_a_server_that_is_no_servekit(
    capsys: pytest.CaptureFixture[str], body: bytes, status: int, code: int, said: str
) -> None:
    with serving(body, status) as url:
        assert run(["kv", "--check", url]) == code

    assert said in capsys.readouterr().err


def test_nobody_answers(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(b"{}") as url:
        pass

    assert run(["kv", "--check", url]) == 1
    assert "does not answer" in capsys.readouterr().err
