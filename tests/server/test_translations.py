"""The two other shapes of a chat: what they mean to the engine, and what their answers look like."""

import json
from typing import Any

import pytest

from servekit.engine.core.request import FinishReason, Request
from servekit.engine.output import Chunk, Usage
from servekit.engine.text.tool_format import tool_format_of
from servekit.errors import OverloadedError
from servekit.server.counts import timings_fields
from tests.server.client import post
from tests.server.fake_engine import TIMINGS, FakeEngine

pytestmark = pytest.mark.anyio

RESPONSES, MESSAGES = "/v1/responses", "/v1/messages"
HERMES = tool_format_of("<tool_call>", lambda marker: None)
CALL = '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'


def says(text: str, reason: FinishReason = FinishReason.STOP, stop: str | None = None) -> Any:
    """A script that sends the text in three pieces."""

    def script(request: Request) -> list[Chunk]:
        third = len(text) // 3
        usage = Usage(len(request.prompt_token_ids), 3, 1)
        pieces = [text[:third], text[third : 2 * third], text[2 * third :]]
        return [
            Chunk(piece, usage, finish_reason=reason if i == 2 else None, stop_reason=stop)
            for i, piece in enumerate(pieces)
        ]

    return script


def named_events(text: str) -> list[tuple[str, Any]]:
    found = []
    for event in text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        fields = json.loads(data.removeprefix("data: "))
        assert fields["type"] == name.removeprefix("event: ")
        found.append((fields["type"], fields))
    return found


async def answer(path: str, body: Any, engine: FakeEngine) -> Any:
    response = await post(engine, path, body)
    assert response.status_code == 200, response.text
    return response.json()


F_OPENAI = {"type": "function", "name": "f", "parameters": {"type": "object"}}
F_ANTHROPIC = {"name": "f", "input_schema": {"type": "object"}}


async def test_a_whole_response() -> None:
    engine = FakeEngine()
    body = await answer(
        RESPONSES, {"model": "tiny", "input": "abc", "instructions": "be", "max_output_tokens": 9}, engine
    )
    assert engine.messages == [{"role": "system", "content": "be"}, {"role": "user", "content": "abc"}]
    assert engine.requests[0].sampling.max_tokens == 9
    assert (body["object"], body["status"], body["error"]) == ("response", "completed", None)
    (item,) = body["output"]
    assert (item["type"], item["role"], item["content"][0]["text"]) == ("message", "assistant", "Hi there")
    assert body["usage"]["input_tokens_details"] == {"cached_tokens": 1}
    assert body["usage"]["total_tokens"] == 5 + 9
    assert body["timings"] == timings_fields(Usage(5, 9, 1), TIMINGS)


async def test_the_last_event_of_a_stream_carries_the_times() -> None:
    expected = timings_fields(Usage(3, 9, 1), TIMINGS)
    response = named_events((await post(FakeEngine(), RESPONSES, {"input": "abc", "stream": True})).text)[-1][1]
    assert response["response"]["timings"] == expected
    events = named_events((await post(FakeEngine(), MESSAGES, message(stream=True))).text)
    assert [fields.get("timings") for name, fields in events if name == "message_delta"] == [expected]


async def test_a_streamed_response_ends_with_the_same_whole() -> None:
    engine = FakeEngine(says("Hi there"))
    response = await post(engine, RESPONSES, {"input": [{"role": "user", "content": "a"}], "stream": True})
    events = named_events(response.text)
    assert [name for name, _ in events] == [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.delta",
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.completed",
    ]
    assert [fields["sequence_number"] for _, fields in events] == list(range(11))
    assert "".join(fields["delta"] for name, fields in events if name.endswith("delta")) == "Hi there"
    assert events[-1][1]["response"]["output"][0]["content"][0]["text"] == "Hi there"


