"""EngineLoop: the one thread that schedules and computes. It must not know text, HTTP or asyncio.

Others talk to it through an inbox of plain messages and hear from it through one `deliver` call a step, so that the
number of cross-thread wake-ups does not grow with the number of sequences.
"""

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from servekit.engine.core.embed_queue import EmbedRequest
from servekit.engine.core.preview import Preview
from servekit.engine.core.request import FinishReason, Request, SampledToken, Update
from servekit.engine.core.scheduler import ScheduledSequence, ScheduleOutput, Scheduler, SchedulerStats
from servekit.engine.core.sequence import Sequence, SequenceStatus
from servekit.engine.device.lazy import LazyResult
from servekit.engine.embed_work import EmbedStats, EmbedWork
from servekit.engine.step import GraphStats, Runner, StepTokens

log = logging.getLogger("servekit.engine")


@dataclass(frozen=True, slots=True)
class Add:
    """A request that the scheduler's `check` has admitted."""

    request: Request


@dataclass(frozen=True, slots=True)
class Abort:
    """The client has gone, or its text has matched a stop string."""

    request_id: str


@dataclass(frozen=True, slots=True)
class Stop:
    """End the thread; what is still running is finished with ABORT."""


@dataclass(frozen=True, slots=True)
class Inspect:
    """Hand the state of every slot to `answer`, on the engine thread, between two steps."""

    answer: Callable[[list["SlotState"]], object]


@dataclass(frozen=True, slots=True)
class Examine:
    """Hand what a request would meet to `answer`, on the engine thread; `check` has admitted the request."""

    request: Request
    answer: Callable[[Preview], object]


@dataclass(frozen=True, slots=True)
class AddEmbedding:
    """Texts to embed, checked and encoded."""

    request: EmbedRequest


@dataclass(frozen=True, slots=True)
class AbortEmbedding:
    """Nobody waits for these vectors any more."""

    request_id: str


Message = Add | Abort | Stop | Inspect | Examine | AddEmbedding | AbortEmbedding

_RECENT = 0.2
"""The weight of the last step in the times of recent steps."""


@dataclass(frozen=True, slots=True)
class _InFlight:
    """A step whose tokens have not been read. Seconds: `began` on the monotonic clock, `launch` inside the runner."""

    output: ScheduleOutput
    result: LazyResult[StepTokens]
    began: float
    launch: float


@dataclass(frozen=True, slots=True)
class SlotState:
    """One running sequence. Milliseconds: `prefill_ms` and `decode_ms` so far.

    `shared_blocks` of its `blocks` are in use by another sequence as well.
    """

    slot: int
    request_id: str
    state: str
    prompt_tokens: int
    cached_tokens: int
    computed_tokens: int
    output_tokens: int
    blocks: int
    shared_blocks: int
    preemptions: int
    queue_ms: float
    prefill_ms: float
    decode_ms: float


@dataclass(frozen=True, slots=True)
class LoopStats:
    """A snapshot taken between two steps. Seconds: `model_seconds` inside the runner, `step_seconds` of whole steps.

    `decode_step_seconds` is what recent steps without a prompt took, `prefill_token_seconds` what those with one took
    for a token; 0 before the first of the kind.
    """

    scheduler: SchedulerStats
    num_steps: int
    num_batched_tokens: int
    model_seconds: float
    step_seconds: float
    decode_step_seconds: float
    prefill_token_seconds: float
    graphs: GraphStats


