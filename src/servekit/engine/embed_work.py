"""EmbedWork: the embedding half of the engine thread. It must not know text, HTTP or asyncio.

The writing half goes first in every step and says how much of the token budget it has left. Whoever waits for
embeddings is not starved by that: after a few steps without room, a chunk is computed beyond the budget.
"""

import logging
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

from servekit.engine.core.embed_queue import EmbedChunk, EmbedQueue, EmbedRequest
from servekit.engine.device.lazy import LazyResult
from servekit.engine.step import EmbedRunner, FloatArray

log = logging.getLogger("servekit.engine")

MAX_STEPS_WITHOUT_ROOM = 3
"""Steps of the writing half that may pass before embeddings get a chunk regardless of the budget."""
_MAX_IN_FLIGHT = 2


@dataclass(frozen=True, slots=True)
class EmbedUpdate:
    """Vectors [n, dim] for the places `rows` of a request, or an `error` that ends it.

    Seconds: `queue` from arrival to the step, `device` of the whole step.
    """

    request_id: str
    rows: tuple[int, ...] = ()
    vectors: FloatArray | None = None
    error: str | None = None
    queue: float = 0.0
    device: float = 0.0


@dataclass(frozen=True, slots=True)
class EmbedStats:
    """Totals since the start, but `waiting`; `last_` is of the last step. Seconds are summed over chunks and steps."""

    waiting: int = 0
    steps: int = 0
    sequences: int = 0
    tokens: int = 0
    chunks: int = 0
    queue_seconds: float = 0.0
    device_seconds: float = 0.0
    last_sequences: int = 0
    last_tokens: int = 0


@dataclass(frozen=True, slots=True)
class _InFlight:
    chunks: list[EmbedChunk]
    result: LazyResult[FloatArray]
    began: float


class EmbedWork:
    """Fills steps of at most `max_tokens` from its queue, and hands each step's updates to `deliver` in one call."""

    def __init__(self, runner: EmbedRunner, max_tokens: int, deliver: Callable[[list[EmbedUpdate]], None]) -> None:
        self._runner = runner
        self._max_tokens = max_tokens
        self._deliver = deliver
        self._queue = EmbedQueue()
        self._in_flight: deque[_InFlight] = deque()
        self._steps_without_room = 0
        self._stats = EmbedStats()

    @property
    def has_work(self) -> bool:
        """Whether texts wait or results are outstanding."""
        return bool(self._queue) or bool(self._in_flight)

    def add(self, request: EmbedRequest) -> None:
        """Put a request in line."""
        self._queue.add(request)

    def abort(self, request_id: str) -> None:
        """Forget what of a request has not been computed; its updates that still come are its caller's to drop."""
        self._queue.remove(request_id)

    def stats(self) -> EmbedStats:
        """The numbers as of now, for any thread; everything that was delivered is counted."""
        return replace(self._stats, waiting=len(self._queue))

    def step(self, num_taken: int) -> None:
        """Compute the next chunk, in what the writing half, with `num_taken` tokens in this step, has left."""
        left = self._max_tokens - num_taken
        must_go = num_taken == 0 or self._steps_without_room >= MAX_STEPS_WITHOUT_ROOM
        chunks = self._queue.take(self._max_tokens if must_go else left, at_least_one=must_go)
        if chunks:
            self._steps_without_room = 0
            self._launch(chunks)
        elif self._queue:
            self._steps_without_room += 1
        # With more texts waiting one step may stay in flight, so that the device never waits for the host.
        may_stay = _MAX_IN_FLIGHT - 1 if self._queue else 0
        while self._in_flight and (len(self._in_flight) > may_stay or self._in_flight[0].result.ready()):
            self._land(self._in_flight.popleft())

    def end(self, error: str) -> None:
        """Answer what waits with `error`."""
        self._deliver([EmbedUpdate(request.request_id, error=error) for request in self._queue.take_all()])

    def close(self) -> None:
        """Free what the runner holds."""
        self._runner.close()

    def _launch(self, chunks: list[EmbedChunk]) -> None:
        began = time.monotonic()
        try:
            result = self._runner.embed([text for chunk in chunks for text in chunk.inputs])
        except Exception:
            log.exception("a step with %d embedding requests failed; computing them one by one", len(chunks))
            self._one_by_one(chunks, began)
        else:
            self._in_flight.append(_InFlight(chunks, result, began))

    def _land(self, step: _InFlight) -> None:
        try:
            vectors = step.result.get()
        except Exception:
            log.exception("the result of an embedding step was lost; computing its requests one by one")
            self._one_by_one(step.chunks, step.began)
            return
        device = time.monotonic() - step.began
        updates, first = [], 0
        for chunk in step.chunks:
            queue = step.began - chunk.request.arrival_time
            rows = vectors[first : first + len(chunk.rows)]
            first += len(chunk.rows)
            updates.append(EmbedUpdate(chunk.request.request_id, chunk.rows, rows, queue=queue, device=device))
        self._count(step.chunks, updates, device)
        self._deliver(updates)

    def _one_by_one(self, chunks: list[EmbedChunk], began: float) -> None:
        """Compute each request of a failed step alone, so that only those that really fail are lost."""
        for chunk in chunks:
            try:
                vectors = self._runner.embed(chunk.inputs).get()
            except Exception:
                log.exception("embedding request %s fails on its own", chunk.request.request_id)
                self.abort(chunk.request.request_id)
                error = "the model could not compute this request"
                self._deliver([EmbedUpdate(chunk.request.request_id, error=error)])
                continue
            device = time.monotonic() - began
            queue = began - chunk.request.arrival_time
            update = EmbedUpdate(chunk.request.request_id, chunk.rows, vectors, queue=queue, device=device)
            self._count([chunk], [update], device)
            self._deliver([update])

    def _count(self, chunks: list[EmbedChunk], updates: list[EmbedUpdate], device: float) -> None:
        texts = [text for chunk in chunks for text in chunk.inputs]
        num_tokens = sum(len(text.token_ids) for text in texts)
        stats = self._stats
        self._stats = EmbedStats(
            steps=stats.steps + 1,
            sequences=stats.sequences + len(texts),
            tokens=stats.tokens + num_tokens,
            chunks=stats.chunks + len(chunks),
            queue_seconds=stats.queue_seconds + sum(update.queue for update in updates),
            device_seconds=stats.device_seconds + device,
            last_sequences=len(texts),
            last_tokens=num_tokens,
        )
