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
from servekit.server.errors import BodyTooLargeError
from servekit.server.schema import ChatBody, ContentPart, Message, StreamOptions
from servekit.server.unsupported import HARMLESS_VALUES, refuse_unsupported

B = TypeVar("B", bound=msgspec.Struct)

LARGE_BODY = 64 * 1024
"""Bytes from which a body is parsed in a worker thread."""

MAX_ERROR_CHARS = 300
MAX_NAMES_IGNORED = 32
MAX_NAME_CHARS = 64


async def read_body(request: Request, limit: int) -> bytes:
    """The whole body. Raises BodyTooLargeError as soon as it is known to pass `limit` bytes."""
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit)
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > limit:
            raise _too_large(limit)
    return bytes(body)


async def read_typed(request: Request, limit: int, kind: type[B]) -> tuple[B, tuple[str, ...]]:
    """Read and decode; see both. A small body is parsed faster than a thread is woken."""
    raw = await read_body(request, limit)
    return decode_body(raw, kind) if len(raw) <= LARGE_BODY else await asyncio.to_thread(decode_body, raw, kind)


def decode_body(raw: bytes, kind: type[B]) -> tuple[B, tuple[str, ...]]:
    """The typed body, and the names of the fields in it that nobody here knows.

    Raises InputError with the failing path as `param`, and UnsupportedError for a known field that is not offered.
    """
    try:
        # The parser skips the text of unknown fields unread, so the encoding is checked over the whole body.
        document = msgspec.json.decode(raw.decode("utf-8"))
        if not isinstance(document, dict):
            raise InputError("the request body must be a JSON object")
        refuse_unsupported(document, kind.__struct_fields__)
        body = msgspec.convert(document, kind)
    except UnicodeDecodeError as error:
        raise InputError(f"the request body is not UTF-8 (at byte {error.start})") from None
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        raise InputError(f"the request body is not valid JSON: {error}") from None
    except RecursionError:
        raise InputError("the request body is nested too deeply") from None
    names = dict.fromkeys(name for name in _unknown_fields(document, kind))
    return body, tuple(names)


def ignored_header(names: tuple[str, ...]) -> str:
    """The names as one header value: printable ASCII without commas, of bounded length."""
    shown = ["".join(c if "!" <= c <= "~" and c != "," else "?" for c in name[:MAX_NAME_CHARS]) for name in names]
    if len(shown) > MAX_NAMES_IGNORED:
        shown[MAX_NAMES_IGNORED:] = ["..."]
    return ",".join(shown)


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
    if kind is not ChatBody:
        return
    for message in document["messages"]:
        for name in _unknown(message, Message):
            yield f"messages[].{name}"
        content = message.get("content")
        for part in content if isinstance(content, list) else ():
            for name in _unknown(part, ContentPart):
                yield f"messages[].content[].{name}"


def _unknown(document: Mapping[str, Any], kind: type[msgspec.Struct]) -> Iterator[str]:
    return (name for name, value in document.items() if value is not None and name not in kind.__struct_fields__)
