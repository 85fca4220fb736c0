"""Ways to talk to the app in one process: over httpx, and by hand where the moment of a disconnect matters."""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httpx
from starlette.applications import Starlette
from starlette.types import Message

from servekit.server.app import create_app
from servekit.server.state import ServerState
from tests.server.fake_engine import FakeEngine

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
USER_A = [{"role": "user", "content": "a"}]


def state_with(engine: FakeEngine | None = None, **settings: Any) -> ServerState:
    """A server whose model is called `tiny`."""
    return ServerState("tiny", engine if engine is not None else FakeEngine(), created=1700000000, **settings)


def http_client(state: ServerState) -> httpx.AsyncClient:
    """A client of the app over `state`."""
    return httpx.AsyncClient(transport=httpx.ASGITransport(create_app(state)), base_url="http://127.0.0.1")


async def post(engine: FakeEngine, path: str, body: Any, **headers: str) -> httpx.Response:
    """One POST: bytes as they are, anything else as JSON."""
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    async with http_client(state_with(engine)) as client:
        return await client.post(path, content=content, headers={"content-type": "application/json", **headers})


async def refused(path: str, body: Any, engine: FakeEngine | None = None) -> tuple[int, Any, Any]:
    """Status, param and code of a request that must fail before it reaches the engine."""
    engine = engine if engine is not None else FakeEngine()
    response = await post(engine, path, body)
    assert engine.requests == []
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert set(error) >= {"message", "type", "param", "code"}
    return response.status_code, error["param"], error["code"]


def events(text: str) -> list[Any]:
    """The data of every event; the stream must end with `[DONE]`, which is left out."""
    assert text.endswith("\n\n")
    lines = text[:-2].split("\n\n")
    assert lines[-1] == "data: [DONE]"
    assert all(line.startswith("data: ") for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


class HandMadeRequest:
    """One POST driven message by message. `disconnect` tells the app that the client has gone."""

    def __init__(self, app: Starlette, path: str, body: Any) -> None:
        self._app = app
        self._scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.4"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "query_string": b"",
            "root_path": "",
            "headers": [(b"host", b"127.0.0.1"), (b"content-type", b"application/json")],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 80),
        }
        self._incoming: asyncio.Queue[Message] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": json.dumps(body).encode(), "more_body": False})
        self.sent: list[Message] = []
        self.on_send: Callable[[Message], None] = self.sent.append

    @property
    def status(self) -> int:
        """The status that was answered."""
        status = self.sent[0]["status"]
        assert isinstance(status, int)
        return status

    @property
    def text(self) -> str:
        """The body so far."""
        return b"".join(message.get("body", b"") for message in self.sent[1:]).decode()

    def disconnect(self) -> None:
        """The client goes away."""
        self._incoming.put_nowait({"type": "http.disconnect"})

    async def run(self) -> None:
        """The whole request, until the app is done with it."""
        await self._app(self._scope, self._incoming.get, self._send)

    async def _send(self, message: Message) -> None:
        self.on_send(message)
        await asyncio.sleep(0)
