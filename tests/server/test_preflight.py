"""The routes that compute nothing with the model, and the limits of time and of unknown fields."""

import json
import logging
from typing import Any

import pytest

from servekit.cli.log import JsonFormatter
from servekit.errors import ContextLengthError
from tests.server.client import CHAT, USER_A, events, http_client, post, state_with
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

PREFLIGHT = "/v1/preflight"


async def answer(path: str, body: Any, engine: FakeEngine | None = None) -> Any:
    response = await post(engine or FakeEngine(), path, body)
    assert response.status_code == 200, response.text
    return response.json()


async def test_preflight_says_what_a_chat_would_meet_and_runs_nothing() -> None:
    engine = FakeEngine()
    body = await answer(PREFLIGHT, {"messages": USER_A, "n": 3}, engine)
    row = {
        "fits": True,
        "prompt_tokens": 1,
        "cached_tokens": 16,
        "new_blocks": 3,
        "free_blocks": 5,
        "free_slots": 2,
        "queue_position": 1,
        "expected_ttft_ms": 500.0,  # 3 steps of 0.1 s, then 20 tokens of 0.01 s
    }
    assert body == {
        "object": "preflight",
        "model": "tiny",
        "fits": True,
        "choices": 3,
        "limits": {"max_model_len": 1000, "max_open_requests": 600, "kv_blocks": 10},
        "prompts": [row],
    }
    assert engine.requests == []


async def test_preflight_of_completions_has_a_row_for_each_prompt() -> None:
    body = await answer(PREFLIGHT, {"prompt": ["ab", "c" * 8]}, FakeEngine(max_model_len=8))
    assert [row["fits"] for row in body["prompts"]] == [True, False]
    assert (body["fits"], body["prompts"][1]["error"]["code"]) == (False, "context_length_exceeded")


@pytest.mark.parametrize(
    ("body", "param"), [({"prompt": 1}, "prompt"), ({"messages": []}, "messages"), ({"prompt": "a", "n": 0}, "n")]
)
async def test_preflight_refuses_what_the_route_would(body: Any, param: str) -> None:
    response = await post(FakeEngine(), PREFLIGHT, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize(
    ("body", "param"),
    [({"prompt": "abcdefgh"}, "prompt"), ({"messages": [{"role": "user", "content": "abcdefgh"}]}, "messages")],
)
async def test_preflight_names_the_prompt_as_the_request_does(body: Any, param: str) -> None:
    engine = FakeEngine(max_model_len=4)
    assert (await answer(PREFLIGHT, body, engine))["prompts"][0]["error"]["param"] == param
    engine.encode_error = ContextLengthError(8, 4)
    if param == "messages":
        whole = await answer(PREFLIGHT, body, engine)
        assert (whole["fits"], whole["prompts"][0]["error"]["param"]) == (False, param)


async def test_preflight_checks_the_form_the_choices_and_the_fields() -> None:
    engine = FakeEngine()
    body = {"messages": USER_A, "response_format": {"type": "json_object"}, "wizard": 1}
    response = await post(engine, PREFLIGHT, body)
    assert (response.status_code, response.headers["x-servekit-ignored"]) == (200, "wizard")
    assert [grammar.param for grammar in engine.grammars] == ["response_format"]
    engine.max_open = 3
    for path in (PREFLIGHT, CHAT):
        response = await post(engine, path, {"messages": USER_A, "n": 4})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "n")


async def test_tokens_and_back() -> None:
    assert await answer("/tokenize", {"prompt": "hi"}) == {"tokens": [104, 105], "count": 2, "max_model_len": 1000}
    assert (await answer("/tokenize", {"content": "hi", "add_special_tokens": False}))["tokens"] == [0, 104, 105]
    assert (await answer("/tokenize", {"messages": USER_A, "return_token_strs": True}))["token_strs"] == ["a"]
    assert await answer("/detokenize", {"tokens": [195, 169]}) == {"prompt": "é", "content": "é"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/tokenize", {}, "prompt"),
        ("/tokenize", {"prompt": "a", "content": "a"}, "prompt"),
        ("/detokenize", {"tokens": [256]}, "tokens"),
        ("/detokenize", {"tokens": [-1]}, "tokens"),
        ("/detokenize", {"tokens": "a"}, "tokens"),
        ("/detokenize", {}, "tokens"),
    ],
)
async def test_tokens_that_are_none(path: str, body: Any, param: str) -> None:
    response = await post(FakeEngine(), path, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_takes_too_long_is_ended(stream: bool) -> None:
    engine = FakeEngine(lambda request: [], hold=True)
    async with http_client(state_with(engine, request_timeout=0.01)) as client:
        response = await client.post(CHAT, json={"messages": USER_A, "stream": stream})
    error = events(response.text)[-1]["error"] if stream else response.json()["error"]
    assert response.status_code == (200 if stream else 504)
    assert (error["type"], error["code"]) == ("timeout_error", "request_timeout")
    assert "longer than 0.01 seconds" in error["message"]


async def test_unknown_fields_can_be_refused() -> None:
    async with http_client(state_with(refuse_unknown=True)) as client:
        response = await client.post(CHAT, json={"messages": USER_A, "temprature": 0})
        assert (response.status_code, response.json()["error"]["param"]) == (400, "temprature")
        assert (await client.post(CHAT, json={"messages": USER_A, "tools": []})).status_code == 200


async def test_health_notices_a_thread_that_is_stuck() -> None:
    engine = FakeEngine()
    async with http_client(state_with(engine)) as client:
        engine.last_step_age = 59.0
        assert (await client.get("/health")).status_code == 200
        engine.last_step_age = 61.0
        stalled = await client.get("/health")
    assert (stalled.status_code, stalled.json()) == (503, {"status": "stalled"})


def test_json_log_lines() -> None:
    record = logging.LogRecord("servekit.access", logging.INFO, "", 0, "id=%s", ("ü",), None)
    record.created = 1.0
    line = JsonFormatter().format(record)
    assert json.loads(line) == {"time": 1.0, "level": "info", "logger": "servekit.access", "message": "id=ü"}
    record.fields = {"id": "r", "status": 200}
    assert json.loads(JsonFormatter().format(record)).items() >= {"id": "r", "status": 200}.items()


async def test_the_cache_is_explained_to_who_asks() -> None:
    engine = FakeEngine()
    response = await post(engine, CHAT, {"messages": USER_A, "n": 2}, **{"x-servekit-explain": "cache"})
    assert json.loads(response.headers["x-servekit-cache"]) == [
        {
            "cached_tokens": 16,
            "shared_tokens": 18,
            "end": "block_not_full",
            "given": {"id": 65, "text": "A"},
            "known": None,
        }
    ]
    assert "x-servekit-cache" not in (await post(engine, CHAT, {"messages": USER_A})).headers
    wrong = await post(engine, CHAT, {"messages": USER_A}, **{"x-servekit-explain": "all"})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "x-servekit-explain")
