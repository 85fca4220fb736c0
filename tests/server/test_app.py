"""The routes beside the generating ones, and what every answer has in common: errors, ids, limits, the log line."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from typing import Any

import pytest

from servekit.engine.core.request import FinishReason, Request
from servekit.engine.output import Chunk, Usage
from servekit.errors import KvCapacityError, OverloadedError, UnavailableError
from servekit.server.state import ServerState
from tests.server.client import CHAT, COMPLETIONS, USER_A, http_client, post, refused, state_with
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

ACCESS = "servekit.access"
JSON = {"content-type": "application/json"}


async def get(state: ServerState, path: str) -> tuple[int, Any]:
    async with http_client(state) as client:
        response = await client.get(path)
    return response.status_code, response.json()


async def test_health_follows_the_life_of_the_server() -> None:
    state = ServerState("tiny")
    assert await get(state, "/health") == (503, {"status": "loading"})
    engine = FakeEngine()
    state.engine = engine
    assert await get(state, "/health") == (200, {"status": "ok"})
    engine.is_alive = False
    assert await get(state, "/health") == (503, {"status": "dead"})
    engine.is_alive = True
    state.draining = True
    assert await get(state, "/health") == (503, {"status": "draining"})
    assert await get(ServerState("tiny", load_error="no such file"), "/health") == (503, {"status": "failed"})


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        ({"draining": True}, "the server is shutting down"),
        ({"load_error": "no such file"}, "the model could not be loaded"),
    ],
)
async def test_requests_are_refused_while_there_is_no_engine_for_them(settings: dict[str, Any], why: str) -> None:
    async with http_client(state_with(FakeEngine(), **settings)) as client:
        for response in (await client.post(CHAT, json={"messages": USER_A}), await client.get("/v1/models")):
            assert response.status_code == 503
            assert response.json() == {
                "error": {"message": why, "type": "unavailable_error", "param": None, "code": "unavailable"}
            }


async def test_models() -> None:
    model = {"id": "tiny", "object": "model", "created": 1700000000, "owned_by": "servekit", "max_model_len": 1000}
    assert await get(state_with(), "/v1/models") == (200, {"object": "list", "data": [model]})
    assert await get(state_with(), "/v1/models/tiny") == (200, model)
    status, body = await get(state_with(), "/v1/models/org/other")
    assert (status, body["error"]["code"], body["error"]["param"]) == (404, "model_not_found", "model")


async def test_model_names_with_a_slash_have_a_route() -> None:
    state = state_with()
    state.model_name = "org/tiny"
    assert (await get(state, "/v1/models/org/tiny"))[0] == 200


async def test_props_show_what_was_resolved_and_how_full_the_engine_is() -> None:
    status, props = await get(state_with(props={"engine": {"dtype": "float32"}}), "/props")
    assert (status, props["engine"]) == (200, {"dtype": "float32"})
    assert (props["state"]["running"], props["state"]["live_blocks"]) == (1, 3)


async def test_props_say_nothing_before_there_is_an_engine() -> None:
    assert (await get(ServerState("tiny"), "/props"))[0] == 503


async def test_another_model_is_not_found() -> None:
    for stream in (False, True):
        assert await refused(CHAT, {"model": "Tiny", "messages": USER_A, "stream": stream}) == (
            404,
            "model",
            "model_not_found",
        )
    message = (await post(FakeEngine(), CHAT, {"model": "x" * 5000, "messages": USER_A})).json()["error"]["message"]
    assert message == f"the model '{'x' * 100}...' is not served here. This server serves 'tiny'."


async def test_unknown_routes_and_methods_have_the_error_shape() -> None:
    async with http_client(state_with()) as client:
        missing = await client.get("/v1/nothing")
        wrong = await client.get(CHAT)
        slash = await client.post(f"{CHAT}/", json={})
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
    assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
    assert wrong.headers["allow"] == "POST"
    assert (slash.status_code, slash.json()["error"]["code"]) == (404, "not_found")


async def test_context_length_error_has_both_numbers() -> None:
    body = (await post(FakeEngine(max_model_len=5), CHAT, {"messages": [{"role": "user", "content": "abcde"}]})).json()
    assert body == {
        "error": {
            "message": "the prompt has 5 tokens, but at most 4 fit: the context is 5 tokens and at least one must be "
            "left for the answer. Shorten the prompt, or start the server with a larger --max-model-len.",
            "type": "invalid_request_error",
            "param": "messages",
            "code": "context_length_exceeded",
            "n_prompt_tokens": 5,
            "n_ctx": 5,
        }
    }


async def test_the_engine_may_refuse_with_a_status_of_its_own() -> None:
    busy = await post(FakeEngine(refuse={0: OverloadedError("full", retry_after_s=3)}), CHAT, {"messages": USER_A})
    assert (busy.status_code, busy.headers["retry-after"]) == (429, "3")
    assert busy.json()["error"]["type"] == "overloaded_error"
    gone = await post(FakeEngine(refuse={0: UnavailableError("dead")}), CHAT, {"messages": USER_A, "stream": True})
    assert (gone.status_code, gone.headers["content-type"]) == (503, "application/json")
    large = await post(FakeEngine(refuse={0: KvCapacityError(9, 8)}), COMPLETIONS, {"prompt": "a"})
    assert (large.status_code, large.json()["error"]["param"]) == (400, "prompt")


async def test_a_choice_that_is_refused_takes_back_the_others() -> None:
    engine = FakeEngine(hold=True, refuse={2: OverloadedError("full")})
    response = await post(engine, CHAT, {"messages": USER_A, "n": 3, "stream": True})
    assert response.status_code == 429
    assert [generation.aborted for generation in engine.generations] == [True, True]


async def test_an_answer_that_fails_is_an_error() -> None:
    def script(request: Request) -> list[Chunk]:
        failed = request.request_id.endswith("-1")
        end = FinishReason.ERROR if failed else FinishReason.STOP
        return [Chunk("", Usage(1), finish_reason=end, error="out of luck" if failed else None)]

    response = await post(FakeEngine(script), CHAT, {"messages": USER_A, "n": 2})
    assert response.status_code == 500
    assert response.json() == {
        "error": {"message": "out of luck", "type": "server_error", "param": None, "code": "internal_error"}
    }


async def test_an_engine_that_stops_under_an_answer_is_unavailable() -> None:
    engine = FakeEngine()

    def script(request: Request) -> list[Chunk]:
        engine.is_alive = False
        return [Chunk("", Usage(1), finish_reason=FinishReason.ERROR, error="the engine has stopped")]

    engine = FakeEngine(script)
    response = await post(engine, CHAT, {"messages": USER_A})
    assert (response.status_code, response.json()["error"]["message"]) == (503, "the engine has stopped")


async def test_an_answer_without_an_end_is_an_error() -> None:
    def script(request: Request) -> list[Chunk]:
        return [Chunk("a", Usage(1, 1))]

    response = await post(FakeEngine(script), CHAT, {"messages": USER_A})
    assert (response.status_code, response.json()["error"]["code"]) == (500, "internal_error")


async def test_an_unexpected_exception_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    engine = FakeEngine(refuse={0: RuntimeError("/secret/path")})
    response = await post(engine, CHAT, {"messages": USER_A}, **{"x-request-id": "abc"})
    assert response.status_code == 500
    assert response.headers["x-request-id"] == "abc"
    assert response.json() == {
        "error": {
            "message": "an unexpected error on the server. See the server's log.",
            "type": "server_error",
            "param": None,
            "code": "internal_error",
        }
    }
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.exc_info is not None
    assert "/secret/path" in str(record.exc_info[1])


async def test_request_ids_are_echoed_cleaned_or_made() -> None:
    body = {"messages": USER_A}
    assert (await post(FakeEngine(), CHAT, body, **{"x-request-id": "a-1.b"})).headers["x-request-id"] == "a-1.b"
    forged = "a status=200\x1b[0mé" + "b" * 200
    async with http_client(state_with()) as client:
        answers = [
            await client.post(CHAT, json=body, headers=[(b"x-request-id", value)])
            for value in (forged.encode("latin-1"), b" \xff")
        ]
    assert answers[0].headers["x-request-id"] == ("astatus=200[0m" + "b" * 200)[:128]
    made = [answers[1].headers["x-request-id"], (await post(FakeEngine(), CHAT, body)).headers["x-request-id"]]
    assert all(value.startswith("req-") for value in made)
    assert made[0] != made[1]


async def test_body_limit_by_its_declared_length() -> None:
    async def never() -> AsyncIterator[bytes]:
        raise AssertionError("the body was read")
        yield b""

    async with http_client(state_with(body_limit=10)) as client:
        response = await client.post(CHAT, content=never(), headers={**JSON, "content-length": "99999999999"})
    assert response.status_code == 413
    assert response.headers["connection"] == "close"
    assert response.json()["error"]["code"] == "body_too_large"


async def test_body_limit_while_reading() -> None:
    read = []

    async def endless() -> AsyncIterator[bytes]:
        while True:
            read.append(1)
            yield b"    "

    async with http_client(state_with(body_limit=10)) as client:
        response = await client.post(CHAT, content=endless(), headers=JSON)
    assert response.status_code == 413
    assert len(read) == 3


async def test_a_body_that_trickles_in_is_given_up() -> None:
    async def stalled() -> AsyncIterator[bytes]:
        yield b"{"
        await asyncio.Event().wait()

    async with http_client(state_with(read_timeout=0.01)) as client:
        response = await client.post(CHAT, content=stalled(), headers=JSON)
    assert (response.status_code, response.json()["error"]["code"]) == (408, "request_timeout")
    assert response.headers["connection"] == "close"


async def test_a_body_of_exactly_the_limit_is_read() -> None:
    raw = json.dumps({"messages": USER_A}).encode()
    async with http_client(state_with(body_limit=len(raw))) as client:
        assert (await client.post(CHAT, content=raw, headers=JSON)).status_code == 200
        assert (await client.post(CHAT, content=raw + b" ", headers=JSON)).status_code == 413


def fields_of(line: str) -> dict[str, str]:
    """The line's fields, without what a clock decides."""
    fields = dict(word.split("=", 1) for word in line.replace("request=POST ", "request=POST:").split(" "))
    assert float(fields.pop("ms")) >= 0
    return fields


