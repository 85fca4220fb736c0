"""Answers of OpenAI-compatible servers, as far as a measurement reads them. It knows neither clock nor socket."""

from dataclasses import dataclass
from typing import Any

import msgspec
from msgspec import Struct

from servekit.bench.result import Timings

_MAX_REASON = 160


class _Cached(Struct):
    cached_tokens: int | None = None


class _Usage(Struct):
    prompt_tokens: int | None = None
    completion_tokens: int | None = None
    total_tokens: int | None = None
    prompt_tokens_details: _Cached | None = None


class _Timings(Struct):
    queue_ms: float = 0.0
    prompt_ms: float = 0.0
    predicted_ms: float = 0.0
    preemptions: int = 0


class _Delta(Struct):
    content: Any = None
    reasoning_content: Any = None
    reasoning: Any = None
    refusal: Any = None
    tool_calls: list[Any] | None = None


class _Choice(Struct):
    delta: _Delta | None = None
    message: _Delta | None = None
    text: str | None = None
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class _Document(Struct):
    choices: list[_Choice] | None = None
    usage: _Usage | None = None
    timings: _Timings | None = None
    error: Any = None
    message: Any = None
    detail: Any = None


_DECODER = msgspec.json.Decoder(_Document)


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts as the server gives them; None where it does not."""

    input_tokens: int | None
    output_tokens: int | None
    cached_tokens: int | None


@dataclass(frozen=True, slots=True)
class Piece:
    """What one event or one whole answer says. `token_ids` counts the ids that came with it, None without any."""

    text: str
    token_ids: int | None
    finish_reason: str | None
    usage: Usage | None
    timings: Timings | None
    error: str | None


def read_piece(data: bytes) -> Piece:
    """Decode one JSON document of an answer. Raises msgspec.DecodeError when it is none."""
    document = _DECODER.decode(data)
    text, token_ids, finish = "", None, None
    for choice in document.choices or ():
        delta = choice.delta or choice.message
        text += choice.text or ""
        if delta is not None:
            text += _delta_text(delta)
        if choice.token_ids is not None:
            token_ids = (token_ids or 0) + len(choice.token_ids)
        finish = choice.finish_reason or finish
    usage, timings = document.usage, document.timings
    return Piece(
        text,
        token_ids,
        finish,
        None if usage is None else _usage(usage),
        None if timings is None else _timings(timings),
        None if document.error is None else _reason(document.error),
    )


def refusal_reason(body: bytes) -> str:
    """Why a server refused, from the body of an error answer, on one short line."""
    try:
        document = _DECODER.decode(body)
    except msgspec.DecodeError:
        return _shorten(body.decode("utf-8", "replace"))
    return _reason(document.error or document.message or document.detail or "no reason given")


def _delta_text(delta: _Delta) -> str:
    parts = [part for part in (delta.content, delta.reasoning_content, delta.refusal) if isinstance(part, str)]
    # Servers that send both names of the reasoning repeat the same text in them.
    if isinstance(delta.reasoning, str) and not isinstance(delta.reasoning_content, str):
        parts.append(delta.reasoning)
    for call in delta.tool_calls or ():
        function = call.get("function") if isinstance(call, dict) else None
        if isinstance(function, dict):
            parts += [part for name in ("name", "arguments") if isinstance(part := function.get(name), str)]
    return "".join(parts)


def _usage(usage: _Usage) -> Usage:
    details = usage.prompt_tokens_details
    inputs = usage.prompt_tokens if usage.prompt_tokens is not None else usage.total_tokens
    return Usage(inputs, usage.completion_tokens, None if details is None else details.cached_tokens)


def _timings(timings: _Timings) -> Timings:
    return Timings(
        queue_s=timings.queue_ms / 1e3,
        prefill_s=timings.prompt_ms / 1e3,
        decode_s=timings.predicted_ms / 1e3,
        preemptions=timings.preemptions,
    )


def _reason(error: Any) -> str:
    if isinstance(error, dict):
        error = error.get("message") or error.get("error") or error
    return _shorten(str(error))


def _shorten(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}..."
