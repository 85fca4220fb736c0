"""HTTP/1.1 for measuring: kept-alive connections that stamp every piece of a body as it leaves the event loop's hands.

A general client adds queues and tasks between the socket and the clock; here the parser runs in the socket's callback.
It must not know what a body means.
"""

import asyncio
import ssl
import time
from collections import deque
from dataclasses import dataclass
from typing import Protocol, cast
from urllib.parse import urlsplit

import httptools

from servekit.errors import ConfigError


class AnswerBroken(ConnectionError):
    """The connection ended, or spoke no HTTP, before the answer was whole."""


class Receiver(Protocol):
    """What an exchange reports to, from within the event loop's callback; times are of `time.perf_counter`."""

    def on_head(self, status: int, content_type: str) -> None: ...

    def on_piece(self, time: float, piece: bytes) -> None: ...


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens, and the path that its API begins with (no slash at its end)."""

    host: str
    port: int
    is_tls: bool
    prefix: str

    @classmethod
    def parse(cls, url: str) -> "Address":
        """From a base URL; a /v1 at its end is left out. Raises ConfigError naming --url."""
        parts = urlsplit(url if "//" in url else f"http://{url}")
        try:
            port = parts.port
        except ValueError:
            port = -1
        if parts.scheme not in ("http", "https") or not parts.hostname or port == -1 or parts.query:
            raise ConfigError(
                f"--url: {url!r} is not an http address", hint="write it like http://127.0.0.1:8080", param="url"
            )
        is_tls = parts.scheme == "https"
        prefix = parts.path.rstrip("/").removesuffix("/v1")
        return cls(parts.hostname, port or (443 if is_tls else 80), is_tls, prefix)

    @property
    def url(self) -> str:
        """The base URL."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.is_tls else 'http'}://{host}:{self.port}{self.prefix}"


class Pool:
    """Connections to one server: the one used last is used next, and a new one is opened when none is idle."""

    def __init__(self, address: Address, *, api_key: str | None = None) -> None:
        self._address = address
        host = f"[{address.host}]" if ":" in address.host else address.host
        head = f"Host: {host}:{address.port}\r\nUser-Agent: servekit-bench\r\nAccept: */*\r\n"
        if api_key is not None:
            head += f"Authorization: Bearer {api_key}\r\n"
        self._head = head.encode("latin-1")
        self._tls = ssl.create_default_context() if address.is_tls else None
        self._idle: deque[_Connection] = deque()
        self.reused = 0

    async def exchange(self, method: str, path: str, body: bytes, receiver: Receiver) -> None:
        """Send one request and feed its answer to `receiver`.

        A kept connection that the server closed before it answered anything is replaced once. Raises OSError, of which
        AnswerBroken is a kind.
        """
        request = b"".join(
            (
                f"{method} {self._address.prefix}{path} HTTP/1.1\r\n".encode("latin-1"),
                self._head,
                b"Content-Type: application/json\r\nContent-Length: %d\r\n\r\n" % len(body) if body else b"\r\n",
                body,
            )
        )
        while self._idle and not self._idle[-1].is_open:
            self._idle.pop()
        if self._idle:
            connection = self._idle.pop()
            self.reused += 1
            try:
                return await self._on(connection, request, receiver)
            except AnswerBroken:
                if connection.has_answered:
                    raise
        return await self._on(await self._connect(), request, receiver)

    def close(self) -> None:
        """Close the idle connections."""
        while self._idle:
            self._idle.pop().close()

    async def _connect(self) -> "_Connection":
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(_Connection, self._address.host, self._address.port, ssl=self._tls)
        return connection

    async def _on(self, connection: "_Connection", request: bytes, receiver: Receiver) -> None:
        is_kept = False
        try:
            is_kept = await connection.exchange(request, receiver)
        finally:
            if is_kept and connection.is_open:
                self._idle.append(connection)
            else:
                connection.close()


class _Connection(asyncio.Protocol):
    """One socket, one request at a time."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._receiver: Receiver | None = None
        self._done: asyncio.Future[bool] | None = None
        self._now = 0.0
        self._content_type = ""
        self._has_head = False
        self._ends_with_connection = True
        self.has_answered = False

    @property
    def is_open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Drop the connection."""
        if self._transport is not None:
            self._transport.abort()

    async def exchange(self, request: bytes, receiver: Receiver) -> bool:
        """Send and wait for the end of the answer; returns whether the connection can be used again."""
        if self._transport is None or self._transport.is_closing():
            raise AnswerBroken("the connection was closed")
        self._receiver, self.has_answered = receiver, False
        self._done = asyncio.get_running_loop().create_future()
        self._transport.write(request)
        try:
            return await self._done
        finally:
            self._receiver = self._done = None

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        # uvloop's transports are no subclasses of asyncio's.
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._now = time.perf_counter()
        if self._receiver is None:
            self.close()  # nothing was asked
            return
        self.has_answered = True
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._finish(AnswerBroken(f"the answer is no HTTP: {error}"))
            self.close()

    def connection_lost(self, error: Exception | None) -> None:
        if self._done is None:
            return
        if self._has_head and self._ends_with_connection and error is None:
            self._finish(False)
        else:
            self._finish(AnswerBroken("the connection was closed in the middle of the answer"))

    # What the parser calls.

    def on_message_begin(self) -> None:
        self._content_type, self._has_head, self._ends_with_connection = "", False, True

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.decode("latin-1").lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._ends_with_connection = False

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        self._has_head = status >= 200
        if self._receiver is not None and status >= 200:
            self._receiver.on_head(status, self._content_type)

    def on_body(self, piece: bytes) -> None:
        if self._receiver is not None:
            self._receiver.on_piece(self._now, piece)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._finish(self._parser.should_keep_alive())

    def _finish(self, result: "bool | Exception") -> None:
        if self._done is None or self._done.done():
            return
        if isinstance(result, Exception):
            self._done.set_exception(result)
        else:
            self._done.set_result(result)
