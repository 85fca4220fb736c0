"""The completions route's prompts and answers."""

from typing import Any

import pytest

from servekit.engine.core.request import FinishReason, Request, TokenLogprob
from servekit.engine.output import Chunk, Usage
from tests.server.client import COMPLETIONS, events, post, refused
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def test_whole_answer() -> None:
    engine = FakeEngine()
    body = (await post(engine, COMPLETIONS, {"prompt": "ab"})).json()
    assert body.pop("id").startswith("cmpl-")
    assert body.pop("created") > 0
    assert body.pop("timings")["cache_n"] == 1
    assert body == {
        "object": "text_completion",
        "model": "tiny",
        "choices": [{"index": 0, "text": "Hi there", "logprobs": None, "finish_reason": "stop", "stop_reason": None}],
        "usage": {
            "prompt_tokens": 2,
            "completion_tokens": 9,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 1},
        },
    }
    assert engine.requests[0].sampling.max_tokens == 16


async def test_stream() -> None:
    body = {"prompt": "ab", "stream": True, "stream_options": {"include_usage": True}, "echo": True}
    chunks = events((await post(FakeEngine(), COMPLETIONS, body)).text)
    assert [[c["text"] for c in chunk["choices"]] for chunk in chunks] == [["ab"], ["Hi"], [" there"], [""], []]
    assert [[c["finish_reason"] for c in chunk["choices"]] for chunk in chunks] == [
        [None],
        [None],
        [None],
        ["stop"],
        [],
    ]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    assert chunks[3]["timings"]["predicted_n"] == 9
    assert chunks[4]["usage"]["total_tokens"] == 11


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("ab", [(97, 98)]),
        (["a", "bc"], [(97,), (98, 99)]),
        ([7, 8], [(7, 8)]),
        ([[7], [8, 9]], [(7,), (8, 9)]),
    ],
)
async def test_kinds_of_prompt(prompt: Any, expected: list[tuple[int, ...]]) -> None:
    engine = FakeEngine()
    body = (await post(engine, COMPLETIONS, {"prompt": prompt})).json()
    assert [request.prompt_token_ids for request in engine.requests] == expected
    assert [choice["index"] for choice in body["choices"]] == list(range(len(expected)))
    assert body["usage"]["prompt_tokens"] == sum(map(len, expected))


async def test_choices_of_several_prompts_follow_their_prompt() -> None:
    engine = FakeEngine()
    body = (await post(engine, COMPLETIONS, {"prompt": ["a", "bc"], "n": 2, "echo": True, "seed": 5})).json()
    assert [choice["text"] for choice in body["choices"]] == ["aHi there"] * 2 + ["bcHi there"] * 2
    assert [request.request_id for request in engine.requests] == [f"{body['id']}-{i}" for i in range(4)]
    assert [request.sampling.seed for request in engine.requests] == [5, 6, 5, 6]
    # Each prompt counts once, each answer too.
    assert body["usage"]["prompt_tokens"] == 3
    assert body["usage"]["completion_tokens"] == 36
    assert body["usage"]["prompt_tokens_details"] == {"cached_tokens": 2}
    # Side by side: times do not add up, tokens do.
    assert body["timings"]["predicted_ms"] == 40.0
    assert body["timings"]["predicted_per_second"] == 800.0
    assert body["timings"]["preemptions"] == 4


async def test_echo_of_token_ids_is_their_text() -> None:
    body = (await post(FakeEngine(), COMPLETIONS, {"prompt": [0xC3, 0xA9, 97], "echo": True})).json()
    assert body["choices"][0]["text"] == "éaHi there"


async def test_return_token_ids() -> None:
    body = {"prompt": ["a", "b"], "return_token_ids": True}
    whole = (await post(FakeEngine(), COMPLETIONS, body)).json()
    assert [choice["prompt_token_ids"] for choice in whole["choices"]] == [[97], [98]]
    assert [choice["token_ids"] for choice in whole["choices"]] == [list(b"Hi there")] * 2
    chunks = events((await post(FakeEngine(), COMPLETIONS, {"prompt": "a", **body, "stream": True})).text)
    assert [chunk["choices"][0].get("prompt_token_ids") for chunk in chunks[:2]] == [[97], [98]]


def a_e_acute_b(request: Request) -> list[Chunk]:
    """ "aéb" with é in two tokens."""
    return [
        Chunk("a", Usage(1, 1), (97,), (TokenLogprob(97, -0.5, ((99, -0.25), (97, -0.5))),)),
        Chunk("", Usage(1, 2), (0xC3,), (TokenLogprob(0xC3, -1.0, ((0xC3, -1.0), (0xC4, -2.0))),)),
        Chunk("é", Usage(1, 3), (0xA9,), (TokenLogprob(0xA9, float("nan")),)),
        Chunk("b", Usage(1, 4), (98,), (TokenLogprob(98, float("-inf")),), finish_reason=FinishReason.LENGTH),
    ]


async def test_logprobs_are_parallel_lists_with_character_offsets() -> None:
    body = {"prompt": "x", "logprobs": 2}
    engine = FakeEngine(a_e_acute_b)
    whole = (await post(engine, COMPLETIONS, body)).json()["choices"][0]
    assert engine.requests[0].sampling.logprobs == 2
    assert whole["logprobs"] == {
        "tokens": ["a", "\ufffd", "\ufffd", "b"],
        "token_logprobs": [-0.5, -1.0, -9999.0, -9999.0],
        "top_logprobs": [{"c": -0.25, "a": -0.5}, {"\ufffd": -1.0}, {"\ufffd": -9999.0}, {"b": -9999.0}],
        "text_offset": [0, 1, 1, 2],
    }
    chunks = events((await post(engine, COMPLETIONS, {**body, "stream": True})).text)
    pieces = [chunk["choices"][0]["logprobs"] for chunk in chunks[:-1]]
    for name, column in whole["logprobs"].items():
        assert [item for piece in pieces for item in piece[name]] == column


@pytest.mark.parametrize(
    ("body", "param", "code"),
    [
        ({}, "prompt", "invalid_value"),
        ({"prompt": None}, "prompt", "invalid_value"),
        ({"prompt": []}, "prompt", "invalid_value"),
        ({"prompt": 5}, "prompt", "invalid_value"),
        ({"prompt": ["a", 1]}, "prompt", "invalid_value"),
        ({"prompt": [[1], 2]}, "prompt", "invalid_value"),
        ({"prompt": [True]}, "prompt[0]", "invalid_value"),
        ({"prompt": ["a"] * 33, "n": 2}, "prompt", "invalid_value"),
        ({"prompt": "a", "logprobs": 21}, "logprobs", "invalid_value"),
        ({"prompt": "a", "logprobs": True}, "logprobs", "invalid_value"),
        ({"prompt": "a", "logprobs": 1, "echo": True}, "echo", "unsupported_value"),
        ({"prompt": "a", "suffix": "b"}, "suffix", "unsupported_value"),
        ({"prompt": "a", "best_of": 2}, "best_of", "unsupported_value"),
        ({"prompt": "a", "max_tokens": 0}, "max_tokens", "invalid_value"),
        ({"prompt": "a" * 1000}, "prompt", "context_length_exceeded"),
    ],
)
async def test_refusals(body: dict[str, Any], param: str, code: str) -> None:
    assert await refused(COMPLETIONS, body) == (400, param, code)
