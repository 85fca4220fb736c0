"""Generation: one choice as its caller sees it: token updates become text, and the work ends when nobody listens."""

import asyncio
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Self

from servekit.engine.core.request import FinishReason, Request, TokenLogprob, Update
from servekit.engine.output import Chunk, Usage
from servekit.engine.text.detokenizer import Detokenizer
from servekit.engine.text.stop_strings import StopStrings


class Generation:
    """An async iterator of Chunk. Leaving `async with` (or `aclose()`) before the end aborts the request.

    Belongs to one event loop; `push` is called on it with every update of the engine.
    """

    def __init__(self, request: Request, detokenizer: Detokenizer, abort: Callable[[str], None]) -> None:
        self.request = request
        self._detokenizer = detokenizer
        self._stops = StopStrings(request.sampling.stop) if request.sampling.stop else None
        self._abort = abort
        self._chunks: deque[Chunk] = deque()
        self._arrived = asyncio.Event()
        self._usage = Usage(len(request.prompt_token_ids))
        self._finished = False
        self._read_last = False

    @property
    def finished(self) -> bool:
        """Whether the last chunk is there (it may not have been read yet)."""
        return self._finished

    def push(self, update: Update) -> None:
        """Take one step's tokens. Updates that come after the end (a stop string had matched) are dropped."""
        if self._finished:
            return
        num_tokens = self._usage.completion_tokens
        # The token that matched as a stop is counted, but it is not part of the answer.
        visible = update.token_ids if update.stop_reason is None else update.token_ids[:-1]
        text = ""
        matched: str | None = None
        num_visible = 0
        for token_id in visible:
            num_visible += 1
            piece = self._detokenizer.push(token_id)
            if self._stops is None or num_tokens + num_visible <= self.request.sampling.min_tokens:
                text += piece
            elif piece:
                emit, matched = self._stops.push(piece)
                text += emit
                if matched is not None:
                    break
        if matched is not None:
            num_tokens += num_visible
            finish_reason: FinishReason | None = FinishReason.STOP
        else:
            num_tokens += len(update.token_ids)
            finish_reason = update.finish_reason
            if finish_reason is not None:
                emit, matched = self._flush()
                text += emit
                if matched is not None:
                    finish_reason = FinishReason.STOP
        self._usage = Usage(self._usage.prompt_tokens, num_tokens, update.num_cached_tokens)
        self._finished = finish_reason is not None
        if matched is not None and update.finish_reason is None:
            self._abort(self.request.request_id)
        logprobs: tuple[TokenLogprob, ...] = update.logprobs[:num_visible]
        self._put(
            Chunk(
                text,
                self._usage,
                token_ids=visible[:num_visible],
                logprobs=logprobs,
                finish_reason=finish_reason,
                stop_reason=matched if matched is not None else update.stop_reason,
                timings=update.timings if self._finished else None,
                error=update.error,
            )
        )

    def expire(self, message: str) -> None:
        """End with an error and stop the work: it has taken too long."""
        if not self._finished:
            self._abort(self.request.request_id)
            self.fail(message)

    def fail(self, message: str) -> None:
        """End with an error that is not this request's fault."""
        if not self._finished:
            self._finished = True
            self._put(Chunk("", self._usage, finish_reason=FinishReason.ERROR, error=message))

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        while not self._chunks:
            if self._read_last:
                raise StopAsyncIteration
            self._arrived.clear()
            await self._arrived.wait()
        chunk = self._chunks.popleft()
        self._read_last = chunk.finish_reason is not None
        return chunk

    async def aclose(self) -> None:
        """Stop listening; the slot and the blocks are free at the next step. Harmless after the end."""
        if not self._finished:
            self._finished = True
            self._abort(self.request.request_id)
        self._read_last = True

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

    def _flush(self) -> tuple[str, str | None]:
        """What was held back, now that nothing can complete it; the tail may itself complete a stop string."""
        tail = self._detokenizer.flush()
        if self._stops is None:
            return tail, None
        emit, matched = self._stops.push(tail) if tail else ("", None)
        return (emit, matched) if matched is not None else (emit + self._stops.flush(), self._stops.matched)

    def _put(self, chunk: Chunk) -> None:
        self._chunks.append(chunk)
        self._arrived.set()
