"""The life of the process: the address it takes, and how a signal ends it."""

import contextlib
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.blackbox.bodies import chat, completion, endless, finish
from tests.blackbox.server import (
    CHAT,
    COMPLETIONS,
    EXIT_DEADLINE_S,
    START_DEADLINE_S,
    Server,
    command,
    environment,
    running_server,
)
from tests.blackbox.tiny import CONTEXT, TinyChat

FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def process(chatty: TinyChat) -> Iterator[Server]:
    with running_server(chatty.directory, *FLOAT32, "--kv-memory", "2MiB") as server:
        yield server


def children_of(server: Server) -> list[psutil.Process]:
    """The processes it has started."""
    return psutil.Process(server.process.pid).children(recursive=True)


def assert_free(port: int) -> None:
    """Raise OSError unless the port can be bound by the next server."""
    with socket.socket() as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(("127.0.0.1", port))


def test_sigterm_gives_answers_their_grace_and_then_an_error(chatty: TinyChat) -> None:
    # Too slow to end within the grace: each of 8,000 tokens has twenty log-probabilities.
    body = endless(logprobs=True, top_logprobs=20)
    echo = completion(chatty.byte_ids("\x01") * (CONTEXT - 1), n=64, max_tokens=1, echo=True, stream=True)
    flags = ("--kv-memory", "64MiB", "--parallel", "2", "--grace", "1")
    with running_server(chatty.directory, *FLOAT32, *flags) as server:
        children = children_of(server)
        # One client does not read: its answer is computed, but cannot be delivered.
        stalled = server.wire(receive_buffer=4096)
        stalled.post(COMPLETIONS, {**echo, "return_token_ids": True}, x_request_id="stalled")
        assert stalled.head()[0] == 200
        server.wait_idle()
        streams = [server.open(CHAT, {**body, "stream": True}) for _ in range(3)]
        server.wait_for(lambda state: (state["running"], state["waiting"]) == (2, 1))
        queued = server.open(CHAT, body)
        server.wait_for(lambda state: state["waiting"] == 2)
        with server.wire() as idle, server.wire() as late:
            server.process.send_signal(signal.SIGTERM)
            server.wait_for_log("SIGTERM")
            assert server.http.get("/health").json() == {"status": "draining"}
            late.post(CHAT, chat())
            status, _, content = late.response()
            assert (status, b'"code":"unavailable"' in content) == (503, True)
            for wire in streams:
                *events, last = wire.events()
                assert last["error"]["type"] == "unavailable_error"
                assert all(event["choices"][0]["finish_reason"] is None for event in events)
                assert wire.at_end()
            status, _, content = queued.response()
            assert (status, b'"code":"unavailable"' in content) == (503, True)
            assert server.exit_code() == 0, server.log_tail
            assert idle.at_end()
        assert_free(server.port)
        assert not any(child.is_running() for child in children)
        for wire in (*streams, queued, stalled):
            wire.close()


def test_sigint_waits_only_for_what_runs(chatty: TinyChat) -> None:
    flags = ("--kv-memory", "16MiB", "--grace", str(EXIT_DEADLINE_S * 10))
    with running_server(chatty.directory, *FLOAT32, *flags) as server:
        body = endless(max_tokens=600)
        with server.open(CHAT, {**body, "stream": True}) as stream, server.open(CHAT, body) as whole:
            server.wait_for(lambda state: state["running"] == 2)
            server.process.send_signal(signal.SIGINT)
            events = list(stream.events())
            status, _, content = whole.response()
            assert finish(events)["finish_reason"] == "length"
            assert (status, b'"finish_reason":"length"' in content) == (200, True)
        assert server.exit_code() == 0


