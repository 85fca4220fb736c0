"""Who is let in: keys, Host names, origins, media types and the sizes of a request's head."""

from pathlib import Path
from typing import Any

import httpx
import pytest

from servekit.config import ServeConfig, resolve_config
from servekit.errors import ConfigError
from servekit.server.security import Security, security_of, warning_of
from tests.server.client import CHAT, USER_A, http_client, state_with
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

PORT = 8080
BODY = {"messages": USER_A}
ROUTES = [
    ("GET", "/v1/models"),
    ("GET", "/v1/models/tiny"),
    ("POST", CHAT),
    ("POST", "/v1/completions"),
    ("GET", "/metrics"),
    ("GET", "/slots"),
    ("GET", "/props"),
    ("GET", "/nowhere"),
    ("GET", "/v1/models/"),
    ("GET", "//v1/models"),
    ("GET", "/health/"),
    ("HEAD", "/v1/models"),
]


def rules(**settings: Any) -> Security:
    return security_of(ServeConfig(**settings), PORT)


async def ask(security: Security, method: str, path: str, headers: Any = None, **more: Any) -> httpx.Response:
    state = state_with(security=security)
    async with http_client(state) as client:
        return await client.request(method, path, headers=headers, **more)


@pytest.mark.parametrize(
    "host", ["127.0.0.1", "localhost", "LOCALHOST:8080", "[::1]:8080", "localhost.", "127.0.0.1:8080"]
)
async def test_a_name_of_this_machine_is_let_in(host: str) -> None:
    assert (await ask(rules(), "GET", "/v1/models", {"host": host})).status_code == 200


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example", "localhost:81", "127.0.0.1:", "127.0.0.1@evil", "[::2]", "a:8080"],
)
async def test_another_name_is_refused_before_the_body_is_read(host: str) -> None:
    async def never() -> Any:
        raise AssertionError("the body was read")
        yield b""

    # An empty port is a port of one's own by RFC 3986, section 3.2.3.
    expected = 200 if host == "127.0.0.1:" else 403
    headers = {"host": host, "content-type": "application/json"}
    assert (await ask(rules(), "GET", "/v1/models", headers)).status_code == expected
    if expected == 403:
        response = await ask(rules(), "POST", CHAT, headers, content=never())
        assert (response.status_code, response.json()["error"]["code"]) == (403, "host_not_allowed")
        assert response.headers["connection"] == "close"


async def test_a_host_must_be_named_once() -> None:
    two = [("host", "127.0.0.1"), ("host", "127.0.0.1")]
    response = await ask(rules(), "GET", "/v1/models", two)
    assert (response.status_code, response.json()["error"]["code"]) == (400, "invalid_host")


async def test_more_hosts_are_allowed_with_any_port() -> None:
    security = rules(allowed_host="llm.home, other")
    for host, status in (("llm.home", 200), ("other:1234", 200), ("localhost:8080", 200), ("evil", 403)):
        assert (await ask(security, "GET", "/health", {"host": host})).status_code == status


async def test_an_open_address_takes_any_host_unless_told_which() -> None:
    assert (await ask(rules(host="0.0.0.0", api_key="k"), "GET", "/health", {"host": "x"})).status_code == 200
    security = rules(host="0.0.0.0", api_key="k", allowed_host="llm.home")
    assert (await ask(security, "GET", "/health", {"host": "x"})).status_code == 403


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "given",
    [
        {},
        {"authorization": "Bearer wrong"},
        {"authorization": "Bearer "},
        {"authorization": "Basic sesame"},
        {"authorization": "sesame"},
        {"authorization": "Bearer sesam"},
        {"authorization": "Bearer sesame extra"},
        {"x-api-key": "wrong"},
        [("authorization", "Bearer sesame"), ("authorization", "Bearer wrong")],
    ],
)
async def test_no_route_is_open_without_the_key(method: str, path: str, given: Any) -> None:
    response = await ask(rules(api_key="sesame"), method, path, given)
    assert (response.status_code, response.headers["www-authenticate"]) == (401, "Bearer")
    if method != "HEAD":
        error = response.json()["error"]
        assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")


@pytest.mark.parametrize(
    "given",
    [
        {"authorization": "Bearer sesame"},
        {"authorization": "bearer  sesame"},
        {"x-api-key": "sesame"},
        {"authorization": "Bearer second"},
    ],
)
async def test_any_of_the_keys_opens(given: dict[str, str]) -> None:
    assert (await ask(rules(api_key="sesame,second"), "POST", CHAT, given, json=BODY)).status_code == 200


async def test_health_and_options_need_no_key() -> None:
    assert (await ask(rules(api_key="k"), "GET", "/health")).status_code == 200
    assert (await ask(rules(api_key="k"), "OPTIONS", CHAT)).status_code == 405


