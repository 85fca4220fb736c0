"""`/v1/preflight`: what a request would cost and when it would begin, without running it."""

import asyncio
from dataclasses import dataclass
from typing import Any

import msgspec
from starlette.requests import Request as HttpRequest

from servekit.engine.core.preview import Preview
from servekit.engine.engine import EngineStats
from servekit.errors import ContextLengthError, InputError, KvCapacityError
from servekit.server.access_log import request_record
from servekit.server.answer import Plan, check_num_choices, engine_requests, name_prompt, parse_plan, prepare
from servekit.server.body import read_body
from servekit.server.chat import ChatPlan
from servekit.server.completions import CompletionPlan
from servekit.server.connection import while_connected
from servekit.server.errors import error_fields
from servekit.server.gate import key_holder
from servekit.server.schema import ChatBody, CompletionBody
from servekit.server.state import ServerState


@dataclass(frozen=True, slots=True)
class Forecast:
    """The answer's fields, and the names of the request's fields that are ignored."""

    fields: dict[str, Any]
    ignored: tuple[str, ...]


async def preflight(request: HttpRequest, state: ServerState) -> Forecast:
    """Take any body of a generating route; one with `messages` is a chat's.

    Raises InputError for what the route itself would refuse, except a prompt that is too long: that is an answer.
    """
    engine = state.ready_engine()
    raw = await read_body(request, state.body_limit, state.read_timeout)

    def parse() -> tuple[Any, tuple[str, ...], Plan]:
        kind, plan_for = (ChatBody, ChatPlan) if _has_messages(raw) else (CompletionBody, CompletionPlan)
        return parse_plan(raw, state, kind, lambda body: plan_for(body, engine))

    body, ignored, plan = await asyncio.to_thread(parse)
    limits = {"max_model_len": engine.max_model_len, "max_open_requests": engine.max_open}
    try:
        prompts = await while_connected(request.receive, prepare(plan, engine))
    except ContextLengthError as error:
        fields = {"object": "preflight", "model": state.model_name, "fits": False, "limits": limits}
        return Forecast({**fields, "prompts": [_never(error, plan)]}, ignored)
    check_num_choices((body.n or 1) * len(prompts), engine)
    record = request_record(request)
    requests = engine_requests(_one_choice(body), plan, prompts, "preflight", record, key_holder(request.scope))
    rows = []
    for engine_request in requests:
        try:
            rows.append(_row(await engine.preview(engine_request), engine.stats()))
        except (ContextLengthError, KvCapacityError) as error:
            rows.append({"prompt_tokens": len(engine_request.prompt_token_ids), **_never(error, plan)})
    fields = {
        "object": "preflight",
        "model": state.model_name,
        "fits": all(row["fits"] for row in rows),
        "choices": (body.n or 1) * len(rows),
        "limits": {**limits, "kv_blocks": engine.stats().usable_blocks},
        "prompts": rows,
    }
    return Forecast(fields, ignored)


def _one_choice(body: ChatBody | CompletionBody) -> ChatBody | CompletionBody:
    """All choices of one prompt are alike, so one of them is looked at."""
    return msgspec.structs.replace(body, n=1)


def _has_messages(raw: bytes) -> bool:
    try:
        document = msgspec.json.decode(raw)
    except (msgspec.DecodeError, RecursionError):
        return False
    return isinstance(document, dict) and "messages" in document


def _row(preview: Preview, stats: EngineStats) -> dict[str, Any]:
    return {
        "fits": True,
        "prompt_tokens": preview.num_prompt_tokens,
        "cached_tokens": preview.num_cached_tokens,
        "new_blocks": preview.num_new_blocks,
        "free_blocks": preview.num_free_blocks,
        "free_slots": preview.num_free_slots,
        "queue_position": preview.queue_position,
        "expected_ttft_ms": _expected_ttft_ms(preview, stats),
    }


def _expected_ttft_ms(preview: Preview, stats: EngineStats) -> float | None:
    """From the time that recent steps took; None until there have been such steps."""
    if not stats.prefill_token_seconds or (preview.num_steps_to_slot and not stats.decode_step_seconds):
        return None
    seconds = preview.num_steps_to_slot * stats.decode_step_seconds
    return round(1e3 * (seconds + preview.num_tokens_ahead * stats.prefill_token_seconds), 3)


def _never(error: InputError, plan: Plan) -> dict[str, Any]:
    name_prompt(error, plan)
    return {"fits": False, "error": error_fields(error)}
