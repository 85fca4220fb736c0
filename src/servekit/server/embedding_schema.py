"""The request bodies of the embedding routes, field by field. It must not know what a field does.

Every optional field may be null, which means absent. `user` describes the request to the client's own systems.
"""

from typing import Annotated, Literal

from msgspec import Meta, Struct

MAX_INPUTS = 2048
"""Most texts one request may bring (OpenAI's limit)."""

_Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]


class EmbeddingBody(Struct, kw_only=True):
    """`POST /v1/embeddings`. A list is all strings, all token ids (one text) or all lists of them.

    `truncate`, `truncation_direction` and `input_type` are servekit's own.
    """

    input: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: _Positive | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right"] | None = None
    input_type: Literal["query", "document"] | None = None
    user: str | None = None


class Document(Struct, kw_only=True):
    """A document to rank, in the form that carries more than a text elsewhere."""

    text: str


class RerankBody(Struct, kw_only=True):
    """`POST /rerank`, in Cohere's and Jina's shape. `method` and `truncate` are servekit's own."""

    query: str
    documents: Annotated[list[str | Document], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    top_n: _Positive | None = None
    return_documents: bool | None = None
    method: Literal["cross_encoder", "similarity"] | None = None
    truncate: bool | None = None
    user: str | None = None


class ScoreBody(Struct, kw_only=True):
    """`POST /score`: each of `text_2` against the one `text_1`, or against its own."""

    text_1: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    text_2: str | Annotated[list[str], Meta(min_length=1, max_length=MAX_INPUTS)]
    model: str | None = None
    method: Literal["cross_encoder", "similarity"] | None = None
    truncate: bool | None = None
    user: str | None = None
