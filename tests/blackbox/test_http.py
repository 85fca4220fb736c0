"""HTTP as clients and their mistakes have it: methods, paths, framing, and JSON that two readers read in two ways."""

from collections.abc import Iterator

import pytest

from tests.blackbox.bodies import chat
from tests.blackbox.server import CHAT, COMPLETIONS, Server, json_without_infinities, running_server
from tests.blackbox.tiny import TinyChat

HOST = b"Host: 127.0.0.1\r\n"
JSON = HOST + b"Content-Type: application/json\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\n"


@pytest.fixture(scope="module")
def process(chatty: TinyChat) -> Iterator[Server]:
    with running_server(chatty.directory, "--dtype", "float32", "--kv-memory", "2MiB") as server:
        yield server


@pytest.mark.parametrize(
    ("method", "path", "status", "allow"),
    [
        ("HEAD", "/health", 200, None),
        ("HEAD", "/v1/models", 200, None),
        ("HEAD", CHAT, 405, {"POST"}),
        ("GET", CHAT, 405, {"POST"}),
        ("PUT", CHAT, 405, {"POST"}),
        ("OPTIONS", CHAT, 405, {"POST"}),
        ("DELETE", "/v1/models", 405, {"GET", "HEAD"}),
        ("TRACE", "/health", 405, {"GET", "HEAD"}),
        ("OPTIONS", "/nothing", 404, None),
        ("GET", "/", 404, None),
        ("GET", "/health/", 404, None),
        ("GET", "//v1/models", 404, None),
        ("POST", f"{CHAT}/", 404, None),
    ],
)
def test_methods_and_paths(server: Server, method: str, path: str, status: int, allow: set[str] | None) -> None:
    response = server.http.request(method, path, json=chat() if method in ("POST", "PUT") else None)
    assert response.status_code == status
    assert response.headers["content-type"] == "application/json"
    assert response.headers["x-request-id"].startswith("req-")
    assert (set(response.headers["allow"].split(", ")) if "allow" in response.headers else None) == allow
    if method == "HEAD":
        assert response.content == b""
    elif status != 200:
        assert set(response.json()["error"]) == {"message", "type", "param", "code"}


@pytest.mark.parametrize(
    "raw",
    [
        pytest.param(b"GET /health HTTP/1.0\r\n\r\n", id="no host"),
        pytest.param(POST + JSON + b"Content-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n{}", id="two framings"),
        pytest.param(POST + JSON + b"Content-Length: 2\r\nContent-Length: 3\r\n\r\n{}", id="two lengths"),
        pytest.param(POST + JSON + b"Content-Length: -2\r\n\r\n{}", id="negative length"),
        pytest.param(POST + JSON + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n", id="no chunk size"),
        pytest.param(b"GET /health HTTP/1.1\r\n" + HOST + b"X: a\r\n b\r\n\r\n", id="folded header"),
        pytest.param(b"BREW / HTTP/1.1\r\n" + HOST + b"\r\n", id="unknown method"),
        pytest.param(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", id="http 2"),
        pytest.param(b"\r\n\r\n\x00\x01\x02\r\n\r\n", id="binary"),
    ],
)
def test_what_is_not_clear_http_is_refused_and_its_connection_closed(server: Server, raw: bytes) -> None:
    with server.wire() as wire:
        wire.send(raw)
        status, headers, body = wire.response()
        assert (status, headers["connection"]) == (400, "close")
        assert set(json_without_infinities(body)["error"]) == {"message", "type", "param", "code"}
        assert wire.at_end()


def test_requests_may_follow_each_other_unasked(server: Server) -> None:
    with server.wire() as wire:
        wire.send((b"GET /health HTTP/1.1\r\n" + HOST + b"\r\n") * 3)
        assert [wire.response()[2] for _ in range(3)] == [b'{"status":"ok"}'] * 3


def test_accept_decides_nothing(server: Server) -> None:
    for accept in ("", "text/event-stream", "application/json", "text/html", "*/*;q=0.1"):
        answer = server.http.post(CHAT, json=chat(max_tokens=1), headers={"accept": accept})
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")


def test_of_a_field_given_twice_the_last_counts(server: Server) -> None:
    prompt = b'{"prompt":"the cat","ignore_eos":true,"temperature":0,'
    for fields, status in ((b'"max_tokens":"x","max_tokens":3}', 200), (b'"max_tokens":3,"max_tokens":"x"}', 400)):
        response = server.http.post(COMPLETIONS, content=prompt + fields, headers={"content-type": "application/json"})
        assert response.status_code == status
        if status == 200:
            assert response.json()["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize(
    "raw",
    [
        b'\xef\xbb\xbf{"prompt":"a"}',
        '{"prompt":"a"}'.encode("utf-16"),
        b'{"prompt":"a"} {}',
        b'{"prompt":"a","temperature":NaN}',
        b'{"prompt":"a","temperature":1e400}',
        b'{"prompt":"a","seed":' + b"9" * 5000 + b"}",
        b"{'prompt':'a'}",
        b'{"prompt":"a",}',
        b'{"prompt":"a","metadata":' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b"}",
    ],
)
def test_json_is_the_standards_alone(server: Server, raw: bytes) -> None:
    response = server.http.post(COMPLETIONS, content=raw, headers={"content-type": "application/json"})
    assert response.status_code == 400
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert len(response.text) < 500
