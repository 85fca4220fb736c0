"""Streams as bytes on a socket: framing, characters and stop strings over tokens, comments, and clients that leave.

One slot only, so that a second request waits behind the first for as long as the test wants.
"""

import codecs
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from tests.blackbox.bodies import (
    chat,
    chat_text,
    completion,
    completion_text,
    endless,
    finish,
    piece,
    streamed_text,
    user,
)
from tests.blackbox.server import CHAT, COMPLETIONS, Server, running_server
from tests.blackbox.tiny import CONTEXT, TinyChat
from tests.blackbox.wire import DONE, Wire

PING_INTERVAL = "0.05"


@pytest.fixture(scope="module")
def process(chatty: TinyChat) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--kv-memory", "8MiB", "--parallel", "1", "--sse-ping-interval", PING_INTERVAL)
    with running_server(chatty.directory, *flags) as server:
        yield server


def events_of(server: Server, path: str, body: dict[str, Any]) -> list[Any]:
    """All events of a whole stream."""
    with server.open(path, {**body, "stream": True}) as wire:
        return list(wire.events())


def test_framing_on_the_wire(server: Server) -> None:
    body = chat(stream=True, max_tokens=20, ignore_eos=True, stream_options={"include_usage": True})
    with server.wire() as wire:
        for _ in range(2):  # a stream that has ended leaves its connection as it found it
            wire.post(CHAT, body, accept_encoding="gzip, deflate, br", accept="text/event-stream")
            status, headers = wire.head()
            assert status == 200
            assert headers["content-type"] == "text/event-stream; charset=utf-8"
            assert headers["cache-control"] == "no-cache"
            assert headers["x-accel-buffering"] == "no"
            assert headers["transfer-encoding"] == "chunked"
            assert "content-encoding" not in headers
            raw = wire.body(headers).decode("utf-8")
            assert "\r" not in raw
            assert raw.endswith("\n\n")
            frames = [frame for frame in raw[:-2].split("\n\n") if frame != ": ping"]
            assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
            assert frames[-1] == "data: [DONE]"
            first, *deltas, end, usage = [json.loads(frame.removeprefix("data: ")) for frame in frames[:-1]]
            assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
            assert all(delta["choices"][0]["delta"]["content"] for delta in deltas)
            assert end["choices"][0]["delta"] == {}
            assert end["choices"][0]["finish_reason"] == "length"
            assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 20)
        wire.post(CHAT, chat(max_tokens=1))
        assert wire.response()[0] == 200


def test_a_connection_that_is_to_close_is_closed(server: Server) -> None:
    with server.wire() as wire:
        wire.post(CHAT, chat(stream=True, max_tokens=2), connection="close")
        list(wire.events())
        assert wire.at_end()


def test_nothing_comes_after_done_however_often_there_are_comments(chatty: TinyChat) -> None:
    with running_server(chatty.directory, "--dtype", "float32", "--sse-ping-interval", "0.001") as server:
        for _ in range(40):
            with server.open(CHAT, chat(stream=True, max_tokens=8, ignore_eos=True)) as wire:
                _, headers = wire.head()
                frames = wire.body(headers).split(b"\n\n")
                assert frames[-2:] == [DONE, b""]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("allowed", ["😀", "é日", "এক দুই", "👨‍👩‍👧", None])
def test_characters_split_over_tokens(server: Server, chatty: TinyChat, route: str, allowed: str | None) -> None:
    bias = {str(token_id): 100 for token_id in chatty.byte_ids(allowed)} if allowed else {}
    sampling: dict[str, Any] = {
        "temperature": 1,
        "max_tokens": 120,
        "logit_bias": bias,
        "return_token_ids": True,
    }
    for seed in range(3):
        body = (chat if route == CHAT else completion)(seed=seed, **sampling)
        answer = server.answer(route, body)
        (choice,) = answer["choices"]
        expected = visible_bytes(chatty, choice["token_ids"]).decode("utf-8", errors="replace")
        assert (chat_text if route == CHAT else completion_text)(answer) == expected
        events = events_of(server, route, body)
        assert streamed_text(events) == expected
        # At every token, nothing is held back but bytes that may still become a character.
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        certain = shown = ""
        for event in events[:-1]:
            shown += piece(event)
            certain += decoder.decode(visible_bytes(chatty, event["choices"][0].get("token_ids", [])))
            is_last = event is events[-2]  # with it comes what the end releases
            assert shown == (expected if is_last else certain)


