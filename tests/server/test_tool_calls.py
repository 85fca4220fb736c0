"""Calls in the text of an answer, in three families' spelling, however the text is cut into pieces."""

import json
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servekit.engine.text.tool_format import ToolFormat, tool_format_of
from servekit.server.call_text import ArgumentsDelta, CallParser, CallStart, ContentDelta
from servekit.server.tagged_calls import TaggedCallParser
from servekit.server.tool_calls import ToolCallParser


def form(sign: str) -> ToolFormat:
    found = tool_format_of(sign, lambda marker: None)
    assert found is not None
    return found


HERMES, MISTRAL, LLAMA = form("<tool_call>"), form("[TOOL_CALLS]"), form('"parameters": ')
CODER, GLM, ARGS = form("<tool_call>\n<function="), form("<tool_call>{{ name }}<arg_key>"), form("[TOOL_CALLS]x[ARGS]")
SCHEMAS: dict[str, dict[str, Any] | None] = {
    "f": {"properties": {"s": {"type": "string"}, "n": {"type": "integer"}, "o": {"type": "object"}}},
    "get_weather": None,
}
NAMES = frozenset(SCHEMAS)
Call = tuple[str, str]
A = '{"city": "Zü\\"ri}ch", "n": [1, {"x": "]"}]}'


def run(tool_format: ToolFormat, pieces: list[str], **options: Any) -> tuple[str, list[Call]]:
    parser: CallParser
    if tool_format.style == "object":
        parser = ToolCallParser(tool_format, NAMES, **options)
    else:
        parser = TaggedCallParser(tool_format, SCHEMAS, **options)
    content, calls = "", list[Call]()
    deltas = [delta for piece in pieces for delta in parser.push(piece)] + parser.finish()
    for delta in deltas:
        if isinstance(delta, ContentDelta):
            content += delta.text
        elif isinstance(delta, CallStart):
            assert delta.index == len(calls)
            calls.append((delta.name, ""))
        else:
            assert isinstance(delta, ArgumentsDelta)
            assert delta.index == len(calls) - 1
            calls[-1] = (calls[-1][0], calls[-1][1] + delta.text)
    assert parser.num_calls >= len(calls)
    return content, calls


CASES: list[tuple[ToolFormat, str, str, list[Call]]] = [
    (HERMES, "plain", "plain", []),
    (HERMES, "  spaced \n", "  spaced \n", []),
    (HERMES, f'<tool_call>\n{{"name": "f", "arguments": {A}}}\n</tool_call>', "", [("f", A)]),
    (HERMES, f'ok\n\n<tool_call>{{"name":"f","arguments":{A}}}</tool_call>', "ok", [("f", A)]),
    (
        HERMES,
        '<tool_call>\n{"name": "f", "arguments": {}}\n</tool_call>\n'
        '<tool_call>\n{"name": "get_weather", "arguments": {"a": 1}}\n</tool_call>',
        "",
        [("f", "{}"), ("get_weather", '{"a": 1}')],
    ),
    (HERMES, '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', "", [("f", "{}")]),
    (HERMES, '<tool_call>{"name": "f", "arguments": "{\\"a\\": 1}"}</tool_call>', "", [("f", '{"a": 1}')]),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"a": 1', "", [("f", '{"a": 1')]),
    (
        HERMES,
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        '<tool_call>{"name": "g", "arguments": {}}</tool_call>',
        [],
    ),
    (HERMES, "<tool_call>nothing</tool_call>", "<tool_call>nothing</tool_call>", []),
    (HERMES, '<tool_call>{"name": "f"', '<tool_call>{"name": "f"', []),
    (HERMES, "a < b and <tool", "a < b and <tool", []),
    (MISTRAL, f'[TOOL_CALLS] [{{"name": "f", "arguments": {A}}}]', "", [("f", A)]),
    (
        MISTRAL,
        'x[TOOL_CALLS][{"name": "f", "arguments": {}}, {"name": "f", "arguments": {"b": 2}}]',
        "x",
        [("f", "{}"), ("f", '{"b": 2}')],
    ),
    (LLAMA, f'{{"name": "f", "parameters": {A}}}', "", [("f", A)]),
    (LLAMA, '\n<|python_tag|>{"name": "f", "parameters": {}}', "", [("f", "{}")]),
    (
        LLAMA,
        '{"name": "f", "parameters": {}}; {"name": "get_weather", "parameters": {"a": 1}}',
        "",
        [("f", "{}"), ("get_weather", '{"a": 1}')],
    ),
    (LLAMA, '{"answer": 42}', '{"answer": 42}', []),
    (LLAMA, 'use {"name": "f", "parameters": {}}', 'use {"name": "f", "parameters": {}}', []),
    (CODER, "plain <tool", "plain <tool", []),
    (
        CODER,
        "ok\n\n<tool_call>\n<function=f>\n<parameter=s>\n12 <b>\n\n</parameter>\n<parameter=n>\n12\n</parameter>\n"
        '<parameter=o>\n{"a": [1]}\n</parameter>\n</function>\n</tool_call>',
        "ok",
        [("f", '{"s": "12 <b>\\n", "n": 12, "o": {"a": [1]}}')],
    ),
    (
        CODER,
        "<tool_call>\n<function=f>\n</function>\n</tool_call>\n"
        "<tool_call>\n<function=get_weather>\n<parameter=city>\nBern\n</parameter>\n</function>\n</tool_call>\n",
        "",
        [("f", "{}"), ("get_weather", '{"city": "Bern"}')],
    ),
    (
        CODER,
        "<tool_call>\n<function=g>\n</function></tool_call>",
        "<tool_call>\n<function=g>\n</function></tool_call>",
        [],
    ),
    (CODER, "a  <tool_call>nothing", "a  <tool_call>nothing", []),
    (CODER, "<tool_call>\n<function=f>\n<parameter=s>\nhalf a te", "", [("f", '{"s": "half a te"}')]),
    (
        GLM,
        "<tool_call>f\n<arg_key>s</arg_key>\n<arg_value>1</arg_value>\n<arg_key>n</arg_key>\n<arg_value>1</arg_value>\n"
        "</tool_call>",
        "",
        [("f", '{"s": "1", "n": 1}')],
    ),
    (GLM, "<tool_call>f\n</tool_call>", "", [("f", "{}")]),
    (GLM, "<tool_call>g</tool_call>", "<tool_call>g</tool_call>", []),
    (ARGS, f"[TOOL_CALLS]f[ARGS]{A}", "", [("f", A)]),
    (ARGS, f"ok[TOOL_CALLS]f[CALL_ID]abcdefghi[ARGS] {A}", "ok", [("f", A)]),
    (ARGS, "[TOOL_CALLS]f[ARGS]{}[TOOL_CALLS]get_weather[ARGS]{}", "", [("f", "{}"), ("get_weather", "{}")]),
    (ARGS, '[TOOL_CALLS]f[ARGS]{"a": 1', "", [("f", '{"a": 1')]),
    (ARGS, "[TOOL_CALLS]g[ARGS]{}", "[TOOL_CALLS]g[ARGS]{}", []),
    (ARGS, "[TOOL_CALLS]f[ARGS]5", "[TOOL_CALLS]f[ARGS]5", []),
    (ARGS, "[TOOL_CALLS] no call\n at all", "[TOOL_CALLS] no call\n at all", []),
]


@pytest.mark.parametrize(("tool_format", "text", "content", "calls"), CASES)
def test_whole_and_letter_by_letter(tool_format: ToolFormat, text: str, content: str, calls: list[Call]) -> None:
    assert run(tool_format, [text]) == (content, calls)
    assert run(tool_format, list(text)) == (content, calls)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 200), max_size=8))