def test_keys_come_from_a_file(tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("one\n\n two \n", encoding="utf-8")
    security = rules(api_key_file=str(file))
    assert security == rules(api_key="one,two")
    assert "sesame" not in repr(ServeConfig(api_key="sesame")) + repr(rules(api_key="sesame"))


@pytest.mark.parametrize(
    "settings", [{"api_key": ""}, {"api_key": "a b"}, {"api_key": "ключ"}, {"api_key_file": "/no/such"}]
)
def test_keys_that_cannot_be_used(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError):
        rules(**settings)


def test_an_open_address_needs_a_key_or_consent() -> None:
    with pytest.raises(ConfigError, match="can be reached from other machines") as caught:
        ServeConfig(host="0.0.0.0")
    assert "--api-key" in (caught.value.hint or "")
    with_key, without = (
        ServeConfig(host="0.0.0.0", api_key="k"),
        ServeConfig(host="0.0.0.0", allow_unauthenticated=True),
    )
    assert warning_of(with_key, security_of(with_key, 1)) is None
    assert "no API key" in (warning_of(without, security_of(without, 1)) or "")


def test_the_key_can_be_set_in_the_environment() -> None:
    assert resolve_config({}, {"SERVEKIT_API_KEY": "k"})[1].api_key == "k"


async def test_holders_of_different_keys_share_no_prefix() -> None:
    engine = FakeEngine()
    state = state_with(engine, security=rules(api_key="a,b"))
    async with http_client(state) as client:
        for key in ("a", "b", "a"):
            await client.post(CHAT, json={**BODY, "cache_salt": "s"}, headers={"authorization": f"Bearer {key}"})
    first, second, third = (request.cache_salt for request in engine.requests)
    assert first == third != second
    assert "a" not in (first, second)


async def test_without_configured_origins_nothing_is_said_of_them() -> None:
    for method in ("GET", "OPTIONS"):
        headers = {"origin": "https://evil.example", "access-control-request-method": "POST"}
        response = await ask(rules(), method, "/v1/models", headers)
        assert not [name for name in response.headers if name.startswith("access-control")]


APP = "https://app.example"


async def test_a_configured_origin_is_echoed_exactly_on_answers_and_errors() -> None:
    security = rules(cors_origin=f"{APP},http://localhost:3000", api_key="k")
    key = {"authorization": "Bearer k"}
    for headers, path, status in ((key, "/v1/models", 200), ({}, "/v1/models", 401), (key, "/nowhere", 404)):
        response = await ask(security, "GET", path, {"origin": APP, **headers})
        assert response.status_code == status
        assert response.headers["access-control-allow-origin"] == APP
        assert response.headers["vary"] == "Origin"
        assert "access-control-allow-credentials" not in response.headers
    other = await ask(security, "GET", "/v1/models", {"origin": f"{APP}.evil", **key})
    assert "access-control-allow-origin" not in other.headers
    assert other.headers["vary"] == "Origin"


async def test_a_preflight_needs_no_key() -> None:
    headers = {
        "origin": APP,
        "access-control-request-method": "POST",
        "access-control-request-headers": "authorization,content-type",
    }
    response = await ask(rules(cors_origin=APP, api_key="k"), "OPTIONS", CHAT, headers)
    assert (response.status_code, response.text) == (204, "")
    assert response.headers["access-control-allow-origin"] == APP
    assert response.headers["access-control-allow-headers"] == "authorization,content-type"
    foreign = await ask(rules(cors_origin=APP, api_key="k"), "OPTIONS", CHAT, {**headers, "origin": "https://evil"})
    assert foreign.status_code == 405
    assert "access-control-allow-origin" not in foreign.headers


@pytest.mark.parametrize("origin", ["*", "https://*.example", "https://app.example/"])
def test_an_origin_is_exact(origin: str) -> None:
    with pytest.raises(ConfigError):
        ServeConfig(cors_origin=origin)


@pytest.mark.parametrize(
    "headers",
    [
        {"content-type": "text/plain"},
        {"content-type": "application/x-www-form-urlencoded"},
        {"content-type": "application/json; charset=latin-1"},
        {"content-type": "application/jsonp"},
        {"content-type": ""},
        {"content-type": "application/json", "content-encoding": "gzip"},
    ],
)
async def test_only_plain_json_is_read(headers: dict[str, str]) -> None:
    response = await ask(rules(), "POST", CHAT, headers, content=b"{}")
    assert (response.status_code, response.json()["error"]["code"]) == (415, "unsupported_media_type")


@pytest.mark.parametrize("media_type", ["application/json", "Application/JSON; charset=UTF-8"])
async def test_json_may_name_its_charset(media_type: str) -> None:
    response = await ask(rules(), "POST", CHAT, {"content-type": media_type}, content=b'{"messages":[]}')
    assert response.status_code == 400


async def test_the_head_of_a_request_is_bounded() -> None:
    assert (await ask(rules(), "GET", "/" + "a" * 8200)).status_code == 414
    assert (await ask(rules(), "GET", "/health?" + "a" * 8200)).status_code == 414
    assert (await ask(rules(), "GET", "/health", {"x": "a" * 33000})).status_code == 431
    assert (await ask(rules(), "GET", "/health", [(f"x-{i}", "") for i in range(101)])).status_code == 431


@pytest.mark.parametrize("depth", [63, 64, 65, 2000, 100_000])
async def test_the_depth_of_a_body_is_bounded(depth: int) -> None:
    inner = b'{"a":' * (depth - 2) + b"1" + b"}" * (depth - 2)
    raw = b'{"messages":[{"role":"user","content":"a"}],"metadata":' + (inner if depth > 2 else b"1") + b"}"
    response = await ask(rules(), "POST", CHAT, {"content-type": "application/json"}, content=raw)
    assert response.status_code == (200 if depth <= 65 else 400)
