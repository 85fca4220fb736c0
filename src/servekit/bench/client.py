"""One request, measured: what was sent when, and what came back when. It must not know why it is sent."""

import asyncio
import time
from dataclasses import dataclass

from servekit.bench.connection import Address, Pool
from servekit.bench.reader import AnswerReader, round_time
from servekit.bench.result import Record
from servekit.bench.tokens import CountTokens, estimate_tokens


@dataclass(frozen=True, slots=True)
class Planned:
    """One request to be sent `scheduled_s` seconds after the start; `asked_tokens` is the output length asked for."""

    index: int
    path: str
    body: bytes
    scheduled_s: float = 0.0
    asked_tokens: int | None = None


class Client:
    """Sends planned requests to one server.

    `timeout` is in seconds from the send to the end. Without a usage in the answer, tokens are counted by
    `count_tokens` and marked as estimated.
    """

    def __init__(
        self,
        address: Address,
        *,
        api_key: str | None = None,
        timeout: float = 600.0,
        count_tokens: CountTokens = estimate_tokens,
    ) -> None:
        self.address = address
        self._pool = Pool(address, api_key=api_key)
        self._timeout = timeout
        self._count_tokens = count_tokens

    @property
    def reused_connections(self) -> int:
        """Requests that went over a kept connection."""
        return self._pool.reused

    async def send(self, planned: Planned, zero: float) -> Record:
        """The record of one request, failed or not; `zero` is the run's start on `time.perf_counter`."""
        record = Record(
            index=planned.index, scheduled_s=round_time(planned.scheduled_s), asked_tokens=planned.asked_tokens
        )
        reader = AnswerReader()
        record.sent_s = round_time(time.perf_counter() - zero)
        try:
            async with asyncio.timeout(self._timeout):
                await self._pool.exchange("POST", planned.path, planned.body, reader)
        except TimeoutError:
            record.error = f"no end after {self._timeout:g} s"
        except OSError as error:
            record.error = str(error) or type(error).__name__
        # The last byte ends a whole answer; one that broke ends when that was known.
        last = reader.end if record.error is None else None
        record.end_s = round_time((time.perf_counter() if last is None else last) - zero)
        reader.fill(record, zero, self._count_tokens)
        return record

    async def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of a GET. Raises OSError, TimeoutError among them."""
        collector = _Collector()
        async with asyncio.timeout(min(self._timeout, 30.0)):
            await self._pool.exchange("GET", path, b"", collector)
        return collector.status, b"".join(collector.pieces)

    async def post(self, path: str, body: bytes) -> tuple[int, bytes]:
        """Status and body of a POST that is not measured. Raises OSError, TimeoutError among them."""
        collector = _Collector()
        async with asyncio.timeout(self._timeout):
            await self._pool.exchange("POST", path, body, collector)
        return collector.status, b"".join(collector.pieces)

    def close(self) -> None:
        """Close the idle connections."""
        self._pool.close()


class _Collector:
    """A receiver that only keeps."""

    def __init__(self) -> None:
        self.status = 0
        self.pieces: list[bytes] = []

    def on_head(self, status: int, content_type: str) -> None:
        self.status = status

    def on_piece(self, time: float, piece: bytes) -> None:
        self.pieces.append(piece)
