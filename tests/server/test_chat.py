"""The chat route's answers, whole and streamed, to the byte."""

import pytest

from servekit.engine.core.request import FinishReason, Request, TokenLogprob
from servekit.engine.output import Chunk, Usage
from tests.server.client import CHAT, USER_A, events, post
from tests.server.fake_engine import FakeEngine, hi_there

pytestmark = pytest.mark.anyio

USAGE = {
    "prompt_tokens": 1,
    "completion_tokens": 9,
    "total_tokens": 10,
    "prompt_tokens_details": {"cached_tokens": 1},
}
TIMINGS = {
    "queue_ms": 1.0,
    "preemptions": 1,
    "mean_batch_size": 2.5,
    "cache_n": 1,
    "prompt_n": 0,
    "prompt_ms": 20.0,
    "prompt_per_token_ms": 0.0,
    "prompt_per_second": 0.0,
    "predicted_n": 9,
    "predicted_ms": 40.0,
    "predicted_per_token_ms": 5.0,
    "predicted_per_second": 200.0,
}


async def test_whole_answer() -> None:
    body = (await post(FakeEngine(), CHAT, {"model": "tiny", "messages": USER_A})).json()
    assert body.pop("id").startswith("chatcmpl-")
    assert isinstance(body.pop("created"), int)
    assert body == {
        "object": "chat.completion",
        "model": "tiny",
        "choices": [
            {
                "index": 0,
                "message": {"role": "assistant", "content": "Hi there"},
                "logprobs": None,
                "finish_reason": "stop",
                "stop_reason": None,
            }
        ],
        "usage": USAGE,
        "timings": TIMINGS,
    }


async def test_stream_bytes_and_headers() -> None:
    response = await post(FakeEngine(), CHAT, {"messages": USER_A, "stream": True})
    first = events(response.text)[0]
    head = (
        f'data: {{"id":"{first["id"]}","object":"chat.completion.chunk","created":{first["created"]},'
        '"model":"tiny","choices":[{"index":0,'
    )
    timings = (
        '"timings":{"queue_ms":1.0,"preemptions":1,"mean_batch_size":2.5,"cache_n":1,"prompt_n":0,"prompt_ms":20.0,'
        '"prompt_per_token_ms":0.0,"prompt_per_second":0.0,"predicted_n":9,"predicted_ms":40.0,'
        '"predicted_per_token_ms":5.0,"predicted_per_second":200.0}'
    )
    assert response.text == (
        f'{head}"delta":{{"role":"assistant","content":""}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}"delta":{{"content":"Hi"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}"delta":{{"content":" there"}},"logprobs":null,"finish_reason":null}}]}}\n\n'
        f'{head}"delta":{{}},"logprobs":null,"finish_reason":"stop","stop_reason":null}}],{timings}}}\n\n'
        "data: [DONE]\n\n"
    )
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.headers["cache-control"] == "no-cache"
    assert response.headers["x-accel-buffering"] == "no"


async def test_include_usage_adds_one_last_chunk_and_null_elsewhere() -> None:
    body = {"messages": USER_A, "stream": True, "stream_options": {"include_usage": True}}
    chunks = events((await post(FakeEngine(), CHAT, body)).text)
    assert [chunk["usage"] for chunk in chunks] == [None, None, None, None, USAGE]
    assert [len(chunk["choices"]) for chunk in chunks] == [1, 1, 1, 1, 0]
    assert len({(chunk["id"], chunk["created"]) for chunk in chunks}) == 1


async def test_text_that_json_must_escape_comes_back() -> None:
    text = 'quote " back \\ line \n tab \t nul \x00 ইমোজি 😀 \u2028'

    def script(request: Request) -> list[Chunk]:
        return [Chunk(text, Usage(1, 1), token_ids=(1,), finish_reason=FinishReason.LENGTH)]

    chunks = events((await post(FakeEngine(script), CHAT, {"messages": USER_A, "stream": True})).text)
    assert chunks[1]["choices"][0]["delta"]["content"] == text
    assert chunks[2]["choices"][0]["finish_reason"] == "length"
    assert "timings" not in chunks[2]


async def test_a_chunk_without_text_is_not_sent() -> None:
    def script(request: Request) -> list[Chunk]:
        return [Chunk("", Usage(1, 1), token_ids=(0xC3,)), *hi_there(request)]

    chunks = events((await post(FakeEngine(script), CHAT, {"messages": USER_A, "stream": True})).text)
    assert [chunk["choices"][0]["delta"].get("content") for chunk in chunks] == ["", "Hi", " there", None]


async def test_stop_reason_is_the_matched_string_or_token() -> None:
    def script(request: Request) -> list[Chunk]:
        return [Chunk("x", Usage(1, 2), token_ids=(120,), finish_reason=FinishReason.STOP, stop_reason="END")]

    body = {"messages": USER_A, "stop": ["END"]}
    whole = (await post(FakeEngine(script), CHAT, body)).json()
    assert whole["choices"][0]["stop_reason"] == "END"
    streamed = events((await post(FakeEngine(script), CHAT, {**body, "stream": True})).text)
    assert streamed[-1]["choices"][0]["stop_reason"] == "END"


