"""One API request in the engine's hands: its choices, what they have cost, and their end.

It must not know what an answer looks like.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Self

from anyio import CancelScope

from servekit.engine.core.request import FinishReason, Request, RequestTimings, TokenLogprob
from servekit.engine.output import Chunk, Usage
from servekit.errors import EngineError, ServekitError, UnavailableError
from servekit.server.counts import longest_timings, total_usage
from servekit.server.errors import RequestTimeoutError
from servekit.server.state import Generation, ServerState


@dataclass(slots=True)
class CollectedChoice:
    """A whole choice, for an answer that is not streamed."""

    text: str
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprob, ...]
    last: Chunk


class Call:
    """The choices of one API request. Whoever made it must `close` it; that aborts what has not ended."""

    def __init__(self, state: ServerState, requests: Sequence[Request], choices_per_prompt: int) -> None:
        self._state = state
        self._requests = requests
        self._choices_per_prompt = choices_per_prompt
        self._generations: list[Generation] = []
        self._usages = [Usage(len(request.prompt_token_ids)) for request in requests]
        self._timings: list[RequestTimings | None] = [None] * len(requests)
        self._last_token_at: list[float | None] = [None] * len(requests)
        self._num_finished = 0
        self._timed_out = False
        self._timer: asyncio.TimerHandle | None = None

    @classmethod
    async def admit(cls, state: ServerState, requests: Sequence[Request], choices_per_prompt: int) -> Self:
        """Hand all requests to the engine, or none. The requests of one prompt follow each other.

        Raises what `EngineFacade.generate` and `ServerState.ready_engine` raise, with nothing left running.
        """
        call = cls(state, requests, choices_per_prompt)
        engine = state.ready_engine()
        try:
            for request in requests:
                call._generations.append(engine.generate(request))
            call._set_timer(state.request_timeout)
        except BaseException:
            await call.close()
            raise
        return call

    @property
    def num_choices(self) -> int:
        """How many answers this call makes."""
        return len(self._requests)

    @property
    def usage(self) -> Usage:
        """Tokens of the whole call so far."""
        return total_usage(self._usages, self._choices_per_prompt)

    @property
    def timings(self) -> RequestTimings | None:
        """Times of the whole call, once a choice has ended."""
        known = [timings for timings in self._timings if timings is not None]
        return longest_timings(known) if known else None

    async def chunks(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        """Every choice's chunks, as they come, with the choice's index.

        Raises EngineError for a choice that failed, UnavailableError when the engine ended under it,
        RequestTimeoutError when its time was over.
        """
        async with aclosing(self._arrivals()) as arrivals:
            async for index, chunk in arrivals:
                self._usages[index] = chunk.usage
                self._measure(index, chunk)
                if chunk.finish_reason is not None:
                    self._timings[index] = chunk.timings
                    if chunk.finish_reason in (FinishReason.ERROR, FinishReason.ABORT):
                        raise self._failure(chunk)
                    self._num_finished += 1
                yield index, chunk
        if self._num_finished < self.num_choices:
            raise EngineError("an answer ended without a reason")

    def _measure(self, index: int, chunk: Chunk) -> None:
        metrics, now, arrival = self._state.metrics, time.monotonic(), self._requests[index].arrival_time
        last = self._last_token_at[index]
        if chunk.token_ids:
            if last is None:
                metrics.first_token(now - arrival)
            else:
                metrics.next_tokens(now - last, len(chunk.token_ids))
            self._last_token_at[index] = now
        if chunk.finish_reason is not None:
            metrics.finished(chunk.finish_reason, chunk.usage, chunk.timings, now - arrival)

    async def collect(self) -> list[CollectedChoice]:
        """All choices, whole. Raises as `chunks` does."""
        parts: list[list[Chunk]] = [[] for _ in self._requests]
        async with aclosing(self.chunks()) as arrivals:
            async for index, chunk in arrivals:
                parts[index].append(chunk)
        return [
            CollectedChoice(
                text="".join(chunk.text for chunk in chunks),
                token_ids=tuple(token_id for chunk in chunks for token_id in chunk.token_ids),
                logprobs=tuple(logprob for chunk in chunks for logprob in chunk.logprobs),
                last=chunks[-1],
            )
            for chunks in parts
        ]

    async def close(self) -> None:
        """Abort what has not ended, also when the task that calls this is being cancelled."""
        with CancelScope(shield=True):
            if self._timer is not None:
                self._timer.cancel()
            for generation in self._generations:
                await generation.aclose()

    def _set_timer(self, timeout: float | None) -> None:
        """The time of a request runs from its arrival; waiting in line is part of it."""
        if timeout is not None and self._requests:
            left = self._requests[0].arrival_time + timeout - time.monotonic()
            self._timer = asyncio.get_running_loop().call_later(max(0.0, left), self._expire, timeout)

    def _expire(self, timeout: float) -> None:
        self._timed_out = True
        for generation in self._generations:
            generation.expire(f"the answer took longer than {timeout:g} seconds")

    def _failure(self, chunk: Chunk) -> ServekitError:
        if self._timed_out:
            return RequestTimeoutError(chunk.error or "the answer took too long", hint="see --request-timeout")
        message = chunk.error or "the request was ended by the server"
        return EngineError(message) if self._state.status == "ok" else UnavailableError(message)

    async def _arrivals(self) -> AsyncGenerator[tuple[int, Chunk], None]:
        if len(self._generations) == 1:
            async for chunk in self._generations[0]:
                yield 0, chunk
            return
        queue: asyncio.Queue[tuple[int, Chunk | Exception | None]] = asyncio.Queue()
        pumps = [asyncio.create_task(_pump(i, generation, queue)) for i, generation in enumerate(self._generations)]
        try:
            num_open = len(pumps)
            while num_open:
                index, item = await queue.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, Exception):
                    raise item
                else:
                    yield index, item
        finally:
            for pump in pumps:
                pump.cancel()
            with CancelScope(shield=True):
                await asyncio.gather(*pumps, return_exceptions=True)


async def _pump(index: int, generation: Generation, queue: asyncio.Queue[tuple[int, Chunk | Exception | None]]) -> None:
    """Move one choice's chunks into the common queue. It holds at most what the choice's `max_tokens` allows."""
    try:
        async for chunk in generation:
            queue.put_nowait((index, chunk))
    except Exception as error:
        queue.put_nowait((index, error))
    else:
        queue.put_nowait((index, None))
