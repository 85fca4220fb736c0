"""The bytes of a connection, bounded in size and time before there is a request. It must not know what is asked.

uvicorn's parser collects a head of any size, waits for it for ever, and lets a reader that has stopped reading keep
its connection. The three bounds stand here, below the app, because only here can they be seen.
"""

import asyncio
import logging
from functools import partial
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from servekit.errors import InputError, ServekitError
from servekit.server.errors import HeadersTooLargeError, SlowBodyError, error_body
from servekit.server.gate import MAX_HEADER_BYTES, MAX_URL_BYTES

MAX_HEAD_BYTES = MAX_URL_BYTES + MAX_HEADER_BYTES
_REASONS = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}
_HEAD = b"HTTP/1.1 %d %s\r\ncontent-type: application/json\r\ncontent-length: %d\r\nconnection: close\r\n\r\n"

log = logging.getLogger("servekit.server")


def protocol_with(read_timeout: float, write_timeout: float) -> type[asyncio.Protocol]:
    """What uvicorn makes for every connection. Both times are in seconds."""
    made = partial(BoundedProtocol, read_timeout=read_timeout, write_timeout=write_timeout)
    return cast(type[asyncio.Protocol], made)


class BoundedProtocol(HttpToolsProtocol):
    """One connection: a head must be complete within MAX_HEAD_BYTES and `read_timeout`, and its reader must read.

    What is refused here is answered with the same JSON as any other error, and then the connection ends.
    """

    def __init__(self, *args: Any, read_timeout: float, write_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timeout = read_timeout
        self._write_timeout = write_timeout
        self._num_head_bytes = 0
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        """A client has connected; its first head is due."""
        super().connection_made(transport)
        self._await_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection has ended."""
        super().connection_lost(exc)
        self._cancel_timers()

    def data_received(self, data: bytes) -> None:
        """Bytes have come; while a head is under way they count as its own."""
        if self.transport.is_closing():
            return
        super().data_received(data)
        if self._head_timer is not None and not self.transport.is_closing():
            self._num_head_bytes += len(data)
            if self._num_head_bytes > MAX_HEAD_BYTES:
                self._refuse(HeadersTooLargeError(f"the request's head is larger than {MAX_HEAD_BYTES} bytes"))

    def on_message_begin(self) -> None:
        """The first bytes of a head have come."""
        super().on_message_begin()
        if self._head_timer is None:
            self._await_head()

    def on_headers_complete(self) -> None:
        """The head is whole."""
        self._cancel_head_timer()
        super().on_headers_complete()

    def pause_writing(self) -> None:
        """The client reads more slowly than we write."""
        super().pause_writing()
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self._write_timeout, self._cut_off)

    def resume_writing(self) -> None:
        """The client has caught up."""
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def send_400_response(self, msg: str) -> None:
        """The parser has given up on the connection."""
        self._refuse(InputError("the request is not valid HTTP"))

    def _await_head(self) -> None:
        self._num_head_bytes = 0
        self._head_timer = self.loop.call_later(self._read_timeout, self._head_is_late)

    def _head_is_late(self) -> None:
        self._head_timer = None
        self._refuse(SlowBodyError(f"the request's head did not arrive within {self._read_timeout:g} seconds"))

    def _cut_off(self) -> None:
        log.warning("a client has not caught up for %g seconds; its connection is cut", self._write_timeout)
        self.transport.abort()

    def _refuse(self, error: ServekitError) -> None:
        """Answer unless an answer is under way, into which this one would run; end the connection in either case."""
        self._cancel_timers()
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            if self.cycle is not None:
                # What the app would still answer must not follow, and it need not wait for the rest of a body.
                self.cycle.disconnected = True
                self.cycle.message_event.set()
            body = error_body(error)
            self.transport.write(_HEAD % (error.http_status, _REASONS[error.http_status], len(body)) + body)
        self.transport.close()

    def _cancel_head_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _cancel_timers(self) -> None:
        self._cancel_head_timer()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None
