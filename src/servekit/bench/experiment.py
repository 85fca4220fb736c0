"""One experiment against one server: settings in, runs out. It ties the parts together and computes nothing itself.

Order: identify the server, find out by small requests which fields it refuses and warm it up, then for every rate or
concurrency and every repeat: plan, load, measure, audit, name the limit.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Protocol

from servekit.bench.arrivals import arrival_times, limited, stretched
from servekit.bench.audit import audit
from servekit.bench.bodies import OPTIONAL_FIELDS, BodyMaker
from servekit.bench.client import Client, Planned
from servekit.bench.limit import name_limit
from servekit.bench.load import Progress, closed_loop, open_loop
from servekit.bench.measure import measure
from servekit.bench.probe import Sampler, bounds, identify
from servekit.bench.remarks import remarks
from servekit.bench.result import Record, Run, Target
from servekit.bench.workload import PromptSource, output_lengths
from servekit.errors import InputError, NotFoundError, ServekitError, UnavailableError

_WARMUP_REPEAT = -1
_PROBE_TOKENS = 2


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked of a server. `trace` are arrival times for the arrival `trace`; durations are in seconds.

    A trace without a rate keeps its own times. `requests` and `duration` bound one run; at least one of them is set,
    unless a trace is.
    """

    prompts: PromptSource
    outputs: tuple[int, ...]
    endpoint: str = "chat"
    arrival: str = "poisson"
    burstiness: float = 1.0
    trace: tuple[float, ...] = ()
    requests: int | None = None
    duration: float | None = None
    seed: int = 0
    warmup: int = 2
    slo: Mapping[str, float] = field(default_factory=dict)
    no_cache: bool = False
    max_in_flight: int | None = None
    temperature: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict)

    def schedule(self, rate: float | None, repeat: int) -> list[float]:
        """The arrival times of one run."""
        if self.arrival == "trace":
            trace = self.trace if rate is None else stretched(self.trace, rate)
            return limited(iter(trace), requests=self.requests or len(trace), duration=self.duration)
        assert rate is not None
        times = arrival_times(self.arrival, rate, seed=self.seed, repeat=repeat, burstiness=self.burstiness)
        return limited(times, requests=self.requests, duration=self.duration)


class Watcher(Protocol):
    """Who is told of a run before it starts; the progress moves until `on_end`."""

    def on_start(self, label: str, progress: Progress) -> None: ...

    def on_end(self, run: Run) -> None: ...


