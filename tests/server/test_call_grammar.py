"""What a grammar made of tools lets a model write, text by text, without a model."""

import json
from typing import Any

import pytest
from llguidance import LLMatcher, LLTokenizer

from servekit.engine.text.tool_format import ToolFormat, tool_format_of
from servekit.server.call_grammar import possible_calls, required_calls
from servekit.server.schema import Function

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"type": "string"},
        "days": {"type": "integer", "maximum": 9},
        "unit": {"type": "string", "enum": ["c", "f"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTIONS = [Function(name="weather", parameters=CITY), Function(name="stop")]
HERMES_CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Bern"}}\n</tool_call>'


def form(sign: str) -> ToolFormat:
    found = tool_format_of(sign, lambda marker: None)
    assert found is not None
    return found


HERMES, MISTRAL, LLAMA = form("<tool_call>"), form("[TOOL_CALLS]"), form('"parameters": ')
CODER, GLM, ARGS = form("<function="), form("<arg_key>"), form("[ARGS]")
CALLS = {
    "hermes": (HERMES, HERMES_CALL, HERMES_CALL.replace("city", "town")),
    "mistral": (MISTRAL, '[TOOL_CALLS][{"name": "stop", "arguments": {}}]', '[TOOL_CALLS][{"name": "go"'),
    "llama": (LLAMA, '{"name": "stop", "parameters": {}}', '{"name": "go"'),
    "args": (ARGS, '[TOOL_CALLS]weather[ARGS]{"city": "Bern", "days": 3}', '[TOOL_CALLS]weather[ARGS]{"days": 3}'),
    "coder": (
        CODER,
        "<tool_call>\n<function=weather>\n<parameter=city>\nBern < Genf\n\n</parameter>\n"
        "<parameter=days>\n3\n</parameter>\n<parameter=unit>\nc\n</parameter>\n</function>\n</tool_call>",
        "<tool_call>\n<function=weather>\n<parameter=days>",
    ),
    "glm": (
        GLM,
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n"
        "<arg_value>3</arg_value>\n</tool_call>",
        "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Bern</arg_value>\n<arg_key>days</arg_key>\n<arg_value>x",
    ),
}


def takes(grammar: str, text: str, *, whole: bool = True) -> bool:
    """Whether the text may be written, and with `whole` end there."""
    tokenizer = LLTokenizer("byte")
    matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(grammar), log_level=0)
    assert not matcher.is_error(), matcher.get_error()
    tokens = tokenizer.tokenize_str(text)
    return matcher.try_consume_tokens(tokens) == len(tokens) and (not whole or matcher.is_accepting())


@pytest.mark.parametrize(("tool_format", "right", "wrong"), CALLS.values(), ids=CALLS)
def test_a_required_call_is_nothing_else(tool_format: ToolFormat, right: str, wrong: str) -> None:
    grammar = required_calls(tool_format, FUNCTIONS, parallel=False)
    assert takes(grammar, right)
    assert not takes(grammar, wrong, whole=False)
    assert not takes(grammar, "Hello", whole=False)
    assert not takes(grammar, right + "\n" + right, whole=False)


@pytest.mark.parametrize(("tool_format", "right", "wrong"), CALLS.values(), ids=CALLS)
def test_a_model_that_is_free_writes_text_or_calls_that_are_right(
    tool_format: ToolFormat, right: str, wrong: str
) -> None:
    grammar = possible_calls(tool_format, FUNCTIONS)
    if tool_format.optional_begin:
        assert grammar is None
        return
    assert grammar is not None
    for text in ("", "Hello {", right, f"So:\n{right}", f"{right}\n{right}", f"{right} and", tool_format.begin[:-1]):
        assert takes(grammar, text), text
    assert not takes(grammar, wrong, whole=False)
    assert not takes(grammar, f"So: {wrong}", whole=False)


def test_references_in_a_schema_are_to_its_own_root() -> None:
    schema = {
        "type": "object",
        "properties": {"day": {"$ref": "#/$defs/Day"}},
        "required": ["day"],
        "$defs": {"Day": {"enum": ["Mo", "Tu"]}},
    }
    functions = [Function(name="f", parameters=schema)]
    right = {
        HERMES: '<tool_call>\n{"name": "f", "arguments": {"day": "Mo"}}\n</tool_call>',
        ARGS: '[TOOL_CALLS]f[ARGS]{"day": "Mo"}',
        CODER: '<tool_call>\n<function=f>\n<parameter=day>\n"Mo"\n</parameter>\n</function>\n</tool_call>',
    }
    for tool_format, text in right.items():
        grammar = required_calls(tool_format, functions, parallel=False)
        assert takes(grammar, text)
        assert not takes(grammar, text.replace("Mo", "Sa"))


def test_several_calls_where_they_are_wanted() -> None:
    assert takes(required_calls(HERMES, FUNCTIONS, parallel=True), f"{HERMES_CALL}\n{HERMES_CALL}")
    several = [{"name": "stop", "arguments": {}}] * 2
    assert takes(required_calls(MISTRAL, FUNCTIONS, parallel=True), f"[TOOL_CALLS]{json.dumps(several)}")
    one = '[TOOL_CALLS]stop[ARGS]{"a": 1}'
    assert takes(required_calls(ARGS, FUNCTIONS, parallel=True), one + one)
