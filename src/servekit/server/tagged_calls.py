"""Calls of functions that are spelled with tags: a name, and the arguments apart from it.

A call is told when it is complete: a value's type is the schema's to say, and what is no call must stay text. It must
not know HTTP shapes.
"""

import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

from servekit.engine.text.tool_format import ToolFormat
from servekit.server.call_text import SPACE, ArgumentsDelta, CallStart, ContentDelta, Delta, num_certain

_NAME = r"\s*(?P<name>[a-zA-Z0-9_.-]{1,64})"
_PARAMETER_CALL = re.compile(r"\s*<function=(?P<name>[^>\s]{1,64})>(?P<body>.*?)(?:</function>\s*)?$", re.S)
_PARAMETER = re.compile(r"<parameter=(?P<key>[^>]+)>\n?(?P<value>.*?)\n?(?:</parameter>|(?=<parameter=)|$)", re.S)
_KEY_VALUE_CALL = re.compile(_NAME + r"\s*(?P<body>(?:<arg_key>.*)?)$", re.S)
_KEY_VALUE = re.compile(r"<arg_key>(?P<key>.*?)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", re.S)
_HEAD = re.compile(_NAME + r"(?:\[CALL_ID\][^\[]{0,64})?\[ARGS\]\s*")

Schemas = Mapping[str, Mapping[str, Any] | None]
"""The functions on offer, each with the JSON schema of its arguments."""


class TaggedCallParser:
    """See CallParser. With `only_one`, calls after the first are left out."""

    def __init__(self, tool_format: ToolFormat, schemas: Schemas, *, only_one: bool = False) -> None:
        self._format = tool_format
        self._schemas = schemas
        self._only_one = only_one
        self._held = ""
        self._gap = ""  # the space before a marker: text again if no call follows
        self._in_call = False
        self.num_calls = 0

    def push(self, text: str) -> list[Delta]:
        """What is certain now that `text` follows."""
        self._held += text
        return list(self._advance(is_end=False))

    def finish(self) -> list[Delta]:
        """What was held back; the answer has ended."""
        return list(self._advance(is_end=True))

    def _advance(self, *, is_end: bool) -> Iterator[Delta]:
        while self._held:
            before = len(self._held), self._in_call
            if self._in_call:
                yield from self._call(is_end=is_end)
            else:
                yield from self._text(is_end=is_end)
            if before == (len(self._held), self._in_call):
                return

    def _text(self, *, is_end: bool) -> Iterator[Delta]:
        """Content up to a marker; between two calls only space is left out."""
        begin = self._format.begin
        at = self._held.find(begin)
        if at >= 0:
            before = self._held[:at].rstrip(SPACE)
            yield from _content(before)
            self._gap = self._held[len(before) : at]
            self._held, self._in_call = self._held[at + len(begin) :], True
            return
        certain = len(self._held) if is_end else num_certain(self._held, begin)
        if is_end and self.num_calls and self._held.isspace():
            self._held = ""
        yield from _content(self._held[:certain])
        self._held = self._held[certain:]

    def _call(self, *, is_end: bool) -> Iterator[Delta]:
        """The rest of a call, once it is there; what is none is text again, in which another one may begin."""
        length = self._length_of_call(is_end=is_end)
        if length is None:
            return
        text, rest = self._held[:length], self._held[length:]
        self._in_call = False
        call = self._parsed(text)
        if call is None:
            # The marker is text, and so is what follows, in which another call may begin.
            yield from _content(self._gap + self._format.begin)
            return
        self._held = rest
        if not (self._only_one and self.num_calls):
            yield CallStart(self.num_calls, call[0])
            yield ArgumentsDelta(self.num_calls, call[1])
        self.num_calls += 1

    def _length_of_call(self, *, is_end: bool) -> int | None:
        """Where the call in the held text ends, or might; None while that cannot be told."""
        if self._format.style == "name_and_object":
            head = _HEAD.match(self._held)
            if head is None:
                could_be = len(self._held) < 256 and "\n" not in self._held.strip()
                return None if could_be and not is_end else len(self._held)
            end = _end_of_object(self._held, head.end())
            return end if end is not None else (len(self._held) if is_end else None)
        end = self._held.find(self._format.end)
        if end >= 0:
            return end + len(self._format.end)
        return len(self._held) if is_end else None

    def _parsed(self, text: str) -> tuple[str, str] | None:
        """Name and arguments (JSON text) of a call of a function on offer."""
        if self._format.style == "name_and_object":
            head = _HEAD.match(text)
            name = head["name"] if head else None
            arguments = _object_text(text[head.end() :]) if head else None
            return (name, arguments) if name in self._schemas and name and arguments is not None else None
        text = text.removesuffix(self._format.end)
        call, pair = _PARAMETER_CALL, _PARAMETER
        if self._format.style == "key_value_tags":
            call, pair = _KEY_VALUE_CALL, _KEY_VALUE
        match = call.match(text)
        if match is None or match["name"] not in self._schemas:
            return None
        properties = _properties(self._schemas[match["name"]])
        found = [(m["key"].strip(), m["value"]) for m in pair.finditer(match["body"])]
        values = {key: _value(value, properties.get(key)) for key, value in found}
        return match["name"], json.dumps(values, ensure_ascii=False)


def _content(text: str) -> list[Delta]:
    return [ContentDelta(text)] if text else []


def _end_of_object(text: str, start: int) -> int | None:
    """Where the JSON object that begins at `start` ends; `start` itself where there is none."""
    if start == len(text):
        return None
    if text[start] != "{":
        return start
    depth, in_string, is_escaped = 0, False, False
    for position in range(start, len(text)):
        char = text[position]
        if is_escaped:
            is_escaped = False
        elif in_string:
            is_escaped, in_string = char == "\\", char != '"'
        elif char == '"':
            in_string = True
        elif char in "{[":
            depth += 1
        elif char in "}]":
            depth -= 1
            if depth == 0:
                return position + 1
    return None


def _object_text(text: str) -> str | None:
    """The text of a JSON object as it is, also of one that was cut off; None for anything else."""
    return text if text.startswith("{") else None


def _properties(schema: Mapping[str, Any] | None) -> Mapping[str, Any]:
    properties = (schema or {}).get("properties")
    return properties if isinstance(properties, Mapping) else {}


def _value(text: str, schema: Any) -> Any:
    """A parameter's value: text where the schema says so, JSON where it is that, else the text."""
    if isinstance(schema, Mapping) and schema.get("type") == "string":
        return text
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
