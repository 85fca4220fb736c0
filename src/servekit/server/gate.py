"""What every request must pass before a route sees it: sizes of its head, its Host, its key, its media type.

It must not know which routes there are, but for the one that needs no key.
"""

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from servekit.errors import ServekitError
from servekit.server.errors import HeadersTooLargeError, MediaTypeError, UriTooLongError, error_response
from servekit.server.security import Security

MAX_URL_BYTES = 8 * 1024
MAX_HEADERS = 100
MAX_HEADER_BYTES = 32 * 1024
OPEN_PATH = "/health"
"""Supervisors hold no key; the answer is one word."""

_HOLDER = "servekit.key_holder"
_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class Gate:
    """ASGI middleware: refuses by the head of a request alone, so that no byte of a refused body is read."""

    def __init__(self, app: ASGIApp, security: Security) -> None:
        self._app = app
        self._security = security

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or refuse it."""
        try:
            if scope["type"] == "http":
                self._check(scope)
        except ServekitError as error:
            await error_response(error, scope["path"])(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _check(self, scope: Scope) -> None:
        raw: list[tuple[bytes, bytes]] = scope["headers"]
        if len(scope.get("raw_path") or scope["path"]) + len(scope["query_string"]) > MAX_URL_BYTES:
            raise UriTooLongError(f"the request target is longer than {MAX_URL_BYTES} bytes")
        if len(raw) > MAX_HEADERS or sum(len(name) + len(value) for name, value in raw) > MAX_HEADER_BYTES:
            raise HeadersTooLargeError(f"more than {MAX_HEADERS} headers, or than {MAX_HEADER_BYTES} bytes of them")
        self._security.check_host(_values(raw, b"host"))
        if scope["path"] != OPEN_PATH and scope["method"] != "OPTIONS":
            scope[_HOLDER] = self._security.check_key(_values(raw, b"authorization"), _values(raw, b"x-api-key"))
        if scope["method"] in _WITH_BODY:
            _check_media_type(Headers(scope=scope))


def key_holder(scope: Scope) -> str:
    """A name for whoever holds the request's key; "" where there are not several to tell apart."""
    holder: str = scope.get(_HOLDER, "")
    return holder


def _values(headers: list[tuple[bytes, bytes]], name: bytes) -> list[bytes]:
    return [value.strip() for key, value in headers if key == name]


def _check_media_type(headers: Headers) -> None:
    """Only JSON: what else a web page can send without asking first (forms, plain text) must not reach the model."""
    media_type, _, parameter = headers.get("content-type", "").lower().partition(";")
    if media_type.strip() != "application/json" or parameter.strip().replace('"', "") not in ("", "charset=utf-8"):
        raise MediaTypeError("the content type must be application/json")
    if headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise MediaTypeError("a compressed request body is not read", hint="send it without Content-Encoding")