class Experiment:
    """Runs points against one server. Make it with `begin`."""

    def __init__(self, client: Client, target: Target, settings: Settings, watcher: Watcher) -> None:
        self.target = target
        self._client = client
        self._settings = settings
        self._watcher = watcher
        self._bodies = BodyMaker(
            settings.endpoint,
            target.model or "",
            target.kind,
            temperature=settings.temperature,
            is_salted=settings.no_cache,
            extra=settings.extra,
        )

    @classmethod
    async def begin(cls, client: Client, model: str | None, settings: Settings, watcher: Watcher) -> "Experiment":
        """Identify the server and warm it up. Raises ServekitError when it cannot be measured so."""
        experiment = cls(client, await identify(client, model), settings, watcher)
        await experiment._warm_up()
        return experiment

    async def run(self, *, rate: float | None = None, concurrency: int | None = None, repeat: int = 0) -> Run:
        """One point, once: an open loop at `rate`, or a closed loop of `concurrency` clients."""
        settings, progress = self._settings, Progress()
        label = f"{concurrency} clients" if concurrency else f"{rate:g}/s" if rate else "trace"
        self._watcher.on_start(f"{label}, repeat {repeat + 1}" if repeat else label, progress)
        planned = self._plan(rate, concurrency, repeat)
        async with Sampler(self._client, self.target.kind) as sampler:
            if concurrency is not None:
                trace = await closed_loop(
                    self._client,
                    planned,
                    concurrency=concurrency,
                    requests=settings.requests,
                    duration=settings.duration,
                    progress=progress,
                )
            else:
                trace = await open_loop(
                    self._client, list(planned), max_in_flight=settings.max_in_flight, progress=progress
                )
        run = measure(
            trace.records,
            rate=rate,
            concurrency=concurrency,
            arrival="closed" if concurrency is not None else settings.arrival,
            repeat=repeat,
            slo=settings.slo,
            seed=settings.seed,
        )
        run.audit, run.invalid_reasons = audit(
            trace, arrival=run.arrival, is_open=concurrency is None, max_in_flight=settings.max_in_flight
        )
        run.valid = not run.invalid_reasons
        run.server = sampler.changes()
        run.limit = name_limit(run, sampler.samples, bounds(self.target))
        run.notes = remarks(run, self._settings.no_cache, self._settings.max_in_flight, self._bodies.left_out)
        self._watcher.on_end(run)
        return run

    async def sweep(self, points: Sequence[tuple[float | None, int | None]], repeats: int) -> list[Run]:
        """Every (rate, concurrency), each `repeats` times."""
        return [
            await self.run(rate=rate, concurrency=concurrency, repeat=repeat)
            for rate, concurrency in points
            for repeat in range(repeats)
        ]

    def _plan(self, rate: float | None, concurrency: int | None, repeat: int) -> Iterator[Planned]:
        settings, bodies = self._settings, self._bodies
        prompts = settings.prompts.prompts(settings.seed, repeat, f"{concurrency or rate}")
        lengths = output_lengths(settings.outputs, settings.seed, repeat)
        # A closed loop has no schedule; it takes as many as it needs.
        schedule = settings.schedule(rate, repeat) if concurrency is None else None
        for index in count():
            if schedule is not None and index == len(schedule):
                return
            length = next(lengths)
            yield Planned(
                index,
                bodies.path,
                bodies.make(prompts, length),
                scheduled_s=schedule[index] if schedule is not None else 0.0,
                asked_tokens=length if bodies.generates else None,
            )

    async def _warm_up(self) -> None:
        """Requests one after the other, salted so that no later prompt finds itself cached.

        The first finds the fields that the server refuses, also when no warm-up is asked for.
        """
        settings, bodies = self._settings, self._bodies
        was_salted, bodies.is_salted = bodies.is_salted, True
        prompts = settings.prompts.prompts(settings.seed, _WARMUP_REPEAT, "warmup")
        lengths = output_lengths(settings.outputs, settings.seed, _WARMUP_REPEAT)
        progress = Progress(total=max(1, settings.warmup))
        self._watcher.on_start("warm-up", progress)
        for index in range(max(1, settings.warmup)):
            tokens = next(lengths) if settings.warmup else _PROBE_TOKENS
            record = await self._client.send(Planned(index, bodies.path, bodies.make(prompts, tokens)), 0.0)
            while not record.ok and (refused := self._refused_field(record)):
                bodies.left_out.add(refused)
                record = await self._client.send(Planned(index, bodies.path, bodies.make(prompts, tokens)), 0.0)
            if not record.ok:
                raise self._cannot_measure(record)
            progress.done += 1
            progress.on_change()
        bodies.is_salted = was_salted

    def _refused_field(self, record: Record) -> str | None:
        """The optional field that the answer blames."""
        if record.status not in (400, 422):
            return None
        candidates = (name for name in OPTIONAL_FIELDS if name not in self._bodies.left_out)
        return next((name for name in candidates if name in (record.error or "")), None)

    def _cannot_measure(self, record: Record) -> ServekitError:
        where, why = f"{self.target.url}{self._bodies.path}", record.error
        if record.status in (404, 405, 501):
            return NotFoundError(f"{where} is not served: {why}", hint="try another --endpoint or --model")
        if record.status in (401, 403):
            return InputError(f"{where} refuses the key: {why}", hint="give it with --api-key", param="api-key")
        if record.status is not None and 400 <= record.status < 500 and record.status != 429:
            return InputError(f"{where} refused the first request: {why}", param="url")
        return UnavailableError(f"{where} failed on the first request: {why}")
