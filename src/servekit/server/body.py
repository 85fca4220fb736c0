"""From the bytes of a request to a typed body: the size limit, the encoding, the JSON and its types.

It must not know what the fields mean. Nothing of the client's text is repeated in an error but what names a field.
"""

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from servekit.errors import InputError
from servekit.server.errors import BodyTooLargeError, SlowBodyError
from servekit.server.schema import ChatBody, ContentPart, Message, StreamOptions, TokenizeBody
from servekit.server.unsupported import HARMLESS_VALUES, refuse_unsupported

B = TypeVar("B", bound=msgspec.Struct)
S = TypeVar("S", bound=msgspec.Struct)

MAX_DEPTH = 64
"""Levels of lists and objects in a body; what reads them further on may be recursive."""
LARGE_BODY = 64 * 1024
"""Bytes from which a body is parsed in a worker thread."""

MAX_ERROR_CHARS = 300
MAX_NAMES_IGNORED = 32
MAX_NAME_CHARS = 64


async def read_body(request: Request, limit: int, timeout: float) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to pass `limit` bytes.

    Raises SlowBodyError when it is not there after `timeout` seconds, however steadily it trickles in.
    """
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    try:
        async with asyncio.timeout(timeout):
            async for piece in request.stream():
                body += piece
                if len(body) > limit:
                    raise _too_large(limit)
    except TimeoutError:
        raise SlowBodyError(f"the request body did not arrive within {timeout:g} seconds") from None
    return bytes(body)


async def read_typed(request: Request, limit: int, timeout: float, kind: type[B]) -> tuple[B, tuple[str, ...]]:
    """Read and decode; see both. A small body is parsed faster than a thread is woken."""
    raw = await read_body(request, limit, timeout)
    return decode_body(raw, kind) if len(raw) <= LARGE_BODY else await asyncio.to_thread(decode_body, raw, kind)


def check_unknown(ignored: tuple[str, ...], *, refuse: bool) -> None:
    """Raise InputError for the first field that nobody knows, where such are refused."""
    if ignored and refuse:
        raise InputError(
            f"{ignored[0][:MAX_NAME_CHARS]} is not a field that this server knows",
            hint="leave it out, or start the server with --unknown-params warn",
            param=ignored[0][:MAX_NAME_CHARS],
        )


def decode_body(raw: bytes, kind: type[B]) -> tuple[B, tuple[str, ...]]:
    """The typed body, and the names of the fields in it that nobody here knows.

    Raises InputError with the failing path as `param`, and UnsupportedError for a known field that is not offered.
    """
    body, document = _decode(raw, kind)
    names = dict.fromkeys(name for name in _unknown_fields(document, kind))
    return body, tuple(names)


def decode_foreign(raw: bytes, kind: type[S], refused: Mapping[str, tuple[Any, ...]]) -> tuple[S, tuple[str, ...]]:
    """As `decode_body`, for a body of another API; `refused` maps fields not offered to values that ask nothing."""
    body, document = _decode(raw, kind, refused)
    return body, tuple(name for name in _unknown(document, kind) if name not in refused)


def _decode(
    raw: bytes, kind: type[S], refused: Mapping[str, tuple[Any, ...]] | None = None
) -> tuple[S, Mapping[str, Any]]:
    try:
        # The parser skips the text of unknown fields unread, so the encoding is checked over the whole body.
        document = msgspec.json.decode(raw.decode("utf-8"))
        if not isinstance(document, dict):
            raise InputError("the request body must be a JSON object")
        _check_depth(document)
        if refused is None:
            # What a route honours itself cannot be refused in it.
            refused = {name: ok for name, ok in HARMLESS_VALUES.items() if name not in kind.__struct_fields__}
        refuse_unsupported(document, refused)
        body = msgspec.convert(document, kind)
    except UnicodeDecodeError as error:
        raise InputError(f"the request body is not UTF-8 (at byte {error.start})") from None
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise InputError(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise InputError("the request body is nested too deeply") from None
    return body, document


def ignored_header(names: tuple[str, ...]) -> str:
    """The names as one header value: printable ASCII without commas, of bounded length."""
    shown = ["".join(c if "!" <= c <= "~" and c != "," else "?" for c in name[:MAX_NAME_CHARS]) for name in names]
    if len(shown) > MAX_NAMES_IGNORED:
        shown[MAX_NAMES_IGNORED:] = ["..."]
    return ",".join(shown)


def _check_depth(document: Mapping[str, Any]) -> None:
    level: list[Any] = [document]
    for _ in range(MAX_DEPTH):
        values = (value for item in level for value in (item.values() if isinstance(item, dict) else item))
        level = [value for value in values if isinstance(value, dict | list)]
        if not level:
            return
    raise InputError(f"the request body is nested more than {MAX_DEPTH} levels deep")


def _too_large(limit: int) -> BodyTooLargeError:
    return BodyTooLargeError(f"the request body is larger than {limit} bytes")


_AT_PATH = re.compile(r"(?s)^(?P<what>.*) - at `\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"^Object missing required field `(?P<field>\w+)`$")


def _invalid(text: str) -> InputError:
    """Split the decoder's message into what is wrong and the field that is wrong."""
    match = _AT_PATH.match(text)
    what, path = (match["what"], match["path"]) if match else (text, "")
    missing = _MISSING.match(what)
    if missing:
        path = f"{path}.{missing['field']}" if path else missing["field"]
        return InputError(f"{path} is missing", param=path)
    # A key of a JSON object stands as [...] in the path; the field that holds the object is the one to name.
    path = path.split("[...]")[0]
    what = what[0].lower() + what[1:MAX_ERROR_CHARS]
    return InputError(f"{path}: {what}" if path else what, param=path or None)


def _unknown_fields(document: Mapping[str, Any], kind: type[msgspec.Struct]) -> Iterator[str]:
    """Names outside the schema, also within messages; a null one asks for nothing."""
    for name in _unknown(document, kind):
        if name not in HARMLESS_VALUES:
            yield name
    for name in _unknown(document.get("stream_options") or {}, StreamOptions):
        yield f"stream_options.{name}"
    if kind not in (ChatBody, TokenizeBody):
        return
    for message in document.get("messages") or ():
        for name in _unknown(message, Message):
            yield f"messages[].{name}"
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            for name in _unknown(part, ContentPart):
                yield f"messages[].content[].{name}"


def _unknown(document: Mapping[str, Any], kind: type[msgspec.Struct]) -> Iterator[str]:
    return (name for name, value in document.items() if value is not None and name not in kind.__struct_fields__)