async def test_calls_in_a_response() -> None:
    history = [
        {"role": "user", "content": [{"type": "input_text", "text": "x"}]},
        {"type": "function_call", "call_id": "c1", "name": "f", "arguments": "{}"},
        {"type": "function_call_output", "call_id": "c1", "output": "42"},
    ]
    engine = FakeEngine(says("so " + CALL), tool_format=HERMES)
    body = await answer(RESPONSES, {"input": history, "tools": [F_OPENAI]}, engine)
    assert [message["role"] for message in engine.messages] == ["user", "assistant", "tool"]
    assert engine.tools is not None
    text, call = body["output"]
    assert text["content"][0]["text"] == "so"
    assert (call["type"], call["name"], call["arguments"]) == ("function_call", "f", '{"a": 1}')
    streamed = await post(
        FakeEngine(says("so " + CALL), tool_format=HERMES),
        RESPONSES,
        {"input": "a", "tools": [F_OPENAI], "stream": True},
    )
    events = named_events(streamed.text)
    deltas = [fields["delta"] for name, fields in events if name == "response.function_call_arguments.delta"]
    assert "".join(deltas) == '{"a": 1}'
    assert events[-1][1]["response"]["output"][1]["arguments"] == '{"a": 1}'


async def test_a_cut_response_is_incomplete() -> None:
    body = await answer(RESPONSES, {"input": "a"}, FakeEngine(says("abc", FinishReason.LENGTH)))
    assert (body["status"], body["incomplete_details"]) == ("incomplete", {"reason": "max_output_tokens"})


async def test_of_a_cut_response_only_the_last_item_is_incomplete() -> None:
    asked = {"input": "a", "tools": [F_OPENAI]}
    cut = says(CALL + CALL[:45], FinishReason.LENGTH)
    whole = await answer(RESPONSES, asked, FakeEngine(cut, tool_format=HERMES))
    streamed = await post(FakeEngine(cut, tool_format=HERMES), RESPONSES, {**asked, "stream": True})
    events = named_events(streamed.text)
    done = [fields["item"] for name, fields in events if name == "response.output_item.done"]
    for items in (whole["output"], done, events[-1][1]["response"]["output"]):
        assert [item["status"] for item in items] == ["completed", "incomplete"]


async def test_a_form_for_a_response() -> None:
    engine = FakeEngine()
    text = {"format": {"type": "json_schema", "name": "x", "schema": {"type": "null"}, "strict": True}}
    await answer(RESPONSES, {"input": "a", "text": text}, engine)
    assert engine.grammars[0].text == '{"type":"null"}'


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({}, "input"),
        ({"input": []}, "input"),
        ({"input": [{"type": "image"}]}, "input[0].type"),
        ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input[0].content"),
        ({"input": [{"role": "robot", "content": "a"}]}, "input[0].role"),
        ({"input": [{"type": "function_call", "name": "f"}]}, "input[0].arguments"),
        ({"input": "a", "store": True}, "store"),
        ({"input": "a", "previous_response_id": "x"}, "previous_response_id"),
        ({"input": "a", "truncation": "auto"}, "truncation"),
        ({"input": "a", "reasoning": {"effort": "low"}}, "reasoning"),
        ({"input": "a", "tools": [{"type": "web_search", "name": "w"}]}, "tools[0].type"),
        ({"input": "a", "max_output_tokens": 0}, "max_output_tokens"),
    ],
)
async def test_responses_that_cannot_be_given(body: Any, param: str) -> None:
    response = await post(FakeEngine(), RESPONSES, body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, param)


def message(**fields: Any) -> dict[str, Any]:
    return {"model": "tiny", "max_tokens": 9, "messages": [{"role": "user", "content": "abc"}], **fields}


async def test_a_whole_message() -> None:
    engine = FakeEngine()
    body = await answer(MESSAGES, message(system="be", stop_sequences=["x"], top_k=5), engine)
    assert engine.messages == [{"role": "system", "content": "be"}, {"role": "user", "content": "abc"}]
    assert (engine.requests[0].sampling.stop, engine.requests[0].sampling.top_k) == (("x",), 5)
    assert body.pop("id").startswith("msg_")
    assert body.pop("timings") == timings_fields(Usage(5, 9, 1), TIMINGS)
    assert body == {
        "type": "message",
        "role": "assistant",
        "model": "tiny",
        "content": [{"type": "text", "text": "Hi there"}],
        "stop_reason": "end_turn",
        "stop_sequence": None,
        "usage": {
            "input_tokens": 4,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 1,
            "output_tokens": 9,
        },
    }