def visible_bytes(chatty: TinyChat, token_ids: list[int]) -> bytes:
    """The bytes of an answer: control tokens are not part of it."""
    control = range(3)
    return chatty.bytes_of(token_id for token_id in token_ids if token_id not in control)


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_stop_strings_that_span_tokens(server: Server, route: str) -> None:
    make, text_in = (chat, chat_text) if route == CHAT else (completion, completion_text)
    body = make(max_tokens=64, ignore_eos=True, temperature=1, seed=11)
    text = text_in(server.answer(route, body))
    assert len(text) > 40
    for start, end in ((9, 17), (0, 3), (20, 21), (len(text) - 5, len(text)), (7, 35)):
        stop = text[start:end]
        expected = text[: text.find(stop)]
        answer = server.answer(route, {**body, "stop": stop})
        assert text_in(answer) == expected
        assert (answer["choices"][0]["finish_reason"], answer["choices"][0]["stop_reason"]) == ("stop", stop)
        events = events_of(server, route, {**body, "stop": [stop]})
        assert streamed_text(events) == expected
        assert (finish(events)["finish_reason"], finish(events)["stop_reason"]) == ("stop", stop)


def test_the_earliest_of_several_stop_strings_wins(server: Server) -> None:
    body = chat(max_tokens=64, ignore_eos=True, temperature=1, seed=11)
    text = chat_text(server.answer(CHAT, body))
    stops = [text[30:33], text[9:17], text[12:14], "\x00 never \x00"]
    first = min((stop for stop in stops if stop in text), key=text.find)
    answer = server.answer(CHAT, {**body, "stop": stops})
    assert chat_text(answer) == text[: text.find(first)]
    assert answer["choices"][0]["stop_reason"] == first
    assert answer["usage"]["completion_tokens"] < 64


def test_only_a_beginning_of_a_stop_string_is_held_back(server: Server, chatty: TinyChat) -> None:
    body = chat(max_tokens=40, logit_bias={str(chatty.id_of("c")): 100}, return_token_ids=True)
    alone = [piece(event) for event in events_of(server, CHAT, body)]
    assert alone.count("c") == 40
    never = events_of(server, CHAT, {**body, "stop": ["x" * 200, "dc" * 50]})
    assert [piece(event) for event in never] == alone
    # Three are held at any time, as they may be the beginning of the fourth; the end releases them.
    held = events_of(server, CHAT, {**body, "stop": "cccd"})
    role, end = "", ""
    assert [piece(event) for event in held] == [role, *[""] * 3, *["c"] * 36, "cccc", end]


@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_usage_comes_once_and_only_when_asked_for(server: Server, route: str) -> None:
    body = (chat if route == CHAT else completion)(max_tokens=8, ignore_eos=True)
    usage = server.answer(route, body)["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + 8
    for options in (None, {}, {"include_usage": False}):
        events = events_of(server, route, {**body, "stream_options": options})
        assert all(event["choices"] and "usage" not in event for event in events)
    *events, last = events_of(server, route, {**body, "stream_options": {"include_usage": True}})
    assert all(event["choices"] and event["usage"] is None for event in events)
    assert last["choices"] == []
    assert last["usage"] == usage
    refused = server.post(route, {**body, "stream_options": {"include_usage": True}})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "stream_options")


Leave = Callable[[Wire], None]
WAYS_TO_LEAVE = [pytest.param(Wire.close, id="FIN"), pytest.param(Wire.reset, id="RST")]
HALF_CLOSE = pytest.param(Wire.half_close, id="half-close")


@pytest.mark.parametrize("leave", [*WAYS_TO_LEAVE, HALF_CLOSE])
@pytest.mark.parametrize("route", [CHAT, COMPLETIONS])
def test_a_client_that_leaves_a_stream_frees_its_slot(server: Server, route: str, leave: Leave) -> None:
    num_closed = server.log.count("end=client_closed")
    body = (chat if route == CHAT else completion)(stream=True, ignore_eos=True, max_tokens=CONTEXT - 50)
    with server.open(route, body) as wire:
        stream = wire.events()
        for _ in range(3):
            next(stream)
        assert server.state["running"] == 1
        leave(wire)
        assert server.answer(CHAT, chat(max_tokens=1))["usage"]["completion_tokens"] == 1
        server.wait_idle()
    server.wait_for_log("end=client_closed", num_closed + 1)
    left = [line for line in server.log.splitlines() if "end=client_closed" in line][-1]
    assert int(left.split("output=")[1].split()[0]) < CONTEXT - 50, "the answer went on to its end"


@pytest.mark.parametrize("leave", [*WAYS_TO_LEAVE, HALF_CLOSE])
def test_a_client_that_leaves_a_whole_answer_frees_its_slot(server: Server, leave: Leave) -> None:
    num_closed = server.log.count("status=499")
    with server.open(CHAT, endless()) as wire:
        server.wait_for(lambda state: state["running"] == 1)
        leave(wire)
        assert server.answer(CHAT, chat(max_tokens=1))["usage"]["completion_tokens"] == 1
        server.wait_idle()
    server.wait_for_log("status=499", num_closed + 1)


