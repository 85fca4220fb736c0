"""Calls of functions that are spelled as JSON objects, told while they are made. It must not know HTTP shapes.

Nothing is lost: what begins like a call and turns out to be none, or names a function that was not offered, is content.
"""

import json
import re
from collections.abc import Iterator

from servekit.engine.text.tool_format import ToolFormat
from servekit.server.call_text import SPACE, ArgumentsDelta, CallStart, ContentDelta, Delta, num_certain


class ToolCallParser:
    """See CallParser. `names` are the functions on offer; with `only_one`, calls after the first are left out."""

    def __init__(self, tool_format: ToolFormat, names: frozenset[str], *, only_one: bool = False) -> None:
        self._format = tool_format
        self._names = names
        self._only_one = only_one
        self._held = ""
        self._is_between = False
        self._object: _CallObject | None = None
        self._raw = ""  # since the marker of the call under way: what becomes content if it is none
        self._has_text = False
        self.num_calls = 0
        key = re.escape(tool_format.arguments_key)
        self._head = re.compile(rf'\{{\s*"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"{key}"\s*:\s*(?=\{{)')

    def push(self, text: str) -> list[Delta]:
        """What is certain now that `text` follows."""
        self._held += text
        return list(self._advance(is_end=False))

    def finish(self) -> list[Delta]:
        """What was held back; the answer has ended."""
        deltas = list(self._advance(is_end=True))
        if self._object is not None and not self._object.is_announced:
            deltas += self._content(self._raw + self._object.text)
        elif self._object is not None:
            self.num_calls += 1
        elif self._raw or not self._is_between:
            deltas += self._content(self._raw + self._held)
        self._object, self._held, self._raw = None, "", ""
        return deltas

    def _advance(self, *, is_end: bool) -> Iterator[Delta]:
        while self._held:
            before = (len(self._held), self._is_between, self._object)
            if self._object is not None:
                yield from self._in_object()
            elif self._is_between:
                yield from self._between(is_end=is_end)
            else:
                yield from self._in_text(is_end=is_end)
            if before == (len(self._held), self._is_between, self._object):
                return

    def _in_text(self, *, is_end: bool) -> Iterator[Delta]:
        """Content, up to what may be the beginning of a call; spaces before one belong to it."""
        begin = self._format.begin
        at = self._held.find(begin)
        if self._format.optional_begin and not self._has_text and self._held.lstrip(SPACE).startswith("{"):
            at, begin = len(self._held) - len(self._held.lstrip(SPACE)), ""
        if at >= 0:
            yield from self._content(self._held[:at].rstrip(SPACE))
            self._raw, self._held = begin, self._held[at + len(begin) :]
            self._is_between = True
            return
        certain = len(self._held) if is_end else num_certain(self._held, begin)
        yield from self._content(self._held[:certain])
        self._held = self._held[certain:]

    def _between(self, *, is_end: bool) -> Iterator[Delta]:
        """After a marker or an object: separators, then another object, the end marker, or text after all."""
        separators = self._format.separators + ("[" if self._format.is_list else "")
        rest = self._held.lstrip(separators)
        if not rest:
            return
        end = self._format.end
        if rest.startswith("{"):
            self._raw += self._held[: len(self._held) - len(rest)]
            self._held, self._object = rest, _CallObject(self._head)
        elif end and rest.startswith(end):
            self._held, self._is_between, self._raw = rest[len(end) :], False, ""
        elif not (end and end.startswith(rest)) or is_end:
            # What follows is read as text, in which another call may begin.
            self._is_between = False
            yield from self._content(self._raw)
            self._raw = ""

    def _in_object(self) -> Iterator[Delta]:
        call = self._object
        assert call is not None, "no object is open"
        for piece in call.push(self._held):
            if not call.is_announced:
                if call.name not in self._names:
                    continue
                call.is_announced = True
                if not self._is_left_out():
                    yield CallStart(self.num_calls, call.name)
            if not self._is_left_out():
                yield ArgumentsDelta(self.num_calls, piece)
        self._held = call.rest
        if not call.is_complete:
            return
        self._object = None
        if call.is_announced:
            self.num_calls += 1
            self._raw = ""
            return
        parsed = _parse_call(call.text, self._format.arguments_key)
        if parsed is None or parsed[0] not in self._names:
            self._is_between = False
            yield from self._content(self._raw + call.text)
            self._raw = ""
            return
        if not self._is_left_out():
            yield CallStart(self.num_calls, parsed[0])
            yield ArgumentsDelta(self.num_calls, parsed[1])
        self.num_calls += 1
        self._raw = ""

    def _is_left_out(self) -> bool:
        return self._only_one and self.num_calls > 0

    def _content(self, text: str) -> list[Delta]:
        if not text:
            return []
        self._has_text = self._has_text or not text.isspace()
        return [ContentDelta(text)]


class _CallObject:
    """One JSON object as it grows: where it ends, and its arguments as soon as their beginning is known."""

    def __init__(self, head: re.Pattern[str]) -> None:
        self._pattern = head
        self._depth = 0
        self._in_string = False
        self._is_escaped = False
        self._arguments_from: int | None = None
        self._arguments_done = False
        self.name = ""
        self.text = ""
        self.rest = ""
        self.is_announced = False
        self.is_complete = False

    def push(self, text: str) -> Iterator[str]:
        """The new text of the arguments, if that can be told; `rest` is what comes after the object."""
        sent = len(self.text)
        ends_at = None
        self.rest = ""
        for position, char in enumerate(text):
            was_deep = self._depth
            self._step(char)
            if was_deep == 2 and self._depth == 1 and self._arguments_from is not None and not self._arguments_done:
                self._arguments_done, ends_at = True, sent + position + 1
            if self._depth == 0:
                self.text += text[: position + 1]
                self.rest, self.is_complete = text[position + 1 :], True
                break
            if self._arguments_from is None and char == "{" and was_deep == 1:
                match = self._pattern.match(self.text + text[: position + 1])
                if match is not None and match.end() == sent + position:
                    self._arguments_from = match.end()
                    self.name = _decoded(match[1])
        else:
            self.text += text
        if self._arguments_from is None or (self._arguments_done and ends_at is None):
            return
        piece = self.text[max(sent, self._arguments_from) : ends_at]
        if piece:
            yield piece

    def _step(self, char: str) -> None:
        if self._is_escaped:
            self._is_escaped = False
        elif self._in_string:
            self._is_escaped = char == "\\"
            self._in_string = char != '"'
        elif char == '"':
            self._in_string = True
        elif char in "{[":
            self._depth += 1
        elif char in "}]":
            self._depth -= 1


def _decoded(literal: str) -> str:
    try:
        value = json.loads(literal)
    except ValueError:
        return ""
    return value if isinstance(value, str) else ""


def _parse_call(text: str, arguments_key: str) -> tuple[str, str] | None:
    """Name and arguments of a whole object whose fields stand in another order, or None."""
    try:
        call = json.loads(text)
    except (ValueError, RecursionError):
        return None
    name, arguments = call.get("name"), call.get(arguments_key, {})
    if not isinstance(name, str):
        return None
    if isinstance(arguments, str):
        return name, arguments
    return (name, json.dumps(arguments, ensure_ascii=False)) if isinstance(arguments, dict) else None
