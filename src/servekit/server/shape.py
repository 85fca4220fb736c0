"""What an answer looks like on the wire: the seam between a call and the generating routes.

An event is a complete server-sent event, ready to send. Events are put together from encoded pieces, because this is
the only work that is done for every token.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import msgspec

from servekit.engine.output import Chunk, Usage
from servekit.errors import ServekitError
from servekit.server.call import Call, CollectedChoice
from servekit.server.counts import timings_fields, usage_fields
from servekit.server.errors import error_body

DONE_EVENT = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What every piece of one answer repeats. `created` is in seconds since the epoch."""

    id: str
    created: int
    model: str


class Shape(Protocol):
    """Makes the events of a stream, or the whole body."""

    def opening(self, index: int) -> bytes:
        """The events before choice `index` has any token."""
        ...

    def delta(self, index: int, chunk: Chunk) -> bytes:
        """The events for a chunk; empty when it shows nothing yet. The last chunk's include its finish."""
        ...

    def usage(self, usage: Usage) -> bytes:
        """The event after all choices; empty when it was not asked for."""
        ...

    def failed(self, error: ServekitError) -> bytes:
        """The event for a failure after the first byte."""
        ...

    def end(self, *, has_failed: bool) -> bytes:
        """The last bytes of a stream."""
        ...

    def body(self, call: Call, choices: Sequence[CollectedChoice]) -> bytes:
        """The whole answer as one JSON object."""
        ...


class OpenAIEnds:
    """How a stream of the two OpenAI routes ends: an error is an event like any other, and `[DONE]` comes last."""

    def failed(self, error: ServekitError) -> bytes:
        """The event for a failure after the first byte."""
        return b"data: " + error_body(error) + b"\n\n"

    def end(self, *, has_failed: bool) -> bytes:
        """The same after an answer and after a failure, for clients that wait for it."""
        return DONE_EVENT


class EventWriter:
    """Wraps a choice into the event that carries it."""

    def __init__(self, head: AnswerHead, object_name: str, *, include_usage: bool) -> None:
        fields = {"id": head.id, "object": object_name, "created": head.created, "model": head.model}
        self._before = b"data: " + msgspec.json.encode(fields)[:-1] + b',"choices":['
        self._after = b'],"usage":null' if include_usage else b"]"
        self._include_usage = include_usage

    def event(self, choice: bytes, **fields: Any) -> bytes:
        """One event for one choice; `fields` stand beside `choices`."""
        more = b"," + msgspec.json.encode(fields)[1:-1] if fields else b""
        return b"".join((self._before, choice, self._after, more, b"}\n\n"))

    def finish(self, choice: bytes, chunk: Chunk) -> bytes:
        """The last event of one choice, with its timings."""
        if chunk.timings is None:
            return self.event(choice)
        return self.event(choice, timings=timings_fields(chunk.usage, chunk.timings))

    def usage(self, usage: Usage) -> bytes:
        """The event without choices, if the request asked for it."""
        if not self._include_usage:
            return b""
        return b"".join((self._before, b'],"usage":', msgspec.json.encode(usage_fields(usage)), b"}\n\n"))


def whole_body(head: AnswerHead, object_name: str, call: Call, choices: list[dict[str, Any]], **fields: Any) -> bytes:
    """The one JSON object of an answer that is not streamed."""
    body: dict[str, Any] = {
        "id": head.id,
        "object": object_name,
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "usage": usage_fields(call.usage),
        **fields,
    }
    if call.timings is not None:
        body["timings"] = timings_fields(call.usage, call.timings, call.num_choices)
    return msgspec.json.encode(body)
