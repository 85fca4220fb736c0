"""Answers of a random model that must have a form: they parse at any temperature, beside others that have none."""

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import openai
import pytest
from pydantic import BaseModel

from tests.blackbox.bodies import chat, chat_text, completion, completion_text, endless
from tests.blackbox.server import CHAT, COMPLETIONS, Server, running_server
from tests.blackbox.tiny import TinyChat

SCHEMA = {
    "type": "object",
    "properties": {
        "kind": {"enum": ["cat", "dog"]},
        "age": {"type": "integer", "minimum": 0, "maximum": 99},
        "tags": {"type": "array", "items": {"type": "boolean"}, "maxItems": 3},
    },
    "required": ["kind", "age", "tags"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def process(chatty: TinyChat) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--kv-memory", "4MiB", "--max-model-len", "512", "--parallel", "8")
    with running_server(chatty.directory, *flags) as server:
        yield server


def schema_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "strict": True, "schema": schema}}


def check(text: str) -> None:
    value = json.loads(text)
    assert set(value) == {"kind", "age", "tags"}
    assert value["kind"] in ("cat", "dog")
    assert 0 <= value["age"] <= 99
    assert len(value["tags"]) <= 3
    assert all(isinstance(tag, bool) for tag in value["tags"])


def test_every_answer_parses_and_neighbours_are_left_alone(server: Server) -> None:
    free = endless(max_tokens=60, logprobs=True)
    alone = server.answer(CHAT, free)

    def ask(seed: int) -> None:
        if seed % 3 == 0:
            assert server.answer(CHAT, free)["choices"] == alone["choices"]
            return
        body = {**chat(response_format=schema_format(SCHEMA)), "temperature": 1.5, "seed": seed}
        answer = server.answer(CHAT, body)
        assert answer["choices"][0]["finish_reason"] == "stop"
        check(chat_text(answer))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(36)))


def test_a_cut_answer_says_so_and_is_a_beginning(server: Server) -> None:
    body = chat(response_format=schema_format(SCHEMA), max_tokens=5)
    (choice,) = server.answer(CHAT, body)["choices"]
    assert choice["finish_reason"] == "length"
    assert choice["message"]["content"].lstrip()[:1] == "{"


def test_regex_choice_and_grammar(server: Server) -> None:
    for seed in range(4):
        sampled = {"temperature": 2, "seed": seed, "max_tokens": 40}
        text = completion_text(server.answer(COMPLETIONS, completion(regex="[0-9]{3}-(ab|cd)", **sampled)))
        assert re.fullmatch("[0-9]{3}-(ab|cd)", text)
        answer = server.answer(COMPLETIONS, completion(choice=["yes, it is", "no"], n=3, **sampled))
        assert {choice["text"] for choice in answer["choices"]} <= {"yes, it is", "no"}
        text = completion_text(server.answer(COMPLETIONS, completion(grammar='root ::= "x" ("é" | "z")', **sampled)))
        assert text in ("xé", "xz")


class Pet(BaseModel):
    kind: Literal["cat", "dog"]
    age: Literal[1, 2, 30]


def test_openai_parse(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    with client:
        for seed in range(3):
            completion_ = client.chat.completions.parse(
                model="chatty",
                messages=[{"role": "user", "content": "a pet"}],
                response_format=Pet,
                seed=seed,
            )
            pet = completion_.choices[0].message.parsed
            assert isinstance(pet, Pet)
            assert pet.age in (1, 2, 30)


def nested(depth: int) -> Any:
    schema: Any = {"type": "integer"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize(
    "schema",
    [
        {"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"},
        nested(2000),
        {"type": "string", "pattern": "["},
        {"type": "wizard"},
        {"type": "array", "uniqueItems": True},
    ],
)
def test_hostile_schemas_are_refused(server: Server, schema: Any) -> None:
    with ThreadPoolExecutor(1) as pool:
        neighbour = pool.submit(server.answer, CHAT, endless(max_tokens=100))
        # By hand: json.dumps is as recursive as what is tested.
        raw = _dumps({**chat(), "response_format": schema_format(schema)})
        response = server.http.post(CHAT, content=raw, headers={"content-type": "application/json"})
        assert response.status_code == 400, response.text
        assert neighbour.result()["usage"]["completion_tokens"] == 100


def _dumps(value: Any) -> str:
    limit = sys.getrecursionlimit()
    sys.setrecursionlimit(20_000)
    try:
        return json.dumps(value)
    finally:
        sys.setrecursionlimit(limit)


def test_a_thousand_schemas_and_a_wild_pattern(server: Server) -> None:
    wild = schema_format({"type": "string", "pattern": "^(a+)+b$"})
    assert server.answer(CHAT, chat(response_format=wild, max_tokens=8))["usage"]["completion_tokens"] <= 8
    for i in range(200):
        body = chat(response_format=schema_format({"const": i}), max_tokens=8)
        assert chat_text(server.answer(CHAT, body)) == str(i)
