"""What becomes of a request body: honoured field by field, refused by name, or reported as ignored."""

from typing import Any

import pytest

from servekit.engine.core.request import SamplingParams
from servekit.engine.output import SamplingDefaults
from servekit.errors import InputError
from servekit.server.schema import ChatBody
from servekit.server.unsupported import HARMLESS_VALUES
from tests.server.client import CHAT, COMPLETIONS, USER_A, post, refused
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio


async def test_every_sampling_field_reaches_the_engine() -> None:
    engine = FakeEngine(defaults=SamplingDefaults(temperature=0.1, top_k=3))
    body = {
        "model": "tiny",
        "messages": USER_A,
        "temperature": 0.5,
        "top_p": 0.9,
        "top_k": 7,
        "min_p": 0.1,
        "max_tokens": 100,
        "max_completion_tokens": 3,
        "min_tokens": 2,
        "stop": "x",
        "stop_token_ids": [5, 6],
        "seed": -1,
        "ignore_eos": True,
        "logprobs": True,
        "top_logprobs": 20,
        "presence_penalty": 1,
        "frequency_penalty": -1.5,
        "repetition_penalty": 1.1,
        "logit_bias": {"0": -100, "255": 2.5},
        "priority": -2,
        "cache_salt": "s",
        "user": "u",
        "metadata": {"k": "v"},
    }
    response = await post(engine, CHAT, body)
    assert "x-servekit-ignored" not in response.headers
    request = engine.requests[0]
    assert request.sampling == SamplingParams(
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        max_tokens=3,
        min_tokens=2,
        stop=("x",),
        stop_token_ids=frozenset({5, 6}),
        seed=-1,
        ignore_eos=True,
        logprobs=20,
        presence_penalty=1.0,
        frequency_penalty=-1.5,
        repetition_penalty=1.1,
        logit_bias={0: -100.0, 255: 2.5},
    )
    assert (request.priority, request.cache_salt, request.prompt_token_ids) == (-2, "s", (97,))
    assert request.request_id == f"{response.json()['id']}-0"


async def test_null_is_absent() -> None:
    engine = FakeEngine()
    names = (set(ChatBody.__struct_fields__) | set(HARMLESS_VALUES) | {"unknown"}) - {"messages"}
    response = await post(engine, CHAT, {"messages": USER_A, **dict.fromkeys(names)})
    assert response.status_code == 200
    assert "x-servekit-ignored" not in response.headers
    assert engine.requests[0].sampling == SamplingParams()


async def test_model_defaults_hold_where_the_request_says_nothing() -> None:
    advice = SamplingDefaults(temperature=0.6, top_p=0.95, top_k=20, min_p=0.05, repetition_penalty=1.2)
    engine = FakeEngine(defaults=advice)
    await post(engine, CHAT, {"messages": USER_A})
    await post(engine, CHAT, {"messages": USER_A, "temperature": 0, "top_k": -1})
    expected = {"top_p": 0.95, "min_p": 0.05, "repetition_penalty": 1.2}
    assert engine.requests[0].sampling == SamplingParams(temperature=0.6, top_k=20, **expected)  # type: ignore[arg-type]
    assert engine.requests[1].sampling == SamplingParams(temperature=0.0, top_k=0, **expected)  # type: ignore[arg-type]


async def test_choices_differ_by_seed_only_when_one_is_given() -> None:
    engine = FakeEngine()
    await post(engine, CHAT, {"messages": USER_A, "n": 3, "seed": 7})
    await post(engine, CHAT, {"messages": USER_A, "n": 2})
    assert [request.sampling.seed for request in engine.requests] == [7, 8, 9, None, None]


async def test_messages_reach_the_template_as_plain_text() -> None:
    engine = FakeEngine()
    call = {"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    broken = {"function": {"name": "g", "arguments": "{"}}
    messages = [
        {"role": "developer", "content": "d"},
        {"role": "user", "name": "n", "content": [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]},
        {"role": "assistant", "content": None, "tool_calls": [call, broken]},
        {"role": "tool", "tool_call_id": "c1", "content": "ok"},
        {"role": "assistant", "content": ""},
    ]
    assert (await post(engine, CHAT, {"messages": messages})).status_code == 200
    assert engine.messages == [
        {"role": "system", "content": "d"},
        {"role": "user", "content": "bc", "name": "n"},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "f", "arguments": {"x": 1}}},
                {"type": "function", "function": {"name": "g", "arguments": "{"}},
            ],
        },
        {"role": "tool", "content": "ok", "tool_call_id": "c1"},
        {"role": "assistant", "content": ""},
    ]


