"""The gates of the real process, byte by byte: who is let in, and how much a client may send before it is stopped."""

import subprocess
from collections.abc import Iterator

import psutil
import pytest

from tests.blackbox.bodies import chat, endless
from tests.blackbox.server import CHAT, Server, command, environment, json_without_infinities, running_server
from tests.blackbox.tiny import TinyChat
from tests.blackbox.wire import Wire

KEY = "sesame-0123456789"
MAX_BODY = 2 * 2**20


@pytest.fixture(scope="module")
def process(chatty: TinyChat) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--kv-memory", "2MiB", "--max-body", "2MiB", "--max-model-len", "1024")
    with running_server(chatty.directory, *flags) as server:
        yield server


def ask(wire: Wire, *lines: str, body: bytes = b"") -> tuple[int, dict[str, str], bytes]:
    wire.send("\r\n".join([*lines, "", ""]).encode() + body)
    return wire.response()


def code(body: bytes) -> str:
    return str(json_without_infinities(body)["error"]["code"])


@pytest.mark.parametrize(
    ("host_lines", "status"),
    [
        (["Host: evil.example"], 403),
        (["Host: 127.0.0.1.evil.example"], 403),
        ([], 400),
        (["Host: 127.0.0.1", "Host: evil.example"], 400),
        (["Host: localhost"], 200),
    ],
)
def test_dns_rebinding(server: Server, host_lines: list[str], status: int) -> None:
    with server.wire() as wire:
        assert ask(wire, "GET /v1/models HTTP/1.1", *host_lines)[0] == status
    with server.wire() as wire:
        # No body follows: the answer must come before one is waited for.
        head = (f"POST {CHAT} HTTP/1.1", *host_lines, "Content-Type: application/json", "Content-Length: 9")
        if status != 200:
            assert ask(wire, *head)[0] == status
            assert wire.at_end()


def test_the_server_knows_its_own_port(server: Server) -> None:
    for host, status in ((f"127.0.0.1:{server.port}", 200), (f"127.0.0.1:{server.port + 1}", 403)):
        with server.wire() as wire:
            assert ask(wire, "GET /health HTTP/1.1", f"Host: {host}")[0] == status


def test_a_form_of_a_web_page_reaches_nothing(server: Server) -> None:
    for media_type in ("text/plain", "application/x-www-form-urlencoded", "multipart/form-data; boundary=x"):
        response = server.http.post(CHAT, content=b'{"messages":[]}', headers={"content-type": media_type})
        assert response.status_code == 415


@pytest.mark.parametrize(
    "name", ["../../etc/passwd", "/etc/passwd", "..\\..\\x", "chatty\x00", "file:///etc/hosts", "x" * 1_000_000]
)
def test_a_model_name_is_only_compared(server: Server, name: str) -> None:
    response = server.post(CHAT, {**chat(), "model": name})
    assert (response.status_code, response.json()["error"]["code"]) == (404, "model_not_found")
    assert len(response.text) < 500
    assert "root:" not in response.text
    path = server.http.get("/v1/models/..%2f..%2fetc%2fpasswd")
    assert (path.status_code, path.json()["error"]["code"]) == (404, "model_not_found")