async def test_a_streamed_message() -> None:
    response = await post(FakeEngine(says("Hi there", stop="x")), MESSAGES, message(stream=True))
    events = named_events(response.text)
    assert [name for name, _ in events] == [
        "message_start",
        "content_block_start",
        *["content_block_delta"] * 3,
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    assert "".join(f["delta"]["text"] for name, f in events if name == "content_block_delta") == "Hi there"
    assert events[-2][1]["delta"] == {"stop_reason": "stop_sequence", "stop_sequence": "x"}
    assert events[-2][1]["usage"]["output_tokens"] == 3


async def test_calls_in_messages() -> None:
    history = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": [{"type": "tool_use", "id": "c1", "name": "f", "input": {"a": 1}}]},
        {
            "role": "user",
            "content": [
                {"type": "tool_result", "tool_use_id": "c1", "content": [{"type": "text", "text": "42"}]},
                {"type": "text", "text": "so?"},
            ],
        },
    ]
    engine = FakeEngine(says(CALL), tool_format=HERMES)
    choice = {"type": "any", "disable_parallel_tool_use": True}
    body = await answer(MESSAGES, message(messages=history, tools=[F_ANTHROPIC], tool_choice=choice), engine)
    assert [m["role"] for m in engine.messages] == ["user", "assistant", "tool", "user"]
    assert engine.requests[0].sampling.grammar is not None
    (call,) = body["content"]
    assert (call["type"], call["name"], call["input"], body["stop_reason"]) == ("tool_use", "f", {"a": 1}, "tool_use")
    streamed = await post(
        FakeEngine(says(CALL), tool_format=HERMES), MESSAGES, message(tools=[F_ANTHROPIC], stream=True)
    )
    events = named_events(streamed.text)
    deltas = [fields["delta"] for name, fields in events if name == "content_block_delta"]
    assert {delta["type"] for delta in deltas} == {"input_json_delta"}
    assert "".join(delta["partial_json"] for delta in deltas) == '{"a": 1}'
    assert events[-2][1]["delta"]["stop_reason"] == "tool_use"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": None}, "max_tokens"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "system", "content": "a"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": [{"type": "image"}]}]}, "messages[0].content[0]"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"system": [{"type": "image"}]}, "system"),
        ({"thinking": {"type": "enabled", "budget_tokens": 1024}}, "thinking"),
        ({"tool_choice": {"type": "maybe"}}, "tool_choice"),
        ({"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}, "assistant's turn"),
        ({"stop_sequences": ["a" * 1025]}, "stop_sequences[0]"),
        ({"tool_choice": {"type": "any"}}, "tool_choice"),
        ({"temperature": -1}, "temperature"),
    ],
)
async def test_messages_that_cannot_be_given(fields: Any, param: str) -> None:
    response = await post(FakeEngine(), MESSAGES, message(**fields))
    answer = response.json()
    assert (response.status_code, answer["type"]) == (400, "error")
    assert answer["error"].keys() == {"type", "message"}
    assert answer["error"]["type"] == "invalid_request_error"
    assert param in answer["error"]["message"]


@pytest.mark.parametrize(("path", "body"), [(RESPONSES, {"input": "a"}), (MESSAGES, message())])
async def test_both_share_limits_models_and_failures(path: str, body: Any) -> None:
    assert (await post(FakeEngine(refuse={0: OverloadedError("full")}), path, body)).status_code == 429
    assert (await post(FakeEngine(), path, {**body, "model": "other"})).status_code == 404
    odd = await post(FakeEngine(), path, {**body, "wizard": 1})
    assert odd.headers["x-servekit-ignored"] == "wizard"

    def fails(request: Request) -> list[Chunk]:
        return [Chunk("", Usage(1), finish_reason=FinishReason.ERROR, error="broken")]

    assert (await post(FakeEngine(fails), path, body)).status_code == 500
    events = named_events((await post(FakeEngine(fails), path, {**body, "stream": True})).text)
    assert events[-1][0] in ("error", "response.failed")