class EngineLoop:
    """Runs `scheduler` and `runner` on its own thread and hands every step's updates to `deliver` in one call.

    Where the runner can be ahead of its device, a step is scheduled and launched before the tokens of the one before it
    are read. A sequence that turns out to have ended there has a token too many in the step behind, which is dropped.

    `deliver` is called on the engine thread; `on_death` once, if the thread ends by a fault of ours. `embeddings` get
    what each step leaves of the token budget.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        runner: Runner,
        deliver: Callable[[list[Update]], None],
        on_death: Callable[[BaseException], None],
        embeddings: EmbedWork | None = None,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._deliver = deliver
        self._on_death = on_death
        self._embeddings = embeddings
        self._in_flight: deque[_InFlight] = deque()
        self._inbox: deque[Message] = deque()
        self._wake = threading.Event()
        self._stopping = False
        self._num_steps = 0
        self._num_batched_tokens = 0
        self._model_seconds = 0.0
        self._step_seconds = 0.0
        self._decode_step_seconds = 0.0
        self._prompt_step_seconds = 0.0
        self._prompt_step_tokens = 0.0
        self._last_turn = time.monotonic()
        self._last_landed = 0.0
        self._stats = self._snapshot()
        self._thread = threading.Thread(target=self._run, name="servekit-engine", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def send(self, message: Message) -> None:
        """Put a message into the inbox, from any thread; it takes effect between two steps."""
        self._inbox.append(message)
        self._wake.set()

    def stats(self) -> LoopStats:
        """The numbers as of the end of the last step, in which everything that was delivered is counted."""
        return self._stats

    def embed_stats(self) -> EmbedStats:
        """Those of the embedding half."""
        return EmbedStats() if self._embeddings is None else self._embeddings.stats()

    @property
    def last_turn(self) -> float:
        """When the thread last came by, on the monotonic clock: before and after each step, and when it woke."""
        return self._last_turn

    @property
    def is_alive(self) -> bool:
        """Whether the thread runs."""
        return self._thread.is_alive()

    def join(self, timeout: float | None = None) -> None:
        """Wait for the thread to end after a Stop."""
        self._thread.join(timeout)

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._take_inbox()
                self._last_turn = time.monotonic()
                self._step()
                self._last_turn = time.monotonic()
                self._stats = self._snapshot()
            self._deliver(self._scheduler.finish_all(FinishReason.ABORT))
            if self._embeddings is not None:
                self._embeddings.end("the engine has stopped")
            self._stats = self._snapshot()
        except BaseException as error:  # the thread's last word: nobody above it could report this
            log.exception("the engine thread has died")
            self._on_death(error)
        finally:
            self._runner.close()
            if self._embeddings is not None:
                self._embeddings.close()

    @property
    def _has_texts(self) -> bool:
        return self._embeddings is not None and self._embeddings.has_work

    def _take_inbox(self) -> None:
        """Handle every message that is there; sleep first when there is nothing to compute."""
        if not self._inbox and not self._scheduler.has_work and not self._has_texts and not self._in_flight:
            self._wake.wait()
        self._wake.clear()
        while self._inbox:
            message = self._inbox.popleft()
            if isinstance(message, Add):
                self._scheduler.add(message.request, time.monotonic())
            elif isinstance(message, Abort):
                self._scheduler.abort(message.request_id)
            elif isinstance(message, AddEmbedding):
                assert self._embeddings is not None, "texts came to an engine without an embedding model"
                self._embeddings.add(message.request)
            elif isinstance(message, AbortEmbedding):
                assert self._embeddings is not None
                self._embeddings.abort(message.request_id)
            elif isinstance(message, Inspect):
                now = time.monotonic()
                message.answer([self._slot_state(seq, now) for seq in self._scheduler.running])
            elif isinstance(message, Examine):
                message.answer(self._scheduler.preview(message.request))
            else:
                self._stopping = True

    def _step(self) -> None:
        num_tokens = self._step_sequences()
        if self._embeddings is not None and self._embeddings.has_work:
            self._embeddings.step(num_tokens)

    def _step_sequences(self) -> int:
        """The writing half of a step; how many tokens of the budget it has taken."""
        began = time.monotonic()
        output = self._scheduler.schedule(began)
        if output.is_empty:
            if self._in_flight:
                self._land(self._in_flight.popleft())
                return 0
            deadline = self._scheduler.next_deadline()
            if deadline is not None and not self._stopping and not self._has_texts:
                self._wake.wait(max(0.0, deadline - began))
            return 0
        self._launch(output, began)
        while len(self._in_flight) > self._runner.steps_ahead:
            self._land(self._in_flight.popleft())
        return output.num_batched_tokens

    def _launch(self, output: ScheduleOutput, began: float) -> None:
        launched = time.monotonic()
        try:
            result = self._runner.step(output)
        except Exception:
            log.exception("a step with %d sequences failed; computing them one by one", len(output.scheduled))
            # What it was launched behind has to be known first: its sequences are computed from known tokens alone.
            while self._in_flight:
                self._land(self._in_flight.popleft())
            self._apply_one_by_one(output, began, launched)
            return
        self._in_flight.append(_InFlight(output, result, began, time.monotonic() - launched))
        if self._runner.steps_ahead:
            self._scheduler.launched(output)

    def _land(self, step: _InFlight) -> None:
        """Read a step's tokens and let them take effect."""
        read = time.monotonic()
        try:
            tokens = step.result.get()
        except Exception:
            log.exception("a step with %d sequences failed; computing them one by one", len(step.output.scheduled))
            self._give_up_in_flight()
            self._apply_one_by_one(step.output, step.began, read - step.launch)
            return
        now = time.monotonic()
        self._model_seconds += step.launch + now - read
        self._apply(step.output, tokens, [], step.began, now)

    def _give_up_in_flight(self) -> None:
        """Forget the steps behind a failed one, newest first: they were computed from its tokens."""
        while self._in_flight:
            self._scheduler.retract(self._in_flight.pop().output)

    def _apply(
        self, output: ScheduleOutput, tokens: StepTokens, failures: list[Update], began: float, now: float
    ) -> None:
        updates = self._scheduler.apply(output, tokens, now) + failures
        self._num_steps += 1
        self._num_batched_tokens += output.num_batched_tokens
        # Steps overlap where one is ahead of the device: its own time begins where the one before it ended.
        now = time.monotonic()
        self._record_step(output, now - max(began, self._last_landed))
        self._last_landed = now
        if updates:
            # Whoever has an answer and asks for the numbers finds it counted.
            self._stats = self._snapshot()
            self._deliver(updates)

    def _record_step(self, output: ScheduleOutput, seconds: float) -> None:
        self._step_seconds += seconds
        if output.num_batched_tokens == len(output.scheduled):
            self._decode_step_seconds = _recent(self._decode_step_seconds, seconds)
        else:
            # Apart, and divided when asked: a mean of quotients would let the shortest prompts speak for all tokens.
            self._prompt_step_seconds = _recent(self._prompt_step_seconds, seconds)
            self._prompt_step_tokens = _recent(self._prompt_step_tokens, output.num_batched_tokens)

    def _apply_one_by_one(self, output: ScheduleOutput, began: float, model_began: float) -> None:
        """Compute each sequence of a failed step alone, so that only those that really fail are lost.

        Safe to repeat: a step writes the same keys and values into the same slots. A failed sequence is aborted here,
        and so left out of what is applied, like those that have ended or lost their blocks since.
        """
        computed: list[ScheduledSequence] = []
        tokens: list[SampledToken | None] = []
        failures: list[Update] = []
        for scheduled in output.scheduled:
            if scheduled.seq.status is not SequenceStatus.RUNNING:
                continue
            alone = replace(output, scheduled=(scheduled,), num_batched_tokens=scheduled.num_new_tokens)
            try:
                tokens.append(self._runner.step(alone).get()[0])
                computed.append(scheduled)
            except Exception:
                request_id = scheduled.seq.request.request_id
                log.exception("request %s fails on its own", request_id)
                self._scheduler.abort(request_id)
                error = "the model could not compute this request"
                failures.append(Update(request_id, finish_reason=FinishReason.ERROR, error=error))
        now = time.monotonic()
        self._model_seconds += now - model_began
        num_tokens = sum(scheduled.num_new_tokens for scheduled in computed)
        applied = replace(output, scheduled=tuple(computed), num_batched_tokens=num_tokens)
        self._apply(applied, tokens, failures, began, now)

    def _slot_state(self, seq: Sequence, now: float) -> SlotState:
        assert seq.first_scheduled_time is not None, f"{seq} runs, but was never scheduled"
        first_token = seq.first_token_time
        return SlotState(
            slot=seq.slot,
            request_id=seq.request.request_id,
            state="prefill" if first_token is None else "decode",
            prompt_tokens=seq.num_prompt_tokens,
            cached_tokens=seq.num_cached_tokens,
            computed_tokens=seq.num_computed_tokens,
            output_tokens=seq.num_output_tokens,
            blocks=len(seq.block_table),
            shared_blocks=sum(self._scheduler.pool.ref_count(block_id) > 1 for block_id in seq.block_table),
            preemptions=seq.num_preemptions,
            queue_ms=1e3 * (seq.first_scheduled_time - seq.arrival_time),
            prefill_ms=1e3 * ((first_token or now) - seq.first_scheduled_time),
            decode_ms=0.0 if first_token is None else 1e3 * (now - first_token),
        )

    def _snapshot(self) -> LoopStats:
        return LoopStats(
            scheduler=self._scheduler.stats(),
            num_steps=self._num_steps,
            num_batched_tokens=self._num_batched_tokens,
            model_seconds=self._model_seconds,
            step_seconds=self._step_seconds,
            decode_step_seconds=self._decode_step_seconds,
            prefill_token_seconds=self._prompt_step_seconds / max(1.0, self._prompt_step_tokens),
            graphs=self._runner.graph_stats(),
        )


def _recent(before: float, value: float) -> float:
    """A mean in which older values fade."""
    return value if not before else before + _RECENT * (value - before)
