"""Reads one answer as it arrives, piece by piece with its time, into a record. It has no clock of its own.

A chunk counts when it shows text: roles, empty deltas, comments and usage do not.
"""

import msgspec

from servekit.bench.answers import Piece, Usage, read_piece, refusal_reason
from servekit.bench.result import Record, Timings
from servekit.bench.sse import EventSplitter
from servekit.bench.tokens import CountTokens, cumulative_tokens

_MAX_ERROR_BYTES = 64 * 1024


class AnswerReader:
    """A receiver of one exchange, streamed or whole. `end` is the time of its last piece."""

    def __init__(self) -> None:
        self._splitter: EventSplitter | None = None
        self._whole: list[bytes] = []
        self._times: list[float] = []
        self._texts: list[str] = []
        self._known: list[int | None] = []
        self._token_ids = 0
        self._has_token_ids = False
        self._usage: Usage | None = None
        self._timings: Timings | None = None
        self._finish: str | None = None
        self._is_done = False
        self._error: str | None = None
        self._status: int | None = None
        self.end: float | None = None

    def on_head(self, status: int, content_type: str) -> None:
        """Status and content type are known."""
        self._status = status
        if status == 200 and content_type.startswith("text/event-stream"):
            self._splitter = EventSplitter()

    def on_piece(self, time: float, piece: bytes) -> None:
        """A piece of the body has come."""
        self.end = time
        if self._splitter is None:
            self._whole.append(piece)
            return
        for data in self._splitter.feed(piece):
            if data == b"[DONE]":
                self._is_done = True
            elif not self._is_done:
                self._event(time, data)

    def fill(self, record: Record, zero: float, count_tokens: CountTokens) -> None:
        """Write into the record what the answer said; times count from `zero`."""
        record.status = self._status
        if self._status is not None and self._status != 200:
            body = b"".join(self._whole)[:_MAX_ERROR_BYTES]
            record.error = f"{self._status}: {refusal_reason(body)}"
            return
        if self._splitter is None and record.error is None:
            self._read_whole()
        is_whole = self._splitter is None or self._is_done or self._finish is not None
        if self._error is not None:
            record.error = self._error
        elif record.error is None and not is_whole:
            record.error = "the stream ended without [DONE] and without a finish_reason"
        record.timings, record.finish_reason = self._timings, self._finish
        self._count(record, count_tokens)
        if self._times:
            record.first_token_s = round_time(self._times[0] - zero)
            tokens = cumulative_tokens([len(text) for text in self._texts], self._known, record.output_tokens or 0)
            record.chunks = [(round_time(at - zero), count) for at, count in zip(self._times, tokens, strict=True)]

    def _count(self, record: Record, count_tokens: CountTokens) -> None:
        usage = self._usage
        if usage is not None:
            record.input_tokens, record.cached_tokens = usage.input_tokens, usage.cached_tokens
            record.output_tokens = usage.output_tokens
        if record.output_tokens is None and self._texts:
            record.output_tokens = self._token_ids if self._has_token_ids else count_tokens("".join(self._texts))
            record.estimated = not self._has_token_ids

    def _event(self, time: float, data: bytes) -> None:
        try:
            piece = read_piece(data)
        except msgspec.DecodeError as error:
            self._error = self._error or f"an event is not JSON: {error}"
            return
        self._take(piece)
        if piece.text:
            self._times.append(time)
            self._texts.append(piece.text)
            if piece.usage is not None and piece.usage.output_tokens:
                self._known.append(piece.usage.output_tokens)
            else:
                self._known.append(self._token_ids if self._has_token_ids else None)

    def _read_whole(self) -> None:
        try:
            piece = read_piece(b"".join(self._whole))
        except msgspec.DecodeError as error:
            self._error = f"the answer is not JSON: {error}"
            return
        self._take(piece)
        if piece.text and piece.usage is None:
            self._texts.append(piece.text)

    def _take(self, piece: Piece) -> None:
        if piece.token_ids is not None:
            self._token_ids += piece.token_ids
            self._has_token_ids = True
        self._usage = piece.usage or self._usage
        self._timings = piece.timings or self._timings
        self._finish = piece.finish_reason or self._finish
        self._error = self._error or piece.error


def round_time(seconds: float) -> float:
    """To the microsecond, which is more than a clock in user space can tell."""
    return round(seconds, 6)
