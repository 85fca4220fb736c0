"""The README's curl commands, run by curl against a server with the demo model on a port of its own."""

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from tests.blackbox.server import running_server

_README = Path(__file__).parents[2] / "README.md"
_DEFAULT_URL = "http://127.0.0.1:8080"


def _curl_commands() -> list[str]:
    blocks = re.findall(r"```sh\n(curl .*?)```", _README.read_text(encoding="utf-8"), re.DOTALL)
    assert len(blocks) == 2
    return blocks


@pytest.mark.demo
def test_curl_commands_answer() -> None:
    assert shutil.which("curl"), "the README uses curl"
    with running_server("demo", "--kv-memory", "64MiB", "--parallel", "2") as server:
        whole, stream = (
            subprocess.run(
                ["bash", "-c", block.replace(_DEFAULT_URL, server.url)],
                capture_output=True,
                text=True,
                timeout=120,
                check=True,
                encoding="utf-8",
            ).stdout
            for block in _curl_commands()
        )
    answer = json.loads(whole)
    assert "Paris" in answer["choices"][0]["message"]["content"]
    events = [line.removeprefix("data: ") for line in stream.splitlines() if line]
    assert events[-1] == "[DONE]"
    assert json.loads(events[0])["object"] == "text_completion"
