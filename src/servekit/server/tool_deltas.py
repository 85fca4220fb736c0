"""Calls of functions in OpenAI's shape: the deltas of a stream, and the message of a whole answer."""

import secrets
from collections.abc import Sequence
from typing import Any

from servekit.engine.core.request import FinishReason
from servekit.server.call_text import ArgumentsDelta, CallParser, CallStart, ContentDelta, Delta

ID_CHARS = 9
"""Mistral's templates take ids of exactly nine letters and digits; the other families take any."""


class ChoiceDeltas:
    """One choice of a stream: `delta` objects from text."""

    def __init__(self, parser: CallParser) -> None:
        self._parser = parser

    def push(self, text: str, *, is_last: bool) -> list[dict[str, Any]]:
        """The deltas that are certain; all of them when the text is the last."""
        deltas = self._parser.push(text)
        if is_last:
            deltas = deltas + self._parser.finish()
        return [_delta_fields(delta) for delta in _joined(deltas)]

    def finish_reason(self, reason: FinishReason) -> str:
        """`tool_calls` for an answer that ended by itself with a call."""
        return _reason(reason, self._parser.num_calls)


def whole_message(parser: CallParser, text: str, reason: FinishReason) -> tuple[dict[str, Any], str]:
    """The message and the finish reason of an answer that is complete."""
    content, calls = "", list[dict[str, Any]]()
    for delta in parser.push(text) + parser.finish():
        if isinstance(delta, ContentDelta):
            content += delta.text
        elif isinstance(delta, CallStart):
            calls.append({"id": call_id(), "type": "function", "function": {"name": delta.name, "arguments": ""}})
        else:
            calls[-1]["function"]["arguments"] += delta.text
    message: dict[str, Any] = {"role": "assistant", "content": content if content or not calls else None}
    if calls:
        message["tool_calls"] = calls
    return message, _reason(reason, parser.num_calls)


def _reason(reason: FinishReason, num_calls: int) -> str:
    return "tool_calls" if reason is FinishReason.STOP and num_calls else reason.value


def _joined(deltas: Sequence[Delta]) -> list[Delta]:
    """Neighbours of one kind as one delta."""
    joined: list[Delta] = []
    for delta in deltas:
        last = joined[-1] if joined else None
        if isinstance(delta, ContentDelta) and isinstance(last, ContentDelta):
            joined[-1] = ContentDelta(last.text + delta.text)
        elif isinstance(delta, ArgumentsDelta) and isinstance(last, ArgumentsDelta) and last.index == delta.index:
            joined[-1] = ArgumentsDelta(last.index, last.text + delta.text)
        else:
            joined.append(delta)
    return joined


def _delta_fields(delta: Delta) -> dict[str, Any]:
    if isinstance(delta, ContentDelta):
        return {"content": delta.text}
    if isinstance(delta, ArgumentsDelta):
        return {"tool_calls": [{"index": delta.index, "function": {"arguments": delta.text}}]}
    function = {"name": delta.name, "arguments": ""}
    return {"tool_calls": [{"index": delta.index, "id": call_id(), "type": "function", "function": function}]}


def call_id() -> str:
    """A new id of a call."""
    return secrets.token_hex(ID_CHARS)[:ID_CHARS]