def test_pieces_do_not_matter(case: tuple[ToolFormat, str, str, list[Call]], cuts: list[int]) -> None:
    tool_format, text, content, calls = case
    edges = sorted({0, len(text), *(cut for cut in cuts if cut < len(text))})
    pieces = [text[a:b] for a, b in pairwise(edges)]
    assert run(tool_format, pieces) == (content, calls)


PIECES = [
    *'{}[]",:a \\',
    "<tool_call>",
    "</tool_call>",
    "[TOOL_CALLS]",
    "[ARGS]",
    "f",
    "<function=f>",
    "<parameter=s>",
    "</function>",
    "<arg_key>s</arg_key>",
    "<arg_value>1</arg_value>",
    '{"name": "f", "arguments": ',
    '{"name": "f", "parameters": ',
    "{}",
]


@given(st.sampled_from([HERMES, MISTRAL, LLAMA, CODER, GLM, ARGS]), st.lists(st.sampled_from(PIECES), max_size=20))
def test_any_text_at_all_is_taken(tool_format: ToolFormat, pieces: list[str]) -> None:
    assert run(tool_format, pieces) == run(tool_format, ["".join(pieces)]) == run(tool_format, list("".join(pieces)))


def test_arguments_are_told_as_they_come() -> None:
    parser = ToolCallParser(HERMES, NAMES)
    assert parser.push('<tool_call>{"name": "f", "arguments": ') == []
    assert parser.push('{"a"') == [CallStart(0, "f"), ArgumentsDelta(0, '{"a"')]
    assert parser.push(": 1") == [ArgumentsDelta(0, ": 1")]
    assert parser.push("}}</tool_call>") == [ArgumentsDelta(0, "}")]
    assert parser.finish() == []


@pytest.mark.parametrize(
    ("tool_format", "one"),
    [
        (HERMES, '<tool_call>{"name": "f", "arguments": {}}</tool_call>'),
        (CODER, "<tool_call>\n<function=f>\n</function>\n</tool_call>"),
        (ARGS, "[TOOL_CALLS]f[ARGS]{}"),
    ],
)
def test_only_one_call(tool_format: ToolFormat, one: str) -> None:
    assert run(tool_format, [one, one], only_one=True) == ("", [("f", "{}")])


def test_the_format_is_read_off_the_template() -> None:
    assert tool_format_of("{{ messages }}", lambda marker: 5) is None
    found = tool_format_of("[TOOL_CALLS]", {"[TOOL_CALLS]": 5}.get)
    assert found is not None
    assert (found.name, found.control_id("[TOOL_CALLS]"), found.control_id("]")) == ("mistral", 5, None)
    assert json.loads(A)["n"][0] == 1
