"""`/v1/embeddings`: what its body means to the embedder, and what its answer looks like."""

import asyncio
import binascii
from collections.abc import Sequence

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from servekit.engine.core.request import RequestTimings
from servekit.engine.embedder import Embedded, Embedder
from servekit.engine.output import Usage
from servekit.engine.step import FloatArray
from servekit.errors import InputError
from servekit.server.access_log import request_record
from servekit.server.body import check_unknown, ignored_header, read_typed
from servekit.server.connection import while_connected
from servekit.server.embedding_schema import MAX_INPUTS, EmbeddingBody
from servekit.server.models import embedder_for
from servekit.server.state import ServerState

_LARGE_ANSWER = 32 * 1024
"""Numbers from which an answer is written in a worker thread."""

Text = str | tuple[int, ...]


async def embeddings(request: Request, state: ServerState) -> Response:
    """Answer one request. Raises ServekitError for what cannot be honoured."""
    body, ignored = await read_typed(request, state.body_limit, state.read_timeout, EmbeddingBody)
    check_unknown(ignored, refuse=state.refuse_unknown)
    embedder = embedder_for(body.model, state)
    embedder.check_size(body.dimensions)
    if body.truncation_direction is not None and not body.truncate:
        raise InputError("truncation_direction needs truncate: true", param="truncation_direction")
    texts = _texts(body.input)

    async def work() -> tuple[Embedded, int]:
        side = (body.truncation_direction or "right") if body.truncate else None
        inputs = await embedder.encode(texts, input_type=body.input_type, truncate=side)
        return await embedder.embed(inputs), sum(len(text.token_ids) for text in inputs)

    embedded, num_tokens = await while_connected(request.receive, work())
    note(request, state, embedder, embedded, num_tokens)
    vectors = embedder.cut(embedded.vectors, body.dimensions)
    tail = msgspec.json.encode(
        {
            "model": state.embedding_name,
            "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            "timings": {"queue_ms": 1e3 * embedded.queue, "device_ms": 1e3 * embedded.device},
        }
    )
    as_base64 = body.encoding_format == "base64"
    if vectors.size < _LARGE_ANSWER:
        content = _answer(vectors, as_base64, tail)
    else:
        content = await asyncio.to_thread(_answer, vectors, as_base64, tail)
    headers = {"x-servekit-ignored": ignored_header(ignored)} if ignored else {}
    return Response(content, headers=headers, media_type="application/json")


def note(request: Request, state: ServerState, embedder: Embedder, embedded: Embedded, num_tokens: int) -> None:
    """Tell the access log what a request has cost."""
    record = request_record(request)
    record.model = state.embedding_name
    record.usage = Usage(num_tokens)
    record.timings = RequestTimings(queue=embedded.queue, prefill=embedded.device)


def _texts(given: str | Sequence[str | int | list[int]]) -> list[Text]:
    """One text, a list of texts, the ids of one text, or a list of lists of ids."""
    if isinstance(given, str):
        return [given]
    kinds = {type(item) for item in given}
    if kinds == {int}:
        return [tuple(item for item in given if isinstance(item, int))]
    if len(kinds) != 1:
        raise InputError("input must be all strings, all token ids or all lists of token ids", param="input")
    if len(given) > MAX_INPUTS:
        raise InputError(f"{len(given)} inputs are more than the {MAX_INPUTS} of one request", param="input")
    return [item if isinstance(item, str) else tuple(item) for item in given if not isinstance(item, int)]


def _answer(vectors: FloatArray, as_base64: bool, tail: bytes) -> bytes:
    """The whole body. A row at a time, so that no call holds the interpreter for long while the engine waits for it."""
    pieces = [b'{"object":"list","data":[']
    little_endian = vectors.astype("<f4", copy=False)
    for index, row in enumerate(little_endian):
        pieces.append(b'%s{"object":"embedding","index":%d,"embedding":' % (b"," if index else b"", index))
        if as_base64:
            pieces += (b'"', binascii.b2a_base64(row.data, newline=False), b'"}')
        else:
            pieces += (msgspec.json.encode(row.tolist()), b"}")
    pieces += (b"],", tail[1:])
    return b"".join(pieces)
