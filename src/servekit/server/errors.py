"""How an error looks over HTTP: the OpenAI body, the status and the headers. One route has a shape of its own."""

from typing import Any

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from servekit.errors import (
    ContextLengthError,
    EngineError,
    InputError,
    InputLengthError,
    NotFoundError,
    OverloadedError,
    ServekitError,
)

CLIENT_CLOSED_STATUS = 499
"""What the log says of a request whose client went away; nobody is left to read it."""

MESSAGES_PATH = "/v1/messages"
"""The one route that speaks Anthropic's language, in its errors too."""

_ANTHROPIC_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    503: "overloaded_error",
    504: "timeout_error",
}


class BodyTooLargeError(InputError):
    """The request body is larger than the server reads."""

    http_status = 413
    code = "body_too_large"


class SlowBodyError(InputError):
    """The request body did not arrive in time."""

    http_status = 408
    code = "request_timeout"


class RequestTimeoutError(ServekitError):
    """The answer was not finished within the time that one request may take."""

    http_status = 504
    error_type = "timeout_error"
    code = "request_timeout"


class UriTooLongError(InputError):
    """The request target is longer than the server reads."""

    http_status = 414
    code = "uri_too_long"


class HeadersTooLargeError(InputError):
    """The request headers are larger, or more, than the server reads."""

    http_status = 431
    code = "headers_too_large"


class MediaTypeError(InputError):
    """The request body is not plain JSON."""

    http_status = 415
    code = "unsupported_media_type"


class HostNotClearError(InputError):
    """The request does not say once to which host it goes."""

    code = "invalid_host"


class HostNotAllowedError(InputError):
    """The request goes to a name that is not this server's."""

    http_status = 403
    error_type = "permission_error"
    code = "host_not_allowed"


class UnauthorizedError(InputError):
    """The request has no valid API key."""

    http_status = 401
    error_type = "authentication_error"
    code = "invalid_api_key"


class MethodNotAllowedError(InputError):
    """The route exists, but not for this method."""

    http_status = 405
    code = "method_not_allowed"


class ModelNotFoundError(NotFoundError):
    """The request names a model that this server does not serve."""

    code = "model_not_found"


_BODY_UNREAD = (
    BodyTooLargeError,
    SlowBodyError,
    UriTooLongError,
    HeadersTooLargeError,
    MediaTypeError,
    HostNotClearError,
    HostNotAllowedError,
    UnauthorizedError,
)


def error_body(error: ServekitError) -> bytes:
    """`{"error": {...}}`, the whole body of an answer or the data of an event."""
    return msgspec.json.encode({"error": error_fields(error)})


def error_fields(error: ServekitError) -> dict[str, Any]:
    """`{message, type, param, code}`; the hint is the message's last sentence."""
    message = error.message
    if error.hint:
        message = f"{message.rstrip('.')}. {error.hint[0].upper()}{error.hint[1:].rstrip('.')}."
    fields: dict[str, Any] = {"message": message, "type": error.error_type, "param": error.param, "code": error.code}
    if isinstance(error, ContextLengthError):
        fields["n_prompt_tokens"] = error.num_prompt_tokens
        fields["n_ctx"] = error.max_model_len
    if isinstance(error, InputLengthError):
        fields["n_prompt_tokens"] = error.num_tokens
        fields["n_ctx"] = error.max_tokens
    return fields


def anthropic_error_body(error: ServekitError) -> bytes:
    """Anthropic's `{"type": "error", "error": {"type", "message"}}`, with the types that its clients know."""
    kind = _ANTHROPIC_TYPES.get(error.http_status, "invalid_request_error" if error.http_status < 500 else "api_error")
    fields = {"type": kind, "message": error_fields(error)["message"]}
    return msgspec.json.encode({"type": "error", "error": fields})


def error_response(error: ServekitError, path: str) -> Response:
    """The whole answer to a request to `path` that failed before its first byte was sent."""
    headers = {}
    if isinstance(error, OverloadedError):
        headers["retry-after"] = str(error.retry_after_s)
    if isinstance(error, UnauthorizedError):
        headers["www-authenticate"] = "Bearer"
    if isinstance(error, _BODY_UNREAD):
        # The rest of the body is still under way and will not be read.
        headers["connection"] = "close"
    body = anthropic_error_body(error) if path == MESSAGES_PATH else error_body(error)
    return Response(body, error.http_status, headers, media_type="application/json")


def internal_error() -> EngineError:
    """What a client is told of an exception nobody expected; the log has the rest."""
    return EngineError("an unexpected error on the server", hint="see the server's log")


def handle_servekit_error(request: Request, error: Exception) -> Response:
    """Exception handler of the app for ServekitError."""
    assert isinstance(error, ServekitError)
    return error_response(error, request.url.path)


def handle_http_exception(request: Request, error: Exception) -> Response:
    """Exception handler of the app for what the router itself refuses (no such route, wrong method)."""
    assert isinstance(error, HTTPException)
    if error.status_code == NotFoundError.http_status:
        return error_response(NotFoundError("there is no such route"), request.url.path)
    if error.status_code == MethodNotAllowedError.http_status:
        refusal = MethodNotAllowedError(f"this route does not take {request.method}")
        response = error_response(refusal, request.url.path)
        response.headers.update(error.headers or {})
        return response
    return error_response(InputError(error.detail), request.url.path)


def handle_disconnect(request: Request, error: Exception) -> Response:
    """Exception handler of the app for a client that went away."""
    assert isinstance(error, ClientDisconnect)
    return Response(status_code=CLIENT_CLOSED_STATUS)
