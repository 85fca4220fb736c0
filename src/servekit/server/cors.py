"""Which web pages may read answers (the CORS protocol of the Fetch standard). It must not know routes or keys."""

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

ALLOWED_METHODS = "GET, POST"
EXPOSED_HEADERS = "x-request-id, x-servekit-ignored, x-servekit-cache, retry-after"
PREFLIGHT_MAX_AGE_S = "600"


class Cors:
    """ASGI middleware: names the asking origin, and never `*`, on every answer to it, errors included.

    Without `origins` it adds nothing at all, so browsers keep answers from every page of another origin.
    """

    def __init__(self, app: ASGIApp, origins: frozenset[str]) -> None:
        self._app = app
        self._origins = origins

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass one request on, or answer the browser's question whether it may be sent."""
        if scope["type"] != "http" or not self._origins:
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        origin = headers.get("origin", "")
        is_allowed = origin in self._origins

        async def send_with_origin(message: Message) -> None:
            if message["type"] == "http.response.start":
                answer = MutableHeaders(scope=message)
                answer.add_vary_header("Origin")
                if is_allowed:
                    answer["access-control-allow-origin"] = origin
                    answer["access-control-expose-headers"] = EXPOSED_HEADERS
            await send(message)

        if is_allowed and scope["method"] == "OPTIONS" and "access-control-request-method" in headers:
            await _preflight(headers)(scope, receive, send_with_origin)
        else:
            await self._app(scope, receive, send_with_origin)


def _preflight(headers: Headers) -> Response:
    """The origin is trusted by name, so whatever headers its page wants to send may be sent."""
    return Response(
        status_code=204,
        headers={
            "access-control-allow-methods": ALLOWED_METHODS,
            "access-control-allow-headers": headers.get("access-control-request-headers", ""),
            "access-control-max-age": PREFLIGHT_MAX_AGE_S,
        },
    )
