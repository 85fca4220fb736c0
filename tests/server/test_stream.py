"""Streams that fail, wait or lose their client, and whole answers that lose theirs."""

import asyncio
import json
import logging
from typing import Any, cast

import openai
import pytest
from starlette.types import Message

from servekit.engine.core.request import FinishReason, Request
from servekit.engine.output import Chunk, Usage
from servekit.server.app import create_app
from tests.server.client import CHAT, COMPLETIONS, USER_A, HandMadeRequest, events, http_client, post, state_with
from tests.server.fake_engine import FakeEngine, FakeGeneration, hi_there

pytestmark = pytest.mark.anyio


def one_token(request: Request) -> list[Chunk]:
    """An answer that has only begun."""
    return [Chunk("x", Usage(1, 1), token_ids=(120,))]


def failing(request: Request) -> list[Chunk]:
    """An answer that breaks after its first token."""
    return [*one_token(request), Chunk("", Usage(1, 1), finish_reason=FinishReason.ERROR, error="out of luck")]


async def test_a_failure_after_the_headers_is_an_error_event_without_a_finish(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "servekit.access")
    body = {"messages": USER_A, "stream": True, "stream_options": {"include_usage": True}}
    response = await post(FakeEngine(failing), CHAT, body)
    assert response.status_code == 200
    *chunks, last = events(response.text)
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None, None]
    assert last == {
        "error": {"message": "out of luck", "type": "server_error", "param": None, "code": "internal_error"}
    }
    assert "status=200" in caplog.messages[-1]
    assert "end=error" in caplog.messages[-1]


async def test_an_unexpected_failure_in_a_stream_is_logged_and_not_shown(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeGeneration):
        async def __anext__(self) -> Chunk:
            raise RuntimeError("/secret/path")

    class BrokenEngine(FakeEngine):
        def generate(self, request: Request, /) -> FakeGeneration:
            self.generations.append(Broken([]))
            return self.generations[-1]

    for n in (1, 2):
        engine = BrokenEngine()
        response = await post(engine, COMPLETIONS, {"prompt": "a", "stream": True, "n": n})
        (error,) = events(response.text)
        assert error["error"]["code"] == "internal_error"
        assert "secret" not in response.text
        assert all(generation.aborted for generation in engine.generations)
    assert "/secret/path" in caplog.text


async def disconnect_when(request: HandMadeRequest, num_bodies: int) -> None:
    """Run the request; its client goes away when it has been sent `num_bodies` pieces of the body."""

    def on_send(message: Message) -> None:
        request.sent.append(message)
        if len(request.sent) == 1 + num_bodies:
            request.disconnect()

    request.on_send = on_send
    await request.run()


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("num_bodies", [0, 1, 2])
async def test_a_client_that_leaves_a_stream_aborts_it(
    n: int, num_bodies: int, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "servekit.access")
    engine = FakeEngine(one_token, hold=True)
    request = HandMadeRequest(create_app(state_with(engine)), CHAT, {"messages": USER_A, "stream": True, "n": n})
    await disconnect_when(request, num_bodies)
    assert request.status == 200
    assert "finish_reason" not in request.text or '"finish_reason":"' not in request.text
    assert [generation.aborted for generation in engine.generations] == [True] * n
    assert "end=client_closed" in caplog.messages[-1]


async def test_a_send_that_fails_aborts_the_stream() -> None:
    engine = FakeEngine(one_token, hold=True)
    request = HandMadeRequest(create_app(state_with(engine)), CHAT, {"messages": USER_A, "stream": True})

    def on_send(message: Message) -> None:
        raise OSError("connection lost")

    request.on_send = on_send
    with pytest.raises(OSError, match="connection lost"):
        await request.run()
    assert engine.generations[0].aborted


