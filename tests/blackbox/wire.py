"""HTTP/1.1 by hand, where the bytes on the wire or the moment of a close are what is tested (RFC 9112)."""

import json
import socket
import struct
from collections.abc import Iterator
from types import TracebackType
from typing import Any, Self

READ_DEADLINE_S = 60.0
DONE = b"data: [DONE]"


class Wire:
    """One connection. Reads block until the server has something to say, or fail when that takes absurdly long.

    A `receive_buffer` of few bytes makes the server feel a client that does not read.
    """

    def __init__(self, host: str, port: int, *, receive_buffer: int | None = None) -> None:
        self._socket = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
        self._socket.settimeout(READ_DEADLINE_S)
        if receive_buffer is not None:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        self._socket.connect((host, port))
        self._host = host
        self._file = self._socket.makefile("rb")

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def post(self, path: str, body: Any, **headers: str) -> None:
        """Send a whole POST: bytes as they are, anything else as JSON."""
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        fields = {"host": self._host, "content-type": "application/json", "content-length": str(len(content))}
        fields |= {name.replace("_", "-"): value for name, value in headers.items()}
        lines = [f"POST {path} HTTP/1.1", *(f"{name}: {value}" for name, value in fields.items()), "", ""]
        self.send("\r\n".join(lines).encode() + content)

    def send(self, data: bytes) -> None:
        """Send bytes as they are."""
        self._socket.sendall(data)

    def head(self) -> tuple[int, dict[str, str]]:
        """Status and headers of the next answer; a header that comes twice fails."""
        version, status, *_ = self._line().split(" ")
        assert version == "HTTP/1.1"
        headers: dict[str, str] = {}
        while line := self._line():
            name, value = line.split(":", 1)
            assert name.lower() not in headers, f"{name} comes twice"
            headers[name.lower()] = value.strip()
        return int(status), headers

    def chunks(self) -> Iterator[bytes]:
        """The pieces of a chunked body, as the server sent them, until the one that ends it."""
        while size := int(self._line(), 16):
            yield self._exactly(size)
            assert self._line() == ""
        assert self._line() == ""

    def body(self, headers: dict[str, str]) -> bytes:
        """The whole body that follows such headers."""
        if headers.get("transfer-encoding") == "chunked":
            return b"".join(self.chunks())
        return self._exactly(int(headers["content-length"]))

    def response(self) -> tuple[int, dict[str, str], bytes]:
        """The whole next answer."""
        status, headers = self.head()
        return status, headers, self.body(headers)

    def events(self) -> Iterator[Any]:
        """The data of each event of a stream that begins now and ends with `[DONE]`; comments are passed over."""
        status, headers = self.head()
        assert status == 200, self.body(headers)
        held, done = b"", False
        for piece in self.chunks():
            held += piece
            *events, held = held.split(b"\n\n")
            for event in events:
                if event.startswith(b":"):
                    continue
                assert not done, f"{event!r} comes after [DONE]"
                done = event == DONE
                if not done:
                    yield json.loads(event.removeprefix(b"data: "))
        assert done, "the stream ended without [DONE]"
        assert held == b""

    def at_end(self) -> bool:
        """Whether the server has closed the connection, with nothing more to read."""
        return self._file.read(1) == b""

    def close(self) -> None:
        """Close in the ordinary way (FIN)."""
        self._file.close()
        self._socket.close()

    def reset(self) -> None:
        """Close so that the server gets a reset (RST)."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    def half_close(self) -> None:
        """Say that nothing more will be sent, but go on listening."""
        self._socket.shutdown(socket.SHUT_WR)

    def _line(self) -> str:
        line = self._file.readline()
        assert line.endswith(b"\r\n"), f"the connection ended within a line: {line!r}"
        return line[:-2].decode("latin-1")

    def _exactly(self, size: int) -> bytes:
        data = self._file.read(size)
        assert len(data) == size, "the connection ended within a body"
        return data