async def test_access_log_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, ACCESS)
    secret = [{"role": "user", "content": "topsecret"}]
    counts = {
        "model": "tiny",
        "prompt": "9",
        "cached": "1",
        "output": "9",
        "queue_ms": "1.0",
        "prefill_ms": "20.0",
        "decode_ms": "40.0",
    }
    common = {"id": "me", "request": f"POST:{CHAT}", "status": "200"}
    await post(FakeEngine(), CHAT, {"messages": secret}, **{"x-request-id": "me"})
    assert fields_of(caplog.messages[-1]) == {**common, **counts}
    await post(FakeEngine(), CHAT, {"messages": secret, "stream": True}, **{"x-request-id": "me"})
    assert fields_of(caplog.messages[-1]) == {**common, **counts, "end": "done"}
    await post(FakeEngine(), CHAT, {"messages": secret, "n": 0}, **{"x-request-id": "me"})
    assert fields_of(caplog.messages[-1]) == {**common, "status": "400"}
    assert {record.levelno for record in caplog.records if record.name == ACCESS} == {logging.INFO}
    assert "topsecret" not in caplog.text


async def test_access_log_cannot_be_forged_and_health_is_quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, ACCESS)
    await get(state_with(), "/v1/x%0A%20status=200")
    assert "request=GET /v1/x%0A%20status%3D200 status=404" in caplog.messages[-1]
    await get(state_with(), "/health")
    assert caplog.records[-1].levelno == logging.DEBUG
