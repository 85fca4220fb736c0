"""Runs the cases of the embedding suites, in one process or in several, and measures them like any other load."""

import asyncio
import multiprocessing
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from itertools import islice

import msgspec

from servekit.bench.audit import audit
from servekit.bench.client import Client
from servekit.bench.connection import Address
from servekit.bench.embed import Case, Texts, planned
from servekit.bench.load import Progress, Trace, closed_loop, run_on_loop
from servekit.bench.measure import measure
from servekit.bench.result import Record, Run

_START_UP_S = 2.0
"""Time for the processes to start before they all begin."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Each case ends after `requests` or `seconds`, whichever comes first, and warms up with `warmup` requests."""

    requests: int
    seconds: float
    warmup: int


@dataclass(frozen=True, slots=True)
class Target:
    """The server and its model. The key is here a second time for clients in other processes."""

    client: Client
    model: str
    api_key: str | None = None


class _Result(msgspec.Struct):
    records: list[Record]
    loop_lags: list[float]
    cpu_s: float
    wall_s: float
    reused_connections: int


@dataclass(frozen=True, slots=True)
class Measured:
    """One case's run, and texts embedded a second."""

    case: Case
    run: Run

    @property
    def embeddings_per_s(self) -> float:
        """Over the answers that came whole."""
        return self.run.throughput.requests_per_s * self.case.batch


async def run_case(target: Target, case: Case, texts: Texts, limits: Limits, progress: Progress) -> Run:
    """Warm up, then load. Cases of the throughput suite use one process for each client."""
    client, model = target.client, target.model
    bodies = texts.bodies(model, case)
    for request in islice(planned(bodies), limits.warmup):
        await client.send(request, 0.0)
    if case.suite == "throughput":
        share = -(-limits.requests // case.clients)
        shares = [[next(bodies) for _ in range(share)] for _ in range(case.clients)]
        trace = await asyncio.to_thread(_in_processes, target, shares, limits.seconds)
    else:
        trace = await closed_loop(
            client,
            planned(bodies),
            concurrency=case.clients,
            requests=limits.requests,
            duration=limits.seconds,
            progress=progress,
        )
    run = measure(trace.records, concurrency=case.clients, arrival="closed")
    run.audit, run.invalid_reasons = audit(trace, arrival="closed", is_open=False, max_in_flight=None)
    run.valid = not run.invalid_reasons
    run.notes = [case.label]
    return run


async def run_cases(
    target: Target,
    cases: Sequence[Case],
    texts: Texts,
    limits: Limits,
    on_start: Callable[[str, Progress], None],
) -> list[Measured]:
    """All cases in order; `on_start` is told of each."""
    found = []
    for case in cases:
        progress = Progress()
        on_start(case.label, progress)
        found.append(Measured(case, await run_case(target, case, texts, limits, progress)))
    return found


def _in_processes(target: Target, shares: Sequence[Sequence[bytes]], seconds: float) -> Trace:
    """One client in each of several processes, all from the same moment on. The monotonic clock is the machine's."""
    begin = time.perf_counter() + _START_UP_S
    address, key = target.client.address, target.api_key
    with ProcessPoolExecutor(len(shares), mp_context=multiprocessing.get_context("spawn")) as pool:
        jobs = [pool.submit(_worker, address, key, list(share), begin, seconds) for share in shares]
        results = [msgspec.json.decode(job.result(), type=_Result) for job in jobs]
    records = sorted((record for result in results for record in result.records), key=lambda found: found.scheduled_s)
    for index, record in enumerate(records):
        record.index = index
    wall = max(result.wall_s for result in results)
    return Trace(
        records,
        loop_lags=[lag for result in results for lag in result.loop_lags],
        # The audit is of the busiest process: each has a core of its own to fill.
        cpu_s=max(result.cpu_s / result.wall_s for result in results if result.wall_s > 0) * wall,
        wall_s=wall,
        reused_connections=sum(result.reused_connections for result in results),
    )


def _worker(address: Address, api_key: str | None, bodies: list[bytes], begin: float, seconds: float) -> bytes:
    """One process: its own loop and connection. What it measured crosses the border as JSON."""

    async def main() -> _Result:
        client = Client(address, api_key=api_key)
        await asyncio.sleep(max(0.0, begin - time.perf_counter()))
        late = max(0.0, time.perf_counter() - begin)
        try:
            trace = await closed_loop(
                client, planned(iter(bodies)), concurrency=1, requests=len(bodies), duration=seconds
            )
        finally:
            client.close()
        for record in trace.records:
            record.scheduled_s += late
            record.sent_s = None if record.sent_s is None else record.sent_s + late
            record.end_s = None if record.end_s is None else record.end_s + late
        return _Result(trace.records, trace.loop_lags, trace.cpu_s, trace.wall_s, trace.reused_connections)

    return msgspec.json.encode(run_on_loop(main()))