async def test_null_empty_and_absent_assistant_content_are_one() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    seen = []
    for content in ({"content": None}, {"content": ""}, {}):
        engine = FakeEngine()
        await post(engine, CHAT, {"messages": [*USER_A, {"role": "assistant", "tool_calls": calls, **content}]})
        seen.append(engine.messages)
    assert seen[0] == seen[1] == seen[2]
    assert seen[0][1]["content"] == ""


@pytest.mark.parametrize(
    ("body", "param"),
    [
        (b"{:", None),
        (b"", None),
        (b"[]", None),
        (b'"x"', None),
        (b"null", None),
        (b'{"messages":[{"role":"user","content":"\xc4\xe3"}]}', None),
        (b'{"messages":[{"role":"user","content":"a"}],"unknown":"\xc4\xe3"}', None),
        (b'{"messages":[{"role":"user","content":"\\ud800"}]}', None),
        (b'{"messages":' + b"[" * 100_000, None),
        (b'{"messages":[{"role":"user","content":"a"}],"seed":' + b"9" * 5000 + b"}", None),
        (b'{"messages":[{"role":"user","content":"a"}],"temperature":' + b"9" * 400 + b"}", "temperature"),
        (b'{"messages":[{"role":"user","content":"a"}],"temperature":NaN}', None),
        ({}, "messages"),
        ({"messages": "hi"}, "messages"),
        ({"messages": []}, "messages"),
        ({"messages": ["hi"]}, "messages[0]"),
        ({"messages": [{"content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user"}]}, "messages[0].content"),
        ({"messages": [*USER_A, {"role": "assistant", "content": None}]}, "messages[1].content"),
        ({"messages": [{"role": "wizard", "content": "x"}]}, "messages[0].role"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content[0]"),
        (
            {"messages": [{"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f"}}]}]},
            "messages[0].tool_calls[0].function.arguments",
        ),
        (
            {
                "messages": [
                    {"role": "user", "content": "x", "tool_calls": [{"function": {"name": "f", "arguments": ""}}]}
                ]
            },
            "messages[0].tool_calls",
        ),
    ],
)
async def test_malformed_bodies(body: Any, param: str | None) -> None:
    status, named, _ = await refused(CHAT, body)
    assert (status, named) == (400, param)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": "5"}, "max_tokens"),
        ({"max_tokens": True}, "max_tokens"),
        ({"max_completion_tokens": 0}, "max_completion_tokens"),
        ({"n": 0}, "n"),
        ({"n": 65}, "n"),
        ({"temperature": -1}, "temperature"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": False}, "temperature"),
        ({"top_p": 0}, "top_p"),
        ({"top_k": -2}, "top_k"),
        ({"top_k": 2**63}, "top_k"),
        ({"priority": -(2**63) - 1}, "priority"),
        ({"min_p": 1.1}, "min_p"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"min_tokens": 5, "max_tokens": 4}, "min_tokens"),
        ({"seed": 2**64}, "seed"),
        ({"stop": [""]}, "stop"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"stop": "a" * 1025}, "stop"),
        ({"stop": ["b", "a" * 1025]}, "stop[1]"),
        ({"cache_salt": "a" * 257}, "cache_salt"),
        ({"stream": "yes"}, "stream"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": False, "stream_options": {}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_usage": 1}}, "stream_options.include_usage"),
        ({"top_logprobs": 3}, "top_logprobs"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
        ({"logprobs": 2}, "logprobs"),
        ({"logit_bias": {"AI": -100}}, "logit_bias"),
        ({"logit_bias": {"-1": 1}}, "logit_bias"),
        ({"logit_bias": {"1.0": 1}}, "logit_bias"),
        ({"logit_bias": {"²": 1}}, "logit_bias"),
        ({"logit_bias": {"0": 1000}}, "logit_bias"),
        ({"logit_bias": {"0": None}}, "logit_bias"),
        ({"logit_bias": [1]}, "logit_bias"),
        ({"logit_bias": {str(i): 1 for i in range(1025)}}, "logit_bias"),
        ({"user": 5}, "user"),
        ({"model": 5}, "model"),
    ],
)
async def test_values_out_of_range_or_of_another_type(fields: dict[str, Any], param: str) -> None:
    for stream in ({}, {"stream": True}):
        status, named, code = await refused(CHAT, {"messages": USER_A, **stream, **fields})
        assert (status, named, code) == (400, param, "invalid_value")
        if "stream" in fields or "stream_options" in fields:
            break


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("tools", [{"type": "function", "function": {"name": "f"}}]),
        ("functions", [{}]),
        ("modalities", ["text", "audio"]),
        ("audio", {}),
        ("prediction", {"type": "content"}),
        ("service_tier", "flex"),
        ("store", True),
        ("chat_template", "{{ x }}"),
    ],
)
async def test_fields_that_are_not_offered_are_refused_by_name(name: str, value: Any) -> None:
    assert await refused(CHAT, {"messages": USER_A, name: value}) == (400, name, "unsupported_value")


