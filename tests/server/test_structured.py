"""How a body asks for the form of its answer."""

from typing import Any

import pytest

from servekit.engine.core.request import GrammarSpec
from tests.server.client import CHAT, COMPLETIONS, USER_A, post, refused
from tests.server.fake_engine import FakeEngine

pytestmark = pytest.mark.anyio

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({}, None),
        ({"response_format": {"type": "text"}}, None),
        ({"response_format": {"type": "json_object"}}, GrammarSpec("json_schema", '{"type":"object"}')),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "null"}}}},
            GrammarSpec("json_schema", '{"type":"null"}'),
        ),
        ({"regex": "a+"}, GrammarSpec("regex", "a+")),
        ({"grammar": 'root ::= "a"'}, GrammarSpec("grammar", 'root ::= "a"')),
        ({"choice": ["yes", 'n"o\n']}, GrammarSpec("lark", 'start: "yes" | "n\\"o\\n"')),
    ],
)
async def test_one_form_reaches_the_engine_compiled(fields: dict[str, Any], expected: GrammarSpec | None) -> None:
    engine = FakeEngine()
    assert (await post(engine, CHAT, {"messages": USER_A, **fields})).status_code == 200
    assert (await post(engine, COMPLETIONS, {"prompt": "a", **fields})).status_code == 200
    assert [request.sampling.grammar for request in engine.requests] == [expected] * 2
    assert engine.grammars == ([] if expected is None else [expected] * 2)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "json"}, "response_format"),
        ({"response_format": {}}, "response_format.type"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema.schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": 1}}},
            "response_format.json_schema.schema",
        ),
        ({"response_format": {"type": "json_object"}, "regex": "a"}, "regex"),
        ({"grammar": "a", "choice": ["a"]}, "choice"),
        ({"choice": []}, "choice"),
        ({"choice": [""]}, "choice"),
        ({"choice": ["a"] * 1001}, "choice"),
        ({"regex": "a", "ignore_eos": True}, "ignore_eos"),
        ({"regex": "a", "min_tokens": 1}, "min_tokens"),
    ],
)
async def test_a_form_that_cannot_be_meant(fields: dict[str, Any], param: str) -> None:
    status, named, _ = await refused(CHAT, {"messages": USER_A, **fields})
    assert (status, named) == (400, param)
