"""Puts load on a server: an open loop that follows a schedule whatever happens, or a closed loop of waiting clients.

It returns what happened, record by record, and what the generator saw of itself. It must not know metrics.
"""

import asyncio
import contextlib
import gc
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from servekit.bench.client import Client, Planned
from servekit.bench.pacer import Pacer
from servekit.bench.result import Record

_HEAD_START_S = 0.05
_LAG_INTERVAL_S = 0.1
_SWITCH_INTERVAL_S = 0.0005

T = TypeVar("T")


@dataclass(slots=True)
class Progress:
    """How far a run is; `on_change` is called whenever it moves."""

    total: int | None = None
    sent: int = 0
    done: int = 0
    failed: int = 0
    output_tokens: int = 0
    on_change: Callable[[], None] = lambda: None


@dataclass(slots=True)
class Trace:
    """What a run left: the records in the order of their schedule, and the generator's view of itself.

    `loop_lags` are seconds by which the event loop was late, `cpu_s` the processor time of the generator, `wall_s` how
    long it ran.
    """

    records: list[Record]
    loop_lags: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    wall_s: float = 0.0
    reused_connections: int = 0


def run_on_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run a coroutine on the fastest event loop there is."""
    try:
        import uvloop
    except ImportError:
        return asyncio.run(main)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(main)


async def open_loop(
    client: Client, plan: Sequence[Planned], *, max_in_flight: int | None = None, progress: Progress | None = None
) -> Trace:
    """Send every request at its time, whatever became of the others.

    With `max_in_flight`, a request may have to wait for its turn here; its latency counts from the schedule all the
    same.
    """
    progress = progress or Progress()
    progress.total = len(plan)
    turns = asyncio.Semaphore(max_in_flight) if max_in_flight else contextlib.nullcontext()
    finished: asyncio.Future[None] = asyncio.get_running_loop().create_future()
    records: dict[int, Record] = {}
    tasks: set[asyncio.Task[None]] = set()

    async def one(position: int) -> None:
        async with turns:
            _count_sent(progress)
            records[position] = await client.send(plan[position], zero)
        _count_done(progress, records[position])
        if len(records) == len(plan):
            finished.set_result(None)

    def start(position: int) -> None:
        task = asyncio.create_task(one(position))
        tasks.add(task)
        task.add_done_callback(ended)

    def ended(task: asyncio.Task[None]) -> None:
        tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None and not finished.done():
            finished.set_exception(error)

    if not plan:
        return Trace([])
    async with _Watch(client) as watch:
        zero = time.perf_counter() + _HEAD_START_S
        try:
            with Pacer([planned.scheduled_s for planned in plan], zero, start):
                await finished
        finally:
            await _cancel(tasks)
    return watch.trace([records[position] for position in range(len(plan))])


async def closed_loop(
    client: Client,
    plan: Iterator[Planned],
    *,
    concurrency: int,
    requests: int | None,
    duration: float | None,
    progress: Progress | None = None,
) -> Trace:
    """`concurrency` clients that each send their next request when the last one has ended.

    Nothing is scheduled: a request counts as due when it is sent, so a slow server slows the load down. It ends after
    `requests`, or with the answers that are open after `duration` seconds.
    """
    progress = progress or Progress()
    progress.total = requests
    records: list[Record] = []

    async def one() -> None:
        while (requests is None or progress.sent < requests) and (
            duration is None or time.perf_counter() - zero < duration
        ):
            planned = next(plan)
            _count_sent(progress)
            due = time.perf_counter() - zero
            record = await client.send(planned, zero)
            record.scheduled_s = min(round(due, 6), record.sent_s or due)
            records.append(record)
            _count_done(progress, record)

    async with _Watch(client) as watch:
        zero = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            for _ in range(concurrency):
                group.create_task(one())
    return watch.trace(sorted(records, key=lambda record: record.index))


class _Watch:
    """Watches the generator while it runs: how late its event loop is, and how much processor time it takes."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._lags: list[float] = []
        self._reused = client.reused_connections
        self._cpu = self._wall = self._switch_interval = 0.0
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> "_Watch":
        # What was made before the run is not worth a collector's pause during it.
        gc.collect()
        gc.freeze()
        # The pacer and a progress display are threads: none of them may keep the event loop waiting for long.
        self._switch_interval = sys.getswitchinterval()
        sys.setswitchinterval(_SWITCH_INTERVAL_S)
        self._cpu, self._wall = time.process_time(), time.perf_counter()
        self._task = asyncio.create_task(self._measure())
        return self

    async def __aexit__(self, *exception: object) -> None:
        self._cpu, self._wall = time.process_time() - self._cpu, time.perf_counter() - self._wall
        gc.unfreeze()
        sys.setswitchinterval(self._switch_interval)
        if self._task is not None:
            await _cancel({self._task})

    def trace(self, records: list[Record]) -> Trace:
        """The trace, after the end."""
        return Trace(records, self._lags, self._cpu, self._wall, self._client.reused_connections - self._reused)

    async def _measure(self) -> None:
        while True:
            due = time.perf_counter() + _LAG_INTERVAL_S
            await asyncio.sleep(_LAG_INTERVAL_S)
            self._lags.append(max(0.0, time.perf_counter() - due))


async def _cancel(tasks: set[asyncio.Task[None]]) -> None:
    waiting = list(tasks)
    for task in waiting:
        task.cancel()
    await asyncio.gather(*waiting, return_exceptions=True)


def _count_sent(progress: Progress) -> None:
    progress.sent += 1
    progress.on_change()


def _count_done(progress: Progress, record: Record) -> None:
    progress.done += 1
    progress.failed += not record.ok
    progress.output_tokens += record.output_tokens or 0
    progress.on_change()
