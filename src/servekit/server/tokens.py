"""`/tokenize` and `/detokenize`: text as the model's tokens and back. Nothing is computed by the model."""

import asyncio
from collections.abc import Mapping

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from servekit.errors import InputError
from servekit.server.body import check_unknown, ignored_header, read_typed
from servekit.server.messages import template_messages
from servekit.server.models import check_generates
from servekit.server.schema import DetokenizeBody, TokenizeBody
from servekit.server.state import ServerState


async def tokenize(request: HttpRequest, state: ServerState) -> Response:
    """The token ids of `prompt` (or `content`, as llama.cpp calls it), or of `messages` through the chat template.

    A text that could not fit the context is refused, as everywhere. Raises InputError.
    """
    engine = state.ready_engine()
    body, ignored = await read_typed(request, state.body_limit, state.read_timeout, TokenizeBody)
    check_unknown(ignored, refuse=state.refuse_unknown)
    check_generates(body.model, state)
    texts = [text for text in (body.prompt, body.content) if text is not None]
    if len(texts) + (body.messages is not None) != 1:
        raise InputError("give one of prompt, content and messages", param="prompt")
    if body.messages is not None:
        ids = await engine.encode_chat(template_messages(body.messages))
    else:
        ids = await engine.encode_text(texts[0], add_special_tokens=body.add_special_tokens is not False)
    answer: dict[str, object] = {"tokens": ids, "count": len(ids), "max_model_len": engine.max_model_len}
    if body.return_token_strs:
        answer["token_strs"] = [engine.tokenizer.token_text(token_id) for token_id in ids]
    return _json(answer, ignored)


async def detokenize(request: HttpRequest, state: ServerState) -> Response:
    """The text of `tokens`, control tokens included, under the names that vLLM and llama.cpp give it."""
    engine = state.ready_engine()
    body, ignored = await read_typed(request, state.body_limit, state.read_timeout, DetokenizeBody)
    check_unknown(ignored, refuse=state.refuse_unknown)
    check_generates(body.model, state)
    if any(not 0 <= token_id < engine.vocab_size for token_id in body.tokens):
        raise InputError(f"tokens: a token id is outside 0 to {engine.vocab_size - 1}", param="tokens")

    def text_of() -> str:
        return b"".join(map(engine.tokenizer.token_bytes, body.tokens)).decode("utf-8", errors="replace")

    text = await asyncio.to_thread(text_of)
    return _json({"prompt": text, "content": text}, ignored)


def _json(fields: Mapping[str, object], ignored: tuple[str, ...]) -> Response:
    headers = {"x-servekit-ignored": ignored_header(ignored)} if ignored else {}
    return Response(msgspec.json.encode(fields), headers=headers, media_type="application/json")
