"""A call as a stream of server-sent events. It must not know which route it answers.

Order: opening of every choice, deltas and finishes as they come, usage, the end. A failure after the headers becomes
an error event, without a finish that never happened.
"""

import logging
import math
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import aclosing

from anyio import CancelScope
from sse_starlette import EventSourceResponse, ServerSentEvent
from starlette.types import Message, Receive, Scope, Send

from servekit.errors import ServekitError
from servekit.server.call import Call
from servekit.server.errors import internal_error
from servekit.server.shape import Shape


class EventStream(EventSourceResponse):
    """Owns its call: however the response ends, what has not finished is aborted, and then `on_end` is called once.

    `ping_interval` is in seconds between comments that keep an idle connection open.
    """

    def __init__(
        self,
        call: Call,
        shape: Shape,
        *,
        headers: Mapping[str, str],
        ping_interval: float,
        on_end: Callable[[str], None],
    ) -> None:
        super().__init__(
            self._events(),
            headers={"cache-control": "no-cache", **headers},
            sep="\n",
            ping=ping_interval,
            ping_message_factory=_ping,
            # Whoever drains the server ends the generations; until then a running answer is not cut.
            shutdown_grace_period=math.inf,
        )
        # The server decides whether a connection stays open; a second header would contradict it.
        del self.headers["connection"]
        self._has_ended = False
        self._call = call
        self._shape = shape
        self._on_end = on_end
        self._end = "client_closed"

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. The close stands here, not in the generator: that is never entered if the client leaves early."""

        async def send_in_order(message: Message) -> None:
            # The library's ping task may wake between the last event and the end of the body.
            if not (self._has_ended and message.get("body") == _PING):
                await send(message)

        try:
            await super().__call__(scope, receive, send_in_order)
        finally:
            with CancelScope(shield=True):
                await self._call.close()
            self._on_end(self._end)

    async def _events(self) -> AsyncGenerator[bytes, None]:
        call, shape = self._call, self._shape
        try:
            for index in range(call.num_choices):
                if opening := shape.opening(index):
                    yield opening
            async with aclosing(call.chunks()) as chunks:
                async for index, chunk in chunks:
                    if events := shape.delta(index, chunk):
                        yield events
            if usage := shape.usage(call.usage):
                yield usage
            end = "done"
        except ServekitError as error:
            end = "error"
            yield shape.failed(error)
        except Exception:
            logging.getLogger(__name__).exception("a stream failed")
            end = "error"
            yield shape.failed(internal_error())
        self._has_ended = True
        if last := shape.end(has_failed=end == "error"):
            yield last
        self._end = end


def _ping() -> ServerSentEvent:
    return ServerSentEvent(comment="ping", sep="\n")


_PING = _ping().encode()
