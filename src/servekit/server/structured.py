"""What a body says about the form of the answer, as one grammar. It must not know how a grammar is enforced."""

import json
from collections.abc import Iterator
from typing import Any, Literal

import msgspec

from servekit.engine.core.request import GrammarSpec
from servekit.errors import InputError
from servekit.server.schema import GenerationBody, StructuredOutputs

ANY_OBJECT = '{"type":"object"}'
MAX_CHOICE_STRINGS = 1000


def grammar_of(body: GenerationBody, response_format: dict[str, Any] | None) -> GrammarSpec | None:
    """The one grammar that the body asks for, or None. Raises InputError for several, naming the second."""
    found = [
        spec
        for spec in (
            _response_format(response_format),
            _text("grammar", body.grammar, "grammar"),
            _text("regex", body.regex, "regex"),
            _choice(body.choice, "choice"),
            *_structured_outputs(body.structured_outputs or StructuredOutputs()),
            _schema(body.guided_json, "guided_json"),
            _text("grammar", body.guided_grammar, "guided_grammar"),
            _text("regex", body.guided_regex, "guided_regex"),
            _choice(body.guided_choice, "guided_choice"),
        )
        if spec is not None
    ]
    if len(found) > 1:
        raise InputError(f"{found[0].param} and {found[1].param} cannot both be followed", param=found[1].param)
    return found[0] if found else None


def _response_format(given: dict[str, Any] | None) -> GrammarSpec | None:
    """OpenAI's three types. A schema is enforced whether `strict` is set or not: there is no weaker mode."""
    kind = None if given is None else given.get("type")
    if given is None or kind == "text":
        return None
    if kind == "json_object":
        return GrammarSpec("json_schema", ANY_OBJECT, "response_format")
    if kind != "json_schema":
        raise InputError("response_format.type must be text, json_object or json_schema", param="response_format.type")
    holder = given.get("json_schema")
    schema = holder.get("schema") if isinstance(holder, dict) else None
    if not isinstance(schema, dict | bool):
        raise InputError("response_format.json_schema.schema is missing", param="response_format.json_schema.schema")
    return GrammarSpec("json_schema", msgspec.json.encode(schema).decode(), "response_format")


def _structured_outputs(given: StructuredOutputs) -> Iterator[GrammarSpec | None]:
    """vLLM's fields, one by one."""
    yield _schema(given.json, "structured_outputs.json")
    yield _text("grammar", given.grammar, "structured_outputs.grammar")
    yield _text("regex", given.regex, "structured_outputs.regex")
    yield _choice(given.choice, "structured_outputs.choice")
    yield _schema(ANY_OBJECT if given.json_object else None, "structured_outputs.json_object")


def _schema(given: str | dict[str, Any] | bool | None, param: str) -> GrammarSpec | None:
    """A JSON schema, as an object or as the text of one."""
    if given is None:
        return None
    text = given if isinstance(given, str) else msgspec.json.encode(given).decode()
    return GrammarSpec("json_schema", text, param)


def _text(kind: Literal["grammar", "regex"], given: str | None, param: str) -> GrammarSpec | None:
    return None if given is None else GrammarSpec(kind, given, param)


def _choice(given: list[str] | None, param: str) -> GrammarSpec | None:
    if given is None:
        return None
    if not given or len(given) > MAX_CHOICE_STRINGS or not all(given):
        raise InputError(f"{param} must hold 1 to {MAX_CHOICE_STRINGS} texts, none of them empty", param=param)
    # Lark's strings are JSON's.
    return GrammarSpec("lark", "start: " + " | ".join(json.dumps(text) for text in given), param)
