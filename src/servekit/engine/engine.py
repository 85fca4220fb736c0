"""Engine: the async facade over the engine thread. It must not know HTTP, and it computes nothing itself."""

import asyncio
import contextlib
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from servekit.engine.core.embed_queue import EmbedRequest
from servekit.engine.core.prefix_history import PrefixExplanation, PrefixHistory
from servekit.engine.core.preview import Preview
from servekit.engine.core.request import GrammarSpec, Request, Update
from servekit.engine.core.scheduler import Scheduler
from servekit.engine.embed_work import EmbedStats, EmbedUpdate, EmbedWork
from servekit.engine.embedder import Embedder
from servekit.engine.generation import Generation
from servekit.engine.grammar import Grammars
from servekit.engine.loop import (
    Abort,
    AbortEmbedding,
    Add,
    AddEmbedding,
    EngineLoop,
    Examine,
    Inspect,
    SlotState,
    Stop,
)
from servekit.engine.output import SamplingDefaults
from servekit.engine.step import Runner
from servekit.engine.text.tokenizer import Tokenizer
from servekit.engine.text.tool_format import ToolFormat
from servekit.errors import ContextLengthError, InputError, OverloadedError, UnavailableError, UnsupportedError

T = TypeVar("T")

COMPILE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class EngineStats:
    """How full the engine is, as of the end of its last step; those from `preemptions` on count from the start.

    `open` requests are in the engine's hands, running, waiting or on their way. Seconds: `model_seconds` were spent in
    the model, `step_seconds` in whole steps; recent steps took `decode_step_seconds` without a prompt, and with one
    `prefill_token_seconds` a token (0 before the first). `last_step_age` is how long the engine thread has not come by,
    None while nothing is open. The `graph`s are those of GraphStats.
    """

    open: int
    running: int
    waiting: int
    live_blocks: int
    cached_blocks: int
    free_blocks: int
    usable_blocks: int
    preemptions: int
    prefix_query_tokens: int
    prefix_hit_tokens: int
    steps: int
    batched_tokens: int
    model_seconds: float
    step_seconds: float
    decode_step_seconds: float = 0.0
    prefill_token_seconds: float = 0.0
    last_step_age: float | None = None
    graphs: int = 0
    graph_bytes: int = 0
    graph_captures: int = 0
    graph_capture_seconds: float = 0.0
    graph_replays: int = 0
    graph_warm_ups: int = 0
    graph_eager_steps: int = 0
    graph_failures: int = 0
    graph_evictions: int = 0