def test_a_second_signal_ends_it_at_once(chatty: TinyChat) -> None:
    process = subprocess.Popen(
        command(chatty.directory, *FLOAT32, "--kv-memory", "16MiB", "--grace", "10000"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=environment(),
    )
    try:
        assert process.stdout is not None
        assert process.stderr is not None
        url = process.stdout.readline().strip()
        # An answer that never ends within the test.
        with httpx.stream(
            "POST", f"{url}{CHAT}", json=endless(stream=True, n=16), timeout=60, trust_env=False
        ) as answer:
            next(answer.iter_lines())
            process.send_signal(signal.SIGTERM)
            while "SIGTERM" not in process.stderr.readline():
                assert process.poll() is None
            process.send_signal(signal.SIGTERM)
            assert process.wait(EXIT_DEADLINE_S) == 128 + signal.SIGTERM
    finally:
        process.kill()
        process.communicate()


DYING = """
from servekit.cli.main import main
from servekit.engine.core.scheduler import Scheduler
apply, steps = Scheduler.apply, iter(range(8))

def apply_or_die(self, *given):
    if next(steps, None) is None:
        raise MemoryError("no more")
    return apply(self, *given)

Scheduler.apply = apply_or_die
main()
"""
"""The server, with an engine thread that comes to an end with its ninth step."""


def test_a_dead_engine_ends_the_process_with_70(chatty: TinyChat, tmp_path: Path) -> None:
    interpreter, _, _, *arguments = command(chatty.directory, *FLOAT32, "--kv-memory", "2MiB")
    with open(tmp_path / "log", "w+", encoding="utf-8") as log:
        process = subprocess.Popen(
            [interpreter, "-c", DYING, *arguments], stdout=subprocess.PIPE, stderr=log, text=True, env=environment()
        )
        try:
            assert process.stdout is not None
            url = process.stdout.readline().strip()
            with httpx.Client(base_url=url, timeout=60, trust_env=False) as client:
                with client.stream("POST", CHAT, json=endless(stream=True)) as answer:
                    *_, error, done = [line for line in answer.iter_lines() if line.startswith("data:")]
                assert ('"error":{' in error, done) == (True, "data: [DONE]")
                with contextlib.suppress(httpx.TransportError):  # the process may be gone already
                    assert client.get("/health").status_code == 503
            assert process.wait(EXIT_DEADLINE_S) == 70
            log.seek(0)
            assert "error: the engine has stopped" in log.read()
        finally:
            process.kill()
            process.communicate()


def test_a_taken_port_is_told_before_anything_is_loaded(server: Server, chatty: TinyChat) -> None:
    arguments = command(chatty.directory, *FLOAT32)
    arguments[arguments.index("--port") + 1] = str(server.port)
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=START_DEADLINE_S, env=environment())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.splitlines() == [
        f"error: address 127.0.0.1:{server.port} is in use",
        "hint: choose another with --port",
    ]


def listening(server: Server) -> set[str]:
    """The addresses on which it listens."""
    connections = psutil.Process(server.process.pid).net_connections("tcp")
    return {connection.laddr.ip for connection in connections if connection.status == psutil.CONN_LISTEN}


def test_it_listens_on_loopback_alone(server: Server) -> None:
    assert server.url == f"http://127.0.0.1:{server.port}"
    assert listening(server) == {"127.0.0.1"}


def has_ipv6() -> bool:
    """Whether this machine has an IPv6 loopback."""
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
def test_ipv6_loopback_has_brackets_in_its_url(chatty: TinyChat) -> None:
    with running_server(chatty.directory, *FLOAT32, "--host", "::1") as server:
        assert server.url == f"http://[::1]:{server.port}"
        assert listening(server) == {"::1"}
        server.check_serving()


def test_localhost_is_not_every_address(chatty: TinyChat) -> None:
    with running_server(chatty.directory, *FLOAT32, "--host", "localhost") as server:
        assert listening(server) <= {"127.0.0.1", "::1"}
        server.check_serving()


def test_an_address_that_others_can_reach_needs_a_word(chatty: TinyChat) -> None:
    arguments = command(chatty.directory, "--host", "0.0.0.0")
    ended = subprocess.run(arguments, capture_output=True, text=True, timeout=START_DEADLINE_S, env=environment())
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr.startswith("error: --host 0.0.0.0 can be reached from other machines")