@pytest.mark.parametrize("n", [1, 2])
async def test_a_client_that_leaves_a_whole_answer_aborts_it(n: int, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "servekit.access")
    engine = FakeEngine(one_token, hold=True)
    request = HandMadeRequest(create_app(state_with(engine)), CHAT, {"messages": USER_A, "n": n})
    task = asyncio.create_task(request.run())
    while not engine.generations:
        await asyncio.sleep(0)
    await engine.generations[-1].waiting.wait()
    assert not task.done()
    request.disconnect()
    await task
    assert [generation.aborted for generation in engine.generations] == [True] * n
    assert "status=499" in caplog.messages[-1]
    assert f"output={n}" in caplog.messages[-1]


async def test_a_client_that_leaves_during_encoding_is_never_admitted() -> None:
    encoding = asyncio.Event()

    class SlowEngine(FakeEngine):
        async def encode_chat(self, messages: Any, tools: Any = None, /) -> tuple[int, ...]:
            encoding.set()
            await asyncio.Event().wait()
            raise AssertionError

    engine = SlowEngine()
    for stream in (False, True):
        request = HandMadeRequest(create_app(state_with(engine)), CHAT, {"messages": USER_A, "stream": stream})
        encoding.clear()
        task = asyncio.create_task(request.run())
        await encoding.wait()
        request.disconnect()
        await task
        assert request.status == 499
    assert engine.requests == []


async def test_an_answer_that_ends_is_not_aborted() -> None:
    for fields in ({}, {"stream": True}, {"n": 2}, {"n": 2, "stream": True}):
        engine = FakeEngine()
        await post(engine, CHAT, {"messages": USER_A, **fields})
        assert [generation.aborted for generation in engine.generations] == [False] * len(engine.generations)


async def test_a_silent_stream_sends_comments() -> None:
    engine = FakeEngine(one_token, hold=True)
    state = state_with(engine, ping_interval=0.001)
    request = HandMadeRequest(create_app(state), CHAT, {"messages": USER_A, "stream": True})

    def on_send(message: Message) -> None:
        request.sent.append(message)
        if message.get("body") == b": ping\n\n":
            request.disconnect()

    request.on_send = on_send
    await request.run()
    data = [line for line in request.text.split("\n\n") if line and line != ": ping"]
    assert [json.loads(line.removeprefix("data: "))["choices"][0]["delta"]["content"] for line in data] == ["", "x"]


async def test_openai_client_reads_streams_answers_and_errors() -> None:
    engine = FakeEngine(lambda request: failing(request) if request.priority else hi_there(request))
    async with http_client(state_with(engine)) as transport:
        client = openai.AsyncOpenAI(
            api_key="none", base_url="http://test/v1", http_client=cast(Any, transport), max_retries=0
        )
        messages: Any = USER_A
        whole = await client.chat.completions.create(model="tiny", messages=messages, logprobs=True)
        assert whole.choices[0].message.content == "Hi there"
        assert whole.usage is not None
        assert whole.usage.prompt_tokens_details is not None
        assert whole.usage.prompt_tokens_details.cached_tokens == 1

        stream = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hi there"
        assert chunks[-1].usage is not None
        assert chunks[-1].usage.total_tokens == 10

        text = await client.completions.create(model="tiny", prompt=["a", "b"], logprobs=1)
        assert [choice.text for choice in text.choices] == ["Hi there", "Hi there"]
        assert [model.id async for model in client.models.list()] == ["tiny"]

        broken = await client.chat.completions.create(
            model="tiny", messages=messages, stream=True, extra_body={"priority": 1}
        )
        with pytest.raises(openai.APIError, match="out of luck"):
            async for _ in broken:
                pass
        with pytest.raises(openai.NotFoundError) as missing:
            await client.chat.completions.create(model="other", messages=messages)
        assert (missing.value.code, missing.value.param) == ("model_not_found", "model")
        with pytest.raises(openai.BadRequestError) as refused:
            await client.chat.completions.create(model="tiny", messages=messages, temperature=-1)
        assert refused.value.param == "temperature"