class Engine:
    """Requests in, text out. All methods but `__init__` belong to the event loop that called `start()`.

    `vocab_size` is the model's (logits), which may be larger than the tokenizer's.
    """

    def __init__(
        self,
        *,
        model_name: str,
        scheduler: Scheduler,
        runner: Runner,
        tokenizer: Tokenizer,
        vocab_size: int,
        max_model_len: int,
        defaults: SamplingDefaults,
        queue_limit: int,
        grammars: Grammars | None = None,
        can_generate: bool = True,
        embedder: Embedder | None = None,
    ) -> None:
        self.model_name = model_name
        self.tokenizer = tokenizer
        self.vocab_size = vocab_size
        self.max_model_len = max_model_len
        self.defaults = defaults
        self._scheduler = scheduler
        self._queue_limit = queue_limit
        self._grammars = grammars
        self._history = PrefixHistory(scheduler.config.block_size)
        self._generations: dict[str, Generation] = {}
        self.can_generate = can_generate
        self.embedder = embedder
        work = None
        if embedder is not None:
            work = EmbedWork(embedder.runner, scheduler.config.max_num_batched_tokens, self._deliver_embeddings)
            embedder.connect(self._submit_embedding, self._abort_embedding)
        self._loop = EngineLoop(scheduler, runner, self._deliver, self._died, work)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._inspections: set[asyncio.Future[Any]] = set()
        self._busy_since = 0.0
        self._idle = asyncio.Event()
        self._idle.set()
        self._draining = False
        self._death: BaseException | None = None

    @property
    def max_open(self) -> int:
        """The most requests that can be in the engine's hands: running and waiting."""
        return self._scheduler.config.max_num_seqs + self._queue_limit

    def start(self) -> None:
        """Start the engine thread; call it on the event loop that will use the engine."""
        self._event_loop = asyncio.get_running_loop()
        self._loop.start()

    @property
    def is_alive(self) -> bool:
        """Whether requests are still being computed."""
        return self._death is None and self._loop.is_alive

    def generate(self, request: Request) -> Generation:
        """Admit a request and return its answer as it is made.

        Raises InputError and its kinds for a request that can never run, OverloadedError when the waiting line is
        full, UnavailableError when the engine is stopping or dead; all before anything was computed.
        """
        self._check_open()
        if not self.can_generate:
            raise UnsupportedError("this server embeds texts and writes none", param="model")
        self._check(request)
        if request.sampling.seed is None and not request.sampling.is_greedy:
            request = replace(request, sampling=replace(request.sampling, seed=secrets.randbits(63)))
        if request.sampling.grammar is not None:
            self._ready_grammars(request.sampling.grammar).hold(request.sampling.grammar)
        detokenizer = self.tokenizer.detokenizer(
            continues_text=request.continues_text, shows_control=request.shows_control
        )
        generation = Generation(request, detokenizer, self._abort)
        if not self._generations:
            self._busy_since = time.monotonic()
        self._generations[request.request_id] = generation
        self._idle.clear()
        self._history.record(request.prompt_token_ids, request.cache_salt)
        self._loop.send(Add(request))
        return generation

    def _check_open(self) -> None:
        if self._draining:
            raise UnavailableError("the server is shutting down")
        if not self.is_alive:
            raise UnavailableError("the engine has stopped")

    async def encode_text(self, text: str, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        """Token ids of a raw prompt, made in a worker thread. Raises ContextLengthError as encode_chat does."""
        self._refuse_oversized(text, "prompt")
        return tuple(await asyncio.to_thread(self.tokenizer.encode, text, add_special_tokens))

    @property
    def tool_format(self) -> ToolFormat | None:
        """How the model spells calls of functions, if it knows them."""
        return self.tokenizer.tool_format

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> tuple[int, ...]:
        """Token ids of a conversation through the model's chat template, made in a worker thread.

        Raises ContextLengthError at once for a text that no tokenization could make fit.
        """
        self._refuse_oversized("".join(str(message.get("content") or "") for message in messages), "messages")
        return tuple(await asyncio.to_thread(self.tokenizer.encode_chat, messages, tools))

    async def compile_grammar(self, spec: GrammarSpec) -> None:
        """Make a grammar ready in a worker thread, so that neither `generate` nor a step waits for it.

        Raises InputError and UnsupportedError as `Grammars.compile` does, and InputError when it takes too long.
        """
        work = asyncio.to_thread(self._ready_grammars(spec).compile, spec)
        try:
            await asyncio.wait_for(work, COMPILE_SECONDS)
        except TimeoutError:
            raise InputError(f"{spec.param}: it took over {COMPILE_SECONDS} s to prepare", param=spec.param) from None

    def _ready_grammars(self, spec: GrammarSpec) -> Grammars:
        if self._grammars is None:
            raise UnsupportedError("this engine cannot follow a grammar", param=spec.param)
        return self._grammars

    def stats(self) -> EngineStats:
        """Numbers as of the end of the last step."""
        loop = self._loop.stats()
        scheduler = loop.scheduler
        return EngineStats(
            open=len(self._generations) + (self.embedder.num_open if self.embedder is not None else 0),
            running=scheduler.num_running,
            waiting=scheduler.num_waiting,
            live_blocks=scheduler.num_live_blocks,
            cached_blocks=scheduler.num_cached_blocks,
            free_blocks=scheduler.num_free_blocks,
            usable_blocks=scheduler.num_usable_blocks,
            preemptions=scheduler.num_preemptions,
            prefix_query_tokens=scheduler.num_prefix_query_tokens,
            prefix_hit_tokens=scheduler.num_prefix_hit_tokens,
            steps=loop.num_steps,
            batched_tokens=loop.num_batched_tokens,
            model_seconds=loop.model_seconds,
            step_seconds=loop.step_seconds,
            decode_step_seconds=loop.decode_step_seconds,
            prefill_token_seconds=loop.prefill_token_seconds,
            last_step_age=self._last_step_age(),
            graphs=loop.graphs.graphs,
            graph_bytes=loop.graphs.bytes,
            graph_captures=loop.graphs.captures,
            graph_capture_seconds=loop.graphs.capture_seconds,
            graph_replays=loop.graphs.replays,
            graph_warm_ups=loop.graphs.warm_ups,
            graph_eager_steps=loop.graphs.eager,
            graph_failures=loop.graphs.failures,
            graph_evictions=loop.graphs.evictions,
        )

    def _last_step_age(self) -> float | None:
        if not self._generations:
            return None
        return max(0.0, time.monotonic() - max(self._loop.last_turn, self._busy_since))

    def embed_stats(self) -> EmbedStats:
        """Numbers of the embedding half, as of the end of the last step."""
        return self._loop.embed_stats()

    async def slots(self) -> list[SlotState]:
        """Every running sequence, as it stands between two steps. Raises UnavailableError when the engine has died."""
        return await self._inquire(Inspect)

    async def preview(self, request: Request) -> Preview:
        """What the request would meet if it came now. Raises as `generate` for one that can never run."""
        self._check_ids(request)
        self._scheduler.check(request)
        return await self._inquire(lambda answer: Examine(request, answer))

    async def explain_cache(self, request: Request, visible: str) -> PrefixExplanation:
        """Why the prefix cache holds as much of the request's prompt as it does now. Raises as `preview`.

        Only prompts whose salt begins with `visible` are spoken of.
        """
        preview = await self.preview(request)
        return self._history.explain(request.prompt_token_ids, request.cache_salt, preview.num_cached_tokens, visible)

    async def _inquire(self, message_with: Callable[[Callable[[T], object]], Inspect | Examine]) -> T:
        """Send a message that asks something, and wait for what the engine thread answers."""
        if not self.is_alive:
            raise UnavailableError("the engine has stopped")
        loop = asyncio.get_running_loop()
        future: asyncio.Future[T] = loop.create_future()
        self._inspections.add(future)
        future.add_done_callback(self._inspections.discard)

        def settle(value: T) -> None:
            if not future.done():
                future.set_result(value)

        self._loop.send(message_with(lambda value: loop.call_soon_threadsafe(settle, value)))
        return await future

    async def close(self, grace: float = 0.0) -> None:
        """Refuse new requests, give the running ones `grace` seconds, then end the thread."""
        self._draining = True
        if grace > 0 and not self._is_idle and self.is_alive:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._idle.wait(), grace)
        if self.embedder is not None:
            self.embedder.fail_all(UnavailableError("the server is shutting down"))
        for generation in list(self._generations.values()):
            generation.fail("the server is shutting down")
        self._loop.send(Stop())
        await asyncio.to_thread(self._loop.join)
        self._end_inspections()

    def _end_inspections(self) -> None:
        for future in list(self._inspections):
            if not future.done():
                future.set_exception(UnavailableError("the engine has stopped"))

    def _refuse_oversized(self, text: str, param: str) -> None:
        """A token stands for so many characters at most, so megabytes need no tokenizing to be known as too long."""
        least = len(text) // self.tokenizer.max_token_chars
        if least >= self.max_model_len:
            raise ContextLengthError(least, self.max_model_len, param=param, at_least=True)

    def _check(self, request: Request) -> None:
        self._check_ids(request)
        if request.request_id in self._generations:
            raise InputError(f"the request id {request.request_id!r} is in use", param="request_id")
        self._scheduler.check(request)
        if len(self._generations) >= self.max_open:
            raise OverloadedError(f"{self._queue_limit} requests are waiting, the most that --queue-limit allows")

    def _check_ids(self, request: Request) -> None:
        if not request.prompt_token_ids:
            raise InputError("the prompt is empty", param="prompt")
        if min(request.prompt_token_ids) < 0 or max(request.prompt_token_ids) >= self.vocab_size:
            raise InputError(f"the prompt has a token id outside 0 to {self.vocab_size - 1}", param="prompt")
        for name, ids in (
            ("logit_bias", request.sampling.logit_bias),
            ("stop_token_ids", request.sampling.stop_token_ids),
        ):
            outside = next((i for i in ids if not 0 <= i < self.vocab_size), None)
            if outside is not None:
                raise InputError(f"{name}: token id {outside} is outside 0 to {self.vocab_size - 1}", param=name)

    def _abort(self, request_id: str) -> None:
        self._forget(request_id)
        self._loop.send(Abort(request_id))

    def _forget(self, request_id: str) -> None:
        generation = self._generations.pop(request_id, None)
        if generation is not None and self._grammars is not None and generation.request.sampling.grammar is not None:
            self._grammars.release(generation.request.sampling.grammar)
        self._note_idle()

    @property
    def _is_idle(self) -> bool:
        return not self._generations and (self.embedder is None or not self.embedder.num_open)

    def _note_idle(self) -> None:
        if self._is_idle:
            self._idle.set()

    def _submit_embedding(self, request: EmbedRequest) -> None:
        self._check_open()
        self._idle.clear()
        self._loop.send(AddEmbedding(request))

    def _abort_embedding(self, request_id: str) -> None:
        self._note_idle()
        self._loop.send(AbortEmbedding(request_id))

    def _deliver_embeddings(self, updates: list[EmbedUpdate]) -> None:
        """Engine thread: one wake-up of the event loop for a whole step."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._dispatch_embeddings, updates)

    def _dispatch_embeddings(self, updates: list[EmbedUpdate]) -> None:
        assert self.embedder is not None
        self.embedder.take(updates)
        self._note_idle()

    def _deliver(self, updates: list[Update]) -> None:
        """Engine thread: one wake-up of the event loop for a whole step."""
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._dispatch, updates)

    def _dispatch(self, updates: list[Update]) -> None:
        for update in updates:
            generation = self._generations.get(update.request_id)
            if generation is None:
                continue
            generation.push(update)
            if generation.finished:
                self._forget(update.request_id)

    def _died(self, error: BaseException) -> None:
        if self._event_loop is not None and not self._event_loop.is_closed():
            self._event_loop.call_soon_threadsafe(self._bury, error)

    def _bury(self, error: BaseException) -> None:
        self._death = error
        self._end_inspections()
        if self.embedder is not None:
            self.embedder.fail_all(UnavailableError("the engine has stopped"))
        for generation in list(self._generations.values()):
            generation.fail("the engine has stopped")
            self._forget(generation.request.request_id)
