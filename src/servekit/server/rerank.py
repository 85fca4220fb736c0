"""`/rerank` and `/score`: pairs of texts in, one score each out."""

import time
import uuid
from collections.abc import Mapping
from typing import Literal

import msgspec
import numpy as np
from starlette.requests import Request
from starlette.responses import Response

from servekit.engine.embedder import Embedded, Embedder
from servekit.errors import InputError
from servekit.server.body import check_unknown, ignored_header, read_typed
from servekit.server.connection import while_connected
from servekit.server.embedding_schema import RerankBody, ScoreBody
from servekit.server.embeddings import note
from servekit.server.models import embedder_for
from servekit.server.state import ServerState

Method = Literal["cross_encoder", "similarity"]


async def rerank(request: Request, state: ServerState) -> Response:
    """Order documents by how well they answer the query, best first."""
    body, ignored = await read_typed(request, state.body_limit, state.read_timeout, RerankBody)
    check_unknown(ignored, refuse=state.refuse_unknown)
    embedder = embedder_for(body.model, state)
    documents = [item if isinstance(item, str) else item.text for item in body.documents]
    pairs = [(body.query, document) for document in documents]
    work = _score(embedder, pairs, body.method, truncate=bool(body.truncate), param="documents")
    scores, embedded, num_tokens = await while_connected(request.receive, work)
    note(request, state, embedder, embedded, num_tokens)
    # Equal scores keep the order that they came in.
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
    results: list[dict[str, object]] = [{"index": i, "relevance_score": scores[i]} for i in best]
    if body.return_documents:
        for result, i in zip(results, best, strict=True):
            result["document"] = {"text": documents[i]}
    fields = {
        "id": f"rerank-{uuid.uuid4().hex}",
        "model": state.embedding_name,
        "results": results,
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return _json(fields, ignored)


async def score(request: Request, state: ServerState) -> Response:
    """Score pairs in the order that they came in."""
    body, ignored = await read_typed(request, state.body_limit, state.read_timeout, ScoreBody)
    check_unknown(ignored, refuse=state.refuse_unknown)
    embedder = embedder_for(body.model, state)
    pairs = _pairs(body)
    work = _score(embedder, pairs, body.method, truncate=bool(body.truncate), param="text_2")
    scores, embedded, num_tokens = await while_connected(request.receive, work)
    note(request, state, embedder, embedded, num_tokens)
    fields = {
        "id": f"score-{uuid.uuid4().hex}",
        "object": "list",
        "created": int(time.time()),
        "model": state.embedding_name,
        "data": [{"index": i, "object": "score", "score": value} for i, value in enumerate(scores)],
        "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
    }
    return _json(fields, ignored)


def _pairs(body: ScoreBody) -> list[tuple[str, str]]:
    firsts = [body.text_1] if isinstance(body.text_1, str) else body.text_1
    seconds = [body.text_2] if isinstance(body.text_2, str) else body.text_2
    if len(firsts) == 1:
        firsts = firsts * len(seconds)
    if len(firsts) != len(seconds):
        raise InputError(
            f"text_1 has {len(firsts)} texts and text_2 {len(seconds)}: either one, or as many", param="text_1"
        )
    return list(zip(firsts, seconds, strict=True))


async def _score(
    embedder: Embedder, pairs: list[tuple[str, str]], method: Method | None, *, truncate: bool, param: str
) -> tuple[list[float], Embedded, int]:
    """A score for each pair. Similarity stands in for a cross-encoder only when it is asked for by name."""
    if method == "similarity":
        return await _similarity(embedder, pairs, truncate=truncate)
    inputs = await embedder.encode_pairs(pairs, truncate=truncate, param=param)
    embedded = await embedder.embed(inputs)
    return embedded.vectors[:, 0].tolist(), embedded, sum(len(text.token_ids) for text in inputs)


async def _similarity(
    embedder: Embedder, pairs: list[tuple[str, str]], *, truncate: bool
) -> tuple[list[float], Embedded, int]:
    """The cosine of both texts' embeddings; a text that stands in many pairs is embedded once."""
    side: Literal["right"] | None = "right" if truncate else None
    firsts = list(dict.fromkeys(first for first, _ in pairs))
    inputs = await embedder.encode(firsts, input_type="query", truncate=side)
    inputs += await embedder.encode([second for _, second in pairs], input_type="document", truncate=side)
    embedded = await embedder.embed(inputs)
    lengths = np.linalg.norm(embedded.vectors, axis=1, keepdims=True)
    units = embedded.vectors / np.maximum(lengths, 1e-12)
    places = {text: place for place, text in enumerate(firsts)}
    rows = np.array([places[first] for first, _ in pairs])
    scores = (units[rows] * units[len(firsts) :]).sum(axis=1)
    return scores.tolist(), embedded, sum(len(text.token_ids) for text in inputs)


def _json(fields: Mapping[str, object], ignored: tuple[str, ...]) -> Response:
    headers = {"x-servekit-ignored": ignored_header(ignored)} if ignored else {}
    return Response(msgspec.json.encode(fields), headers=headers, media_type="application/json")
