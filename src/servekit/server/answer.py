"""The way of one generating request: read, check, encode, admit, answer. Everything that can refuse it comes first.

It must not know the fields or the shape of either route; a plan has them.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import msgspec
from starlette.requests import Request as HttpRequest
from starlette.responses import Response

from servekit.engine.core.request import Request, SamplingParams
from servekit.errors import InputError
from servekit.server.access_log import RequestRecord, request_record
from servekit.server.body import (
    LARGE_BODY,
    check_unknown,
    decode_body,
    decode_foreign,
    ignored_header,
    read_body,
)
from servekit.server.call import Call
from servekit.server.connection import while_connected
from servekit.server.explain import explain_header
from servekit.server.gate import key_holder
from servekit.server.models import check_generates
from servekit.server.params import for_choice
from servekit.server.schema import GenerationBody
from servekit.server.shape import AnswerHead, Shape
from servekit.server.state import EngineFacade, ServerState
from servekit.server.stream import EventStream

B = TypeVar("B", bound=GenerationBody)
S = TypeVar("S", bound=msgspec.Struct)


class Plan(Protocol):
    """A validated request of one route. `prompt_param` is the field that errors about the prompt name.

    `continues_text` says that the answer reads on from the prompt, and is not a message of its own; `shows_control`,
    that its shape looks for control tokens in the text.
    """

    id_prefix: str
    prompt_param: str
    continues_text: bool
    shows_control: bool
    params: SamplingParams

    async def encode(self) -> list[tuple[int, ...]]:
        """The token ids of every prompt."""
        ...

    def shape(self, head: AnswerHead, prompts: Sequence[tuple[int, ...]], *, include_usage: bool) -> Shape:
        """How the answer to the encoded prompts is written."""
        ...


Parsed = tuple[GenerationBody, tuple[str, ...], Plan]
"""The body as this server's own, the names of fields that are ignored, and the plan."""


async def answer(request: HttpRequest, state: ServerState, parse: Callable[[bytes, EngineFacade], Parsed]) -> Response:
    """Answer one request, streamed or whole. `parse` may run in a worker thread.

    Raises ServekitError, before the first byte is sent, and ClientDisconnect when there is nobody left to answer.
    """
    engine = state.ready_engine()
    raw = await read_body(request, state.body_limit, state.read_timeout)

    # A small body is parsed faster than a thread is woken; a large one must not keep others waiting.
    is_small = len(raw) <= LARGE_BODY
    body, ignored, plan = parse(raw, engine) if is_small else await asyncio.to_thread(parse, raw, engine)
    prompts = await while_connected(request.receive, prepare(plan, engine))

    record = request_record(request)
    head = AnswerHead(f"{plan.id_prefix}{uuid.uuid4().hex}", int(time.time()), state.model_name)
    include_usage = body.stream_options is not None and bool(body.stream_options.include_usage)
    shape = plan.shape(head, prompts, include_usage=include_usage)
    headers = {"x-servekit-ignored": ignored_header(ignored)} if ignored else {}
    requests = engine_requests(body, plan, prompts, head.id, record, key_holder(request.scope))
    if explanation := await explain_header(request, engine, requests, body.n or 1):
        headers["x-servekit-cache"] = explanation
    call = await _admit(state, body, plan, requests)
    if body.stream:
        return EventStream(
            call,
            shape,
            headers=headers,
            ping_interval=state.ping_interval,
            on_end=lambda end: record.note(state.model_name, call, end),
        )
    try:
        choices = await while_connected(request.receive, call.collect())
        return Response(shape.body(call, choices), headers=headers, media_type="application/json")
    finally:
        await call.close()
        record.note(state.model_name, call)


def parse_plan(
    raw: bytes, state: ServerState, kind: type[B], plan_for: Callable[[B], Plan]
) -> tuple[B, tuple[str, ...], Plan]:
    """The typed body, the names of fields that are ignored, and the plan. Raises InputError and its kinds."""
    body, ignored = decode_body(raw, kind)
    check_generates(body.model, state)
    check_unknown(ignored, refuse=state.refuse_unknown)
    if body.stream_options is not None and not body.stream:
        raise InputError("stream_options needs stream: true", param="stream_options")
    return body, ignored, plan_for(body)


def parse_translated(
    raw: bytes,
    state: ServerState,
    kind: type[S],
    refused: Mapping[str, tuple[Any, ...]],
    translate: Callable[[S], tuple[GenerationBody, Plan]],
) -> Parsed:
    """As `parse_plan`, for a body of another API. `refused` are its fields that are not offered here."""
    foreign, ignored = decode_foreign(raw, kind, refused)
    check_unknown(ignored, refuse=state.refuse_unknown)
    body, plan = translate(foreign)
    check_generates(body.model, state)
    return body, ignored, plan


async def prepare(plan: Plan, engine: EngineFacade) -> list[tuple[int, ...]]:
    """The token ids of every prompt, after whatever else is slow and may refuse: the grammar. Raises InputError."""
    if plan.params.grammar is not None:
        await engine.compile_grammar(plan.params.grammar)
    return await plan.encode()


async def _admit(
    state: ServerState,
    body: GenerationBody,
    plan: Plan,
    requests: Sequence[Request],
) -> Call:
    check_num_choices(len(requests), state.ready_engine())
    try:
        return await Call.admit(state, requests, body.n or 1)
    except InputError as error:
        name_prompt(error, plan)
        raise


def check_num_choices(count: int, engine: EngineFacade) -> None:
    """Raise InputError for more choices than the slots and the waiting line could ever hold together."""
    if count > engine.max_open:
        raise InputError(f"{count} choices are more than the {engine.max_open} that this server holds", param="n")


def name_prompt(error: InputError, plan: Plan) -> None:
    """Let an error about a prompt name the field that the prompt came in, which the engine does not know."""
    if error.param in ("messages", "prompt"):
        error.param = plan.prompt_param


def engine_requests(
    body: GenerationBody,
    plan: Plan,
    prompts: Sequence[tuple[int, ...]],
    call_id: str,
    record: RequestRecord,
    holder: str,
) -> list[Request]:
    """One engine request for every choice of every prompt. Holders of different keys share no cached prefix."""
    num_choices = body.n or 1
    return [
        Request(
            request_id=f"{call_id}-{prompt_index * num_choices + i}",
            prompt_token_ids=prompt,
            sampling=for_choice(plan.params, i),
            arrival_time=record.arrival,
            priority=body.priority or 0,
            continues_text=plan.continues_text,
            shows_control=plan.shows_control,
            cache_salt=holder + (body.cache_salt or ""),
        )
        for prompt_index, prompt in enumerate(prompts)
        for i in range(num_choices)
    ]