@pytest.mark.parametrize("leave", [*WAYS_TO_LEAVE, HALF_CLOSE])
def test_a_client_that_leaves_within_its_body_is_only_logged(server: Server, leave: Leave) -> None:
    num_closed = server.log.count("status=499")
    with server.wire() as wire:
        head = f"POST {CHAT} HTTP/1.1\r\nhost: 127.0.0.1\r\ncontent-type: application/json\r\ncontent-length: 1000\r\n"
        wire.send(head.encode() + b'\r\n{"messages":')
        leave(wire)
        server.wait_for_log("status=499", num_closed + 1)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("leave", WAYS_TO_LEAVE)
def test_a_client_that_leaves_the_line_is_never_computed(server: Server, leave: Leave, stream: bool) -> None:
    with server.open(CHAT, endless(stream=True)) as first:
        running = first.events()
        next(running)
        second = server.open(CHAT, chat(user("this one waits"), stream=stream))
        server.wait_for(lambda state: state["waiting"] == 1)
        leave(second)
        assert server.wait_for(lambda state: state["waiting"] == 0)["running"] == 1
        assert piece(next(running)) is not None
    server.wait_idle()


def test_a_client_that_stops_reading_delays_nobody_and_may_leave(server: Server, chatty: TinyChat) -> None:
    # Five megabytes of echo, more than the buffers of a connection hold: a control character takes six bytes of JSON.
    prompt = chatty.byte_ids("\x01") * (CONTEXT - 1)
    body = completion(prompt, n=64, max_tokens=1, echo=True, stream=True, return_token_ids=True)
    with server.wire(receive_buffer=4096) as wire:
        wire.post(COMPLETIONS, body, x_request_id="stalled")
        assert wire.head()[0] == 200
        server.wait_idle()
        assert server.answer(CHAT, chat(max_tokens=1))["usage"]["completion_tokens"] == 1
        assert "id=stalled" not in server.log, "the answer must still be on its way"
    server.wait_for_log("id=stalled")
    assert "end=client_closed" in server.log.split("id=stalled")[1].splitlines()[0]


def test_a_client_that_leaves_all_choices(server: Server) -> None:
    with server.open(CHAT, endless(stream=True, n=4)) as wire:
        next(wire.events())
        server.wait_for(lambda state: (state["running"], state["waiting"]) == (1, 3))
    server.wait_idle()


def test_a_stream_that_waits_gets_comments(server: Server) -> None:
    with server.open(CHAT, endless(stream=True)) as first, server.wire() as second:
        next(first.events())
        second.post(CHAT, chat(user("in line"), stream=True, max_tokens=3, ignore_eos=True))
        status, headers = second.head()
        assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
        chunks = second.chunks()
        raw = b""
        while raw.count(b": ping\n\n") < 3:
            raw += next(chunks)
        assert raw.count(b"data: ") == 1, "the role, and no token yet"
        first.close()
        raw += b"".join(chunks)
    frames = raw.decode().removesuffix("\n\n").split("\n\n")
    assert all(frame == ": ping" or frame.startswith("data: ") for frame in frames)
    assert "\nid:" not in raw.decode()
    assert "\nevent:" not in raw.decode()
    data = [frame.removeprefix("data: ") for frame in frames if frame != ": ping"]
    assert data[-1] == "[DONE]"
    assert finish([json.loads(frame) for frame in data[:-1]])["finish_reason"] == "length"


def test_the_openai_client_reads_over_comments(server: Server) -> None:
    client = openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0)
    messages: Any = [user("in line")]

    def ask() -> str:
        answer = client.chat.completions.create(
            model="chatty", messages=messages, stream=True, temperature=0, max_tokens=8, extra_body={"ignore_eos": True}
        )
        return "".join(chunk.choices[0].delta.content or "" for chunk in answer)

    alone = ask()
    with client, ThreadPoolExecutor(1) as pool, server.open(CHAT, endless(stream=True)) as first:
        events = first.events()
        next(events)
        waiting = pool.submit(ask)
        server.wait_for(lambda state: state["waiting"] == 1)
        first.close()
        assert waiting.result() == alone


@pytest.mark.parametrize(
    ("status", "fields"),
    [
        (400, {"n": 0}),
        (400, {"temperature": -1}),
        (404, {"model": "another"}),
        (400, {"messages": [user("the cat " * CONTEXT)]}),
        (400, {"logit_bias": {"999999999": 1}}),
    ],
)
def test_a_bad_request_is_no_stream(server: Server, status: int, fields: dict[str, Any]) -> None:
    whole = server.post(CHAT, {**chat(), **fields})
    streamed = server.post(CHAT, {**chat(stream=True), **fields})
    for response in (whole, streamed):
        assert response.status_code == status
        assert response.headers["content-type"] == "application/json"
    assert streamed.json() == whole.json()
