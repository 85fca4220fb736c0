"""The real server process, started as a user would and watched from outside: its socket, its exit code, its output."""

import json
import os
import select
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx

from tests.blackbox.wire import Wire

START_DEADLINE_S = 60.0
EXIT_DEADLINE_S = 60.0
POLL_DEADLINE_S = 60.0
"""None of these is a claim about speed: they turn a hang into a failure."""

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"


class Server:
    """A running server. Its pool and its queue are read off `GET /props`."""

    def __init__(self, process: subprocess.Popen[str], url: str, log_file: Path) -> None:
        self.process = process
        self.url = url
        self._log_file = log_file
        parts = urlsplit(url)
        assert parts.hostname is not None
        assert parts.port is not None
        self.host, self.port = parts.hostname, parts.port
        # The environment's proxy settings are for other hosts.
        self.http = httpx.Client(base_url=url, timeout=POLL_DEADLINE_S, trust_env=False)

    @property
    def log(self) -> str:
        """Everything it has said on stderr."""
        return self._log_file.read_text(encoding="utf-8")

    @property
    def log_tail(self) -> str:
        """The end of the log without our own polling, for messages."""
        return "\n".join([line for line in self.log.splitlines() if "GET /props" not in line][-30:])

    def get(self, path: str) -> Any:
        """The JSON of a GET that succeeds."""
        response = self.http.get(path)
        assert response.status_code == 200, response.text
        return response.json()

    @property
    def state(self) -> dict[str, Any]:
        """What runs and waits, and how full the pool is, as of the end of the last step."""
        state: dict[str, Any] = self.get("/props")["state"]
        return state

    def post(self, path: str, body: Any) -> httpx.Response:
        """One POST of JSON, over a connection that may be reused; safe from any thread."""
        return self.http.post(path, json=body)

    def answer(self, path: str, body: Any) -> dict[str, Any]:
        """The JSON of a POST that succeeds."""
        response = self.post(path, body)
        assert response.status_code == 200, response.text
        answer: dict[str, Any] = response.json()
        return answer

    def wire(self, *, receive_buffer: int | None = None) -> Wire:
        """A new connection, driven byte by byte."""
        return Wire(self.host, self.port, receive_buffer=receive_buffer)

    def open(self, path: str, body: Any) -> Wire:
        """A POST over a connection of its own, not waited for."""
        wire = self.wire()
        wire.post(path, body)
        return wire

    def wait_for(self, condition: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
        """The first state that meets the condition."""
        state: dict[str, Any] = {}

        def met() -> bool:
            nonlocal state
            state = self.state
            return condition(state)

        wait_until(met, lambda: f"the state never came; the last was {state}\n{self.log_tail}")
        return state

    def wait_for_log(self, text: str, count: int = 1) -> None:
        """Until stderr holds `text` that many times."""
        wait_until(lambda: self.log.count(text) >= count, lambda: f"{text!r} never came\n{self.log_tail}")

    def wait_idle(self) -> dict[str, Any]:
        """The state once nothing runs, waits or holds a block."""
        return self.wait_for(is_idle)

    def check_serving(self) -> None:
        """Raise AssertionError unless it is idle, healthy and answers a short request."""
        assert self.process.poll() is None, self.log_tail
        assert self.get("/health") == {"status": "ok"}
        body = {"messages": [{"role": "user", "content": "ping"}], "max_tokens": 4, "ignore_eos": True}
        assert self.answer(CHAT, body)["usage"]["completion_tokens"] == 4
        self.wait_idle()

    def exit_code(self) -> int:
        """The exit code of a process that has been told to end."""
        code: int = self.process.wait(EXIT_DEADLINE_S)
        return code

    def check_clean_exit(self) -> None:
        """Raise AssertionError unless it ended with 0, one line on stdout and no traceback."""
        assert self.exit_code() == 0, self.log_tail
        assert self.process.stdout is not None
        assert self.process.stdout.read() == "", "stdout is for the URL alone"
        assert "Traceback" not in self.log, self.log_tail


def is_idle(state: Mapping[str, Any]) -> bool:
    """Whether nothing runs, waits or holds a block."""
    return not any(state[name] for name in ("open", "running", "waiting", "live_blocks"))


def wait_until(condition: Callable[[], bool], otherwise: Callable[[], str]) -> None:
    """Ask again and again, giving way in between; fail with a message when it takes absurdly long."""
    deadline = time.monotonic() + POLL_DEADLINE_S
    pause = threading.Event()
    while not condition():
        assert time.monotonic() < deadline, otherwise()
        pause.wait(0.005)


def command(model: Path | str, *flags: str) -> list[str]:
    """The command line of a server on a free port with one compute thread."""
    fake = os.environ.get("SERVEKIT_TEST_DEVICE") == "fake-cuda"
    module = "tests.blackbox.fake_cuda" if fake else "servekit.cli.main"
    return [sys.executable, "-m", module, "serve", str(model), "--port", "0", "--threads", "1", *flags]


def environment(env: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment of a server: ours, without settings meant for other servers."""
    ours = {name: value for name, value in os.environ.items() if not name.startswith("SERVEKIT_")}
    if "SERVEKIT_HOME" in os.environ:
        ours["SERVEKIT_HOME"] = os.environ["SERVEKIT_HOME"]
    return {**ours, "OMP_NUM_THREADS": "1", **(env or {})}


@contextmanager
def running_server(model: Path | str, *flags: str, env: Mapping[str, str] | None = None) -> Iterator[Server]:
    """Start a server and wait for its URL; afterwards end it with SIGTERM, unless the test has, and check its exit."""
    with tempfile.TemporaryDirectory() as folder:
        log_file = Path(folder) / "stderr"
        with open(log_file, "w", encoding="utf-8") as log:
            process = subprocess.Popen(
                command(model, *flags), stdout=subprocess.PIPE, stderr=log, text=True, env=environment(env)
            )
        try:
            server = Server(process, _read_url(process, log_file), log_file)
            with server.http:
                yield server
            if process.poll() is None:
                process.terminate()
            server.check_clean_exit()
        finally:
            process.kill()
            process.communicate()


def _read_url(process: subprocess.Popen[str], log_file: Path) -> str:
    assert process.stdout is not None
    readable, _, _ = select.select([process.stdout], [], [], START_DEADLINE_S)
    line = process.stdout.readline() if readable else ""
    assert line.startswith("http://"), f"stdout {line!r}, stderr:\n{log_file.read_text(encoding='utf-8')}"
    return line.strip()


def json_without_infinities(text: str | bytes) -> Any:
    """Parse strictly: NaN and Infinity are not JSON (RFC 8259)."""

    def refuse(name: str) -> Any:
        raise AssertionError(f"{name} is not JSON")

    return json.loads(text, parse_constant=refuse)
