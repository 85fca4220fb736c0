"""A server that answers as it is told and remembers when it did. Times are of `time.perf_counter`, in seconds."""

import asyncio
import contextlib
import json
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Step:
    """`data` is written `at_s` seconds after the request came."""

    at_s: float
    data: bytes


@dataclass(frozen=True, slots=True)
class Answer:
    """What one request gets. With `cut` the connection breaks after the last step instead of ending the body."""

    steps: list[Step]
    status: int = 200
    content_type: str = "text/event-stream"
    cut: bool = False


@dataclass(slots=True)
class Seen:
    """One request: when it came, what it asked, and when each step was written."""

    received: float
    path: str
    headers: dict[str, str]
    body: dict[str, Any]
    written: list[float] = field(default_factory=list)


Script = Callable[[int, Seen], Answer]


def json_answer(document: Any, *, status: int = 200, at_s: float = 0.0) -> Answer:
    """A whole JSON body."""
    return Answer([Step(at_s, json.dumps(document).encode())], status, "application/json")


def event(document: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(document, ensure_ascii=False).encode() + b"\n\n"


def chat_event(content: str | None = None, **fields: Any) -> bytes:
    """One chat chunk; without content its delta is empty."""
    delta: dict[str, Any] = {} if content is None else {"content": content}
    return event({"choices": [{"index": 0, "delta": {**delta, **fields.pop("delta", {})}, **fields}]})


def usage_event(prompt: int, completion: int, cached: int = 0) -> bytes:
    """The chunk that only has the token counts."""
    usage = {
        "prompt_tokens": prompt,
        "completion_tokens": completion,
        "prompt_tokens_details": {"cached_tokens": cached},
    }
    return event({"choices": [], "usage": usage})


DONE = b"data: [DONE]\n\n"
ROLE = chat_event("", delta={"role": "assistant"})


def plain_chat(count: int, *, ttft: float = 0.0, gap: float = 0.0, cached: int = 0) -> Answer:
    """A role chunk, `count` chunks of one token, usage."""
    steps = [Step(0.0, ROLE)]
    steps += [Step(ttft + position * gap, chat_event(f" {position}")) for position in range(count)]
    end = ttft + (count - 1) * gap
    steps.append(Step(end, chat_event(finish_reason="length") + usage_event(20, count, cached) + DONE))
    return Answer(steps)


class FakeServer:
    """Serves from a thread of its own while its block runs.

    `script` answers POSTs by their number; `pages` are the JSON documents or texts of GETs by path. /v1/models is
    always there.
    """

    def __init__(self, script: Script, pages: dict[str, Any] | None = None) -> None:
        self._script = script
        self._pages = {"/v1/models": {"data": [{"id": "fake"}]}, **(pages or {})}
        self._ready = threading.Event()
        self._thread = threading.Thread(target=lambda: asyncio.run(self._serve()), name="fake-server")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self.seen: list[Seen] = []
        self.port = 0

    @property
    def url(self) -> str:
        """The base URL."""
        return f"http://127.0.0.1:{self.port}"

    def __enter__(self) -> Self:
        self._thread.start()
        self._ready.wait()
        return self

    def __exit__(self, *exception: object) -> None:
        assert self._loop is not None
        assert self._stop is not None
        self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.join()

    async def _serve(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        tasks: set[asyncio.Task[None]] = set()

        async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.add(task)
            try:
                while await self._one(reader, writer):
                    pass
            except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
                pass
            finally:
                writer.transport.abort()
                with contextlib.suppress(ConnectionError, asyncio.CancelledError):
                    await writer.wait_closed()
                tasks.discard(task)

        server = await asyncio.start_server(handle, "127.0.0.1", 0)
        self.port = server.sockets[0].getsockname()[1]
        self._ready.set()
        await self._stop.wait()
        server.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _one(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> bool:
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        received = time.perf_counter()
        method, path, _ = head[0].split(" ")
        headers = {name.lower(): value for name, _, value in (line.partition(": ") for line in head[1:-2])}
        body = await reader.readexactly(int(headers.get("content-length", "0")))
        if method == "GET":
            await self._page(path, writer)
            return True
        seen = Seen(received, path, headers, json.loads(body))
        self.seen.append(seen)
        answer = self._script(len(self.seen) - 1, seen)
        writer.write(
            f"HTTP/1.1 {answer.status} Said\r\ncontent-type: {answer.content_type}\r\n"
            "transfer-encoding: chunked\r\n\r\n".encode()
        )
        for step in answer.steps:
            wait = received + step.at_s - time.perf_counter()
            if wait > 0:
                await asyncio.sleep(wait)
            seen.written.append(time.perf_counter())
            writer.write(b"%x\r\n%b\r\n" % (len(step.data), step.data))
            await writer.drain()
        if answer.cut:
            return False
        writer.write(b"0\r\n\r\n")
        return True

    async def _page(self, path: str, writer: asyncio.StreamWriter) -> None:
        page = self._pages.get(path)
        status = 404 if page is None else 200
        text = page if isinstance(page, str) else json.dumps(page)
        head = f"HTTP/1.1 {status} Said\r\ncontent-type: text/plain\r\ncontent-length: {len(text.encode())}\r\n\r\n"
        writer.write(head.encode() + text.encode())
        await writer.drain()