async def test_choices_of_a_stream_keep_their_index_and_end_once() -> None:
    def script(request: Request) -> list[Chunk]:
        index = int(request.request_id.rsplit("-", 1)[1])
        return [
            Chunk(f"{index}{i}", Usage(1, i + 1, index), finish_reason=FinishReason.LENGTH if i == index else None)
            for i in range(index + 1)
        ]

    body = {"messages": USER_A, "n": 3, "stream": True, "stream_options": {"include_usage": True}}
    *chunks, usage = events((await post(FakeEngine(script), CHAT, body)).text)
    choices = [chunk["choices"][0] for chunk in chunks]
    for index in range(3):
        mine = [choice for choice in choices if choice["index"] == index]
        assert [choice["delta"].get("content") for choice in mine] == [
            "",
            *(f"{index}{i}" for i in range(index + 1)),
            None,
        ]
        assert [choice["finish_reason"] for choice in mine] == [None] * (index + 2) + ["length"]
    # The prompt counts once, with what its first choice found cached; the answers of all three count.
    assert usage["usage"] == {
        "prompt_tokens": 1,
        "completion_tokens": 6,
        "total_tokens": 7,
        "prompt_tokens_details": {"cached_tokens": 0},
    }
    whole = (await post(FakeEngine(script), CHAT, {"messages": USER_A, "n": 3})).json()
    assert [choice["message"]["content"] for choice in whole["choices"]] == ["00", "1011", "202122"]
    assert whole["usage"] == usage["usage"]


def e_acute(request: Request) -> list[Chunk]:
    """The two bytes of one character, as two tokens."""
    return [
        Chunk("", Usage(1, 1), token_ids=(0xC3,), logprobs=(TokenLogprob(0xC3, -0.5, ((0xC3, -0.5), (97, -1.5))),)),
        Chunk(
            "é",
            Usage(1, 2),
            token_ids=(0xA9,),
            logprobs=(TokenLogprob(0xA9, float("-inf"), ((97, -0.25), (98, float("-inf")))),),
            finish_reason=FinishReason.LENGTH,
        ),
    ]


E_ACUTE_LOGPROBS = [
    {
        "token": "\ufffd",
        "logprob": -0.5,
        "bytes": [0xC3],
        "top_logprobs": [
            {"token": "\ufffd", "logprob": -0.5, "bytes": [0xC3]},
            {"token": "a", "logprob": -1.5, "bytes": [97]},
        ],
    },
    {
        "token": "\ufffd",
        "logprob": -9999.0,
        "bytes": [0xA9],
        "top_logprobs": [
            {"token": "a", "logprob": -0.25, "bytes": [97]},
            {"token": "b", "logprob": -9999.0, "bytes": [98]},
        ],
    },
]


async def test_logprobs_of_a_whole_answer() -> None:
    engine = FakeEngine(e_acute)
    body = (await post(engine, CHAT, {"messages": USER_A, "logprobs": True, "top_logprobs": 2})).json()
    assert engine.requests[0].sampling.logprobs == 2
    assert body["choices"][0]["logprobs"] == {"content": E_ACUTE_LOGPROBS, "refusal": None}
    shown = bytes(byte for entry in body["choices"][0]["logprobs"]["content"] for byte in entry["bytes"])
    assert shown.decode() == body["choices"][0]["message"]["content"]


async def test_logprobs_of_a_stream_come_with_their_tokens() -> None:
    body = {"messages": USER_A, "logprobs": True, "top_logprobs": 2, "stream": True}
    _, first, second, finish = events((await post(FakeEngine(e_acute), CHAT, body)).text)
    assert first["choices"][0]["delta"] == {"content": ""}
    assert first["choices"][0]["logprobs"]["content"] == E_ACUTE_LOGPROBS[:1]
    assert second["choices"][0]["delta"] == {"content": "é"}
    assert second["choices"][0]["logprobs"]["content"] == E_ACUTE_LOGPROBS[1:]
    assert finish["choices"][0]["logprobs"] is None


async def test_logprobs_without_top_logprobs_asks_for_none_beside() -> None:
    engine = FakeEngine()
    await post(engine, CHAT, {"messages": USER_A, "logprobs": True})
    assert engine.requests[0].sampling.logprobs == 0
    await post(engine, CHAT, {"messages": USER_A, "logprobs": False})
    assert engine.requests[1].sampling.logprobs is None


async def test_return_token_ids() -> None:
    body = {"messages": USER_A, "return_token_ids": True}
    whole = (await post(FakeEngine(), CHAT, body)).json()
    assert whole["prompt_token_ids"] == [97]
    assert whole["choices"][0]["token_ids"] == list(b"Hi there")
    chunks = events((await post(FakeEngine(), CHAT, {**body, "stream": True})).text)
    assert chunks[0]["prompt_token_ids"] == [97]
    assert [chunk["choices"][0].get("token_ids") for chunk in chunks] == [None, [72, 105], list(b" there"), None]