async def test_fields_that_ask_for_nothing_pass() -> None:
    body = {
        "messages": USER_A,
        "tools": [],
        "tool_choice": "auto",
        "response_format": {"type": "text"},
        "parallel_tool_calls": True,
        "service_tier": "auto",
        "store": False,
    }
    response = await post(FakeEngine(), CHAT, body)
    assert response.status_code == 200
    assert "x-servekit-ignored" not in response.headers


async def test_unknown_fields_are_named_in_a_header() -> None:
    body = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "a", "cache_control": {}}], "mood": "good"},
            {"role": "assistant", "content": "b", "mood": "bad", "refusal": None},
        ],
        "frobnicate": 1,
        "bad\r\nx-evil: 1,ü": 2,
        "stream": True,
        "stream_options": {"include_usage": True, "colour": 1},
    }
    response = await post(FakeEngine(), CHAT, body)
    assert response.headers["x-servekit-ignored"] == (
        "frobnicate,bad??x-evil:?1??,stream_options.colour,messages[].mood,messages[].content[].cache_control"
    )


async def test_many_unknown_fields_keep_the_header_short() -> None:
    body = {"prompt": "a", "messages": 5, **{f"field{i}": i for i in range(100)}}
    response = await post(FakeEngine(), COMPLETIONS, body)
    names = response.headers["x-servekit-ignored"].split(",")
    assert names == ["messages", *(f"field{i}" for i in range(31)), "..."]


async def test_the_template_may_refuse_a_conversation() -> None:
    engine = FakeEngine()
    engine.encode_error = InputError("the chat template refuses these messages: no system role", param="messages")
    for stream in (False, True):
        assert await refused(CHAT, {"messages": USER_A, "stream": stream}, engine) == (
            400,
            "messages",
            "invalid_value",
        )


@pytest.mark.parametrize(
    ("field", "value", "kind", "text"),
    [
        ("guided_json", {"type": "integer"}, "json_schema", '{"type":"integer"}'),
        ("guided_json", '{"type": "integer"}', "json_schema", '{"type": "integer"}'),
        ("guided_regex", "a+", "regex", "a+"),
        ("guided_grammar", 'root ::= "a"', "grammar", 'root ::= "a"'),
        ("guided_choice", ["a", "b"], "lark", 'start: "a" | "b"'),
        ("structured_outputs", {"json": {"type": "integer"}}, "json_schema", '{"type":"integer"}'),
        ("structured_outputs", {"regex": "a+"}, "regex", "a+"),
        ("structured_outputs", {"choice": ["a"]}, "lark", 'start: "a"'),
        ("structured_outputs", {"grammar": 'root ::= "a"'}, "grammar", 'root ::= "a"'),
        ("structured_outputs", {"json_object": True}, "json_schema", '{"type":"object"}'),
    ],
)
async def test_other_names_of_a_form(field: str, value: Any, kind: str, text: str) -> None:
    engine = FakeEngine()
    response = await post(engine, CHAT, {"messages": USER_A, field: value})
    assert response.status_code == 200
    assert "x-servekit-ignored" not in response.headers
    grammar = engine.requests[-1].sampling.grammar
    assert grammar is not None
    assert (grammar.kind, grammar.text) == (kind, text)
    assert grammar.param.startswith(field)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": "a", "regex": "b"}, "guided_regex"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs.choice"),
        ({"structured_outputs": {"structural_tag": "x"}}, "structured_outputs"),
        ({"guided_choice": []}, "guided_choice"),
    ],
)
async def test_forms_under_other_names_that_cannot_be_followed(fields: dict[str, Any], param: str) -> None:
    assert (await refused(CHAT, {"messages": USER_A, **fields}))[:2] == (400, param)


@pytest.mark.parametrize(("path", "body"), [("/tokenize", {"prompt": "a"}), ("/detokenize", {"tokens": [1]})])
async def test_the_tokenise_routes_name_what_they_ignore(path: str, body: dict[str, Any]) -> None:
    response = await post(FakeEngine(), path, {**body, "with_pieces": True})
    assert (response.status_code, response.headers["x-servekit-ignored"]) == (200, "with_pieces")
