"""One line for every request, its id, and the last net under an exception. It must not know what a route does.

No line ever holds an answer or a key, nor a prompt unless the server was told to log them.
"""

import json
import logging
import time
import uuid
from dataclasses import dataclass, field
from urllib.parse import quote

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from servekit.engine.core.request import RequestTimings
from servekit.engine.output import Usage
from servekit.server.call import Call
from servekit.server.errors import CLIENT_CLOSED_STATUS, error_response, internal_error

MAX_ID_CHARS = 128
MAX_PATH_CHARS = 128
QUIET_PATHS = frozenset({"/health"})
"""Asked by supervisors every second: logged at debug."""

_SCOPE_KEY = "servekit.record"


@dataclass(slots=True)
class RequestRecord:
    """What the line will say. Times are in seconds of time.monotonic(). `body` is None where it is not logged."""

    request_id: str
    arrival: float = field(default_factory=time.monotonic)
    status: int | None = None
    model: str | None = None
    end: str | None = None
    usage: Usage | None = None
    timings: RequestTimings | None = None
    body: bytearray | None = None

    def note(self, model: str, call: Call, end: str | None = None) -> None:
        """Take what a call has cost; `end` says how a stream ended."""
        self.model = model
        self.usage = call.usage
        self.timings = call.timings
        self.end = end


def request_record(request: Request) -> RequestRecord:
    """The record of the request under way."""
    record = request.scope[_SCOPE_KEY]
    assert isinstance(record, RequestRecord)
    return record


class AccessLog:
    """ASGI middleware: gives every answer an `x-request-id` (the client's, made printable, or a new one) and a line.

    With `log_prompts` the line holds the request's body as well, as far as it was read.
    """

    def __init__(self, app: ASGIApp, *, log_prompts: bool = False) -> None:
        self._app = app
        self._log_prompts = log_prompts
        self._logger = logging.getLogger("servekit.access")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request through."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(Headers(scope=scope).get("x-request-id", "")))
        scope[_SCOPE_KEY] = record
        id_header = (b"x-request-id", record.request_id.encode("ascii"))

        async def send_with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                record.status = message["status"]
                message["headers"] = [*message.get("headers", ()), id_header]
            await send(message)

        async def receive_and_keep() -> Message:
            message = await receive()
            if record.body is not None and message["type"] == "http.request":
                record.body += message.get("body", b"")
            return message

        if self._log_prompts:
            record.body = bytearray()
        try:
            await self._app(scope, receive_and_keep if self._log_prompts else receive, send_with_id)
        except Exception:
            self._logger.exception("id=%s failed", record.request_id)
            if record.status is not None:
                raise
            await error_response(internal_error(), scope["path"])(scope, receive, send_with_id)
        finally:
            level = logging.DEBUG if scope["path"] in QUIET_PATHS else logging.INFO
            fields = _fields(scope, record)
            line = " ".join(f"{name}={value}" for name, value in fields.items())
            if record.body:
                fields["body"] = record.body.decode("utf-8", errors="replace")
                line += f" body={json.dumps(fields['body'])}"
            self._logger.log(level, "%s", line, extra={"fields": fields})


def _request_id(given: str) -> str:
    """The client's id without what could forge a line of the log, or a new one."""
    printable = "".join(c for c in given if "!" <= c <= "~")[:MAX_ID_CHARS]
    return printable or f"req-{uuid.uuid4().hex}"


def _fields(scope: Scope, record: RequestRecord) -> dict[str, object]:
    fields: dict[str, object] = {
        "id": record.request_id,
        "request": f"{scope['method']} {quote(scope['path'])[:MAX_PATH_CHARS]}",
        # A task that is cancelled before any answer has lost its client as well.
        "status": record.status or CLIENT_CLOSED_STATUS,
        "ms": _ms(time.monotonic() - record.arrival),
    }
    if record.model is not None:
        fields["model"] = record.model
    if record.end is not None:
        fields["end"] = record.end
    if record.usage is not None:
        fields["prompt"] = record.usage.prompt_tokens
        fields["cached"] = record.usage.cached_tokens
        fields["output"] = record.usage.completion_tokens
    if record.timings is not None:
        fields["queue_ms"] = _ms(record.timings.queue)
        fields["prefill_ms"] = _ms(record.timings.prefill)
        fields["decode_ms"] = _ms(record.timings.decode)
    return fields


def _ms(seconds: float) -> float:
    return round(seconds * 1e3, 1)