def test_huge_bodies_are_stopped_at_the_limit(server: Server) -> None:
    before = psutil.Process(server.process.pid).memory_info().rss
    lines = (f"POST {CHAT} HTTP/1.1", "Host: 127.0.0.1", "Content-Type: application/json")
    with server.wire() as wire:
        status, headers, body = ask(wire, *lines, "Content-Length: 99999999999", body=b"x")
        assert (status, headers["connection"], code(body)) == (413, "close", "body_too_large")
    with server.wire() as wire:
        piece = b"10000\r\n" + b" " * 2**16 + b"\r\n"
        wire.send("\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode())
        for _ in range(MAX_BODY // 2**16 + 1):
            wire.send(piece)
        status, headers, body = wire.response()
        assert (status, headers["connection"], code(body)) == (413, "close", "body_too_large")
    with server.wire() as wire:
        assert ask(wire, *lines, "Content-Encoding: gzip", "Content-Length: 3", body=b"\x1f\x8b\x08")[0] == 415
    assert psutil.Process(server.process.pid).memory_info().rss - before < 2 * MAX_BODY


def test_huge_heads_are_stopped(server: Server) -> None:
    get = "GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n"
    with server.wire() as wire:
        wire.send((get + "X: " + "a" * 100_000).encode())  # it never ends
        status, headers, body = wire.response()
        assert (status, headers["connection"], code(body)) == (431, "close", "headers_too_large")
        assert wire.at_end()
    with server.wire() as wire:
        wire.send((get + "".join(f"X-{i}: a\r\n" for i in range(1000)) + "\r\n").encode())
        assert wire.response()[0] == 431
    with server.wire() as wire:
        assert ask(wire, f"GET /{'a' * 9000} HTTP/1.1", "Host: 127.0.0.1")[0] == 414


def test_what_is_no_http_gets_the_shape_of_every_error(server: Server) -> None:
    with server.wire() as wire:
        wire.send(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\r\n\r\n")
        status, headers, body = wire.response()
        assert (status, headers["content-type"], code(body)) == (400, "application/json", "invalid_value")


def test_slow_heads_slow_bodies_and_slow_readers_are_let_go(chatty: TinyChat) -> None:
    flags = ("--dtype", "float32", "--kv-memory", "8MiB", "--read-timeout", "0.5", "--write-timeout", "0.5")
    with running_server(chatty.directory, *flags) as server:
        with server.wire() as silent, server.wire() as slow_head, server.wire() as slow_body:
            slow_head.send(b"GET /health HTTP/1.1\r\nHost: 127.0.0.1\r\n")
            slow_body.send(f"POST {CHAT} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n".encode())
            slow_body.send(b"Content-Length: 10\r\n\r\n{")
            for wire in (silent, slow_head, slow_body):
                status, headers, body = wire.response()
                assert (status, headers["connection"], code(body)) == (408, "close", "request_timeout")
                assert wire.at_end()
        with server.wire(receive_buffer=2048) as reader:
            # Every event repeats the ids of all the likeliest tokens, so the buffers between us fill soon.
            reader.post(CHAT, endless(stream=True, logprobs=True, top_logprobs=20, n=8))
            server.wait_for_log("its connection is cut")
            server.wait_idle()
        server.check_serving()


def test_keys_are_asked_for_and_never_shown(chatty: TinyChat) -> None:
    flags = ("--dtype", "float32", "--kv-memory", "2MiB", "--log-level", "debug")
    with running_server(chatty.directory, *flags, env={"SERVEKIT_API_KEY": KEY}) as server:
        for method, path in (
            ("GET", "/props"),
            ("GET", "/metrics"),
            ("POST", CHAT),
            ("GET", "/x"),
            ("GET", "//health"),
        ):
            for headers in ({}, {"authorization": f"Bearer {KEY}x"}):
                response = server.http.request(method, path, headers=headers)
                assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
        assert server.http.get("/health").status_code == 200
        server.http.headers["authorization"] = f"bearer {KEY}"
        assert KEY not in server.http.get("/props").text
        server.check_serving()
        assert KEY not in server.log
        assert KEY not in " ".join(psutil.Process(server.process.pid).cmdline())


def test_pages_of_a_configured_origin_may_read_even_errors(chatty: TinyChat) -> None:
    flags = (
        "--dtype",
        "float32",
        "--kv-memory",
        "2MiB",
        "--max-body",
        "2MiB",
        "--cors-origin",
        "http://localhost:3000",
    )
    with running_server(chatty.directory, *flags, env={"SERVEKIT_API_KEY": KEY}) as server:
        asking = {
            "origin": "http://localhost:3000",
            "access-control-request-method": "POST",
            "access-control-request-headers": "authorization,content-type",
        }
        assert server.http.options(CHAT, headers=asking).status_code == 204
        key = {"authorization": f"Bearer {KEY}", "content-type": "application/json", "origin": asking["origin"]}
        for headers, content, status in (
            ({"origin": asking["origin"]}, b"", 401),
            (key, b"{:", 400),
            (key, b" " * (MAX_BODY + 1), 413),
        ):
            response = server.http.post(CHAT, content=content, headers=headers)
            assert response.status_code == status
            assert response.headers["access-control-allow-origin"] == asking["origin"]
            assert response.headers["vary"] == "Origin"
        server.http.headers["authorization"] = f"Bearer {KEY}"
        server.check_serving()


def test_an_open_address_with_a_key_needs_no_consent(chatty: TinyChat) -> None:
    arguments = [*command(chatty.directory), "--host", "256.0.0.1", "--api-key", KEY]
    ended = subprocess.run(arguments, env=environment(), capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert ended.stderr.startswith("error: --host 256.0.0.1: ")


def test_holders_of_different_keys_share_no_prefix(chatty: TinyChat) -> None:
    flags = ("--dtype", "float32", "--kv-memory", "4MiB", "--block-size", "16")
    with running_server(chatty.directory, *flags, env={"SERVEKIT_API_KEY": "alice,bob"}) as server:
        body = {"prompt": list(range(100, 300)), "max_tokens": 1}

        def cached(key: str) -> tuple[int, str]:
            headers = {"authorization": f"Bearer {key}", "x-servekit-explain": "cache"}
            response = server.http.post("/v1/completions", json=body, headers=headers)
            (row,) = json_without_infinities(response.headers["x-servekit-cache"])
            usage = response.json()["usage"]
            assert row["cached_tokens"] == usage["prompt_tokens_details"]["cached_tokens"]
            return row["cached_tokens"], row["end"]

        assert cached("alice") == (0, "never_seen")
        assert cached("alice") == (192, "whole")
        assert cached("bob") == (0, "never_seen")
        assert cached("bob") == (192, "whole")
        server.http.headers["authorization"] = "Bearer alice"
        server.check_serving()
