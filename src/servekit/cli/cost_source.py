"""Where `servekit cost` gets its rates from: a number, a run file, or a server that is watched for a while."""

import hashlib
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO

from servekit.bench.analyze_table import read_input
from servekit.bench.fit import fit_step_times, limits_from
from servekit.bench.result import Run, RunFile, decode_run_file
from servekit.bench.slo import goodput
from servekit.errors import InputError, InvalidMeasurement
from servekit.kvcalc.cost import Estimate, Rate, Split, estimate


@dataclass(frozen=True, slots=True)
class MeasuredLoad:
    """One rate (or one concurrency) over its repeats. Seconds and tokens are means; None for what was not measured.

    `service_s` is how long a request holds its slot and KV blocks: without its time in the queue, where that is known.
    """

    tokens: Rate
    rate: float | None = None
    concurrency: int | None = None
    repeats: int = 1
    requests_per_s: float | None = None
    attainment: float | None = None
    ttft_p95_s: float | None = None
    service_s: float | None = None
    prompt_tokens: float | None = None
    output_tokens: float | None = None
    split: Split | None = None

    @property
    def label(self) -> str:
        """For people."""
        if self.concurrency is not None:
            return f"{self.concurrency} at once"
        return "-" if self.rate is None else f"{self.rate:g}/s"


@dataclass(frozen=True, slots=True)
class CostSource:
    """All loads, by rate. `kv_tokens` and `slots` are what the server says of itself."""

    kind: str
    name: str
    loads: tuple[MeasuredLoad, ...]
    sha256: str | None = None
    slo: Mapping[str, float] = field(default_factory=dict)
    kv_tokens: int | None = None
    slots: int | None = None
    notes: tuple[str, ...] = ()

    @property
    def busiest(self) -> MeasuredLoad:
        """The load with the highest output rate, the smaller one of nearly equal ones: more load adds only queues."""
        most = max(load.tokens.output.mean for load in self.loads)
        return next(load for load in self.loads if load.tokens.output.mean >= 0.97 * most)

    def operating_point(self, min_attainment: float) -> MeasuredLoad | None:
        """The highest load at which enough requests keep the SLO; without an SLO the busiest, None when none does."""
        if not self.slo:
            return self.busiest
        kept = [load for load in self.loads if (load.attainment or 0.0) >= min_attainment]
        return max(kept, key=lambda load: load.tokens.output.mean, default=None)


def from_number(tokens_per_second: Sequence[float]) -> CostSource:
    """One or more output rates, as repeats of the same load."""
    load = MeasuredLoad(Rate(output=estimate(tokens_per_second)), repeats=len(tokens_per_second))
    note = "one number says nothing of other loads, of prompts, or of requests that were too slow"
    return CostSource("number", "--tokens-per-second", (load,), notes=(note,))


def from_run_file(path: str, stdin: IO[bytes], slo: Mapping[str, float]) -> CostSource:
    """A run file's valid runs; `slo` replaces its own. Raises InputError, InvalidMeasurement without a valid run."""
    name, data = read_input(path, stdin)
    run_file = decode_run_file(data, name=name)
    runs = [run for run in run_file.runs if run.valid and run.requests.ok and (run.tokens.output or 0) > 0]
    if not runs and any(not run.valid for run in run_file.runs):
        raise InvalidMeasurement(f"{name} has no valid run", hint="a run that failed its audit has no price")
    if not runs:
        raise InputError(f"{name} has no run with output tokens", param="from")
    notes = []
    left_out = len(run_file.runs) - len(runs)
    if left_out:
        notes.append(f"{left_out} of {len(run_file.runs)} runs are left out: invalid, or without an answer")
    failed = sum(run.requests.failed for run in runs)
    if failed:
        notes.append(f"{failed} failed requests took machine time, which the answered ones pay for")
    if any(run.tokens.estimated for run in runs):
        notes.append("some token counts are estimates: the server sent no usage")
    points = sorted({(run.concurrency or 0, run.rate or 0.0) for run in runs})
    splits = _splits(run_file, runs)
    loads = tuple(
        _load([run for run in runs if (run.concurrency or 0, run.rate or 0.0) == point], slo, splits)
        for point in points
    )
    props = run_file.target.props or {}
    kv, config = props.get("kv") or {}, props.get("config") or {}
    own_slo = next((run.goodput.slo for run in runs if run.goodput is not None), {})
    return CostSource(
        kind="run file",
        name=name,
        loads=loads,
        sha256=hashlib.sha256(data).hexdigest(),
        slo=slo or own_slo,
        kv_tokens=_whole(kv.get("num_tokens")),
        slots=_whole(config.get("parallel")),
        notes=tuple(notes),
    )


def _load(runs: Sequence[Run], slo: Mapping[str, float], splits: Mapping[int, Split]) -> MeasuredLoad:
    good, attainment = [], []
    for run in runs:
        kept = goodput(run.records, slo, run.duration_s) if slo and run.records else run.goodput
        if kept is not None and (not slo or kept.slo == dict(slo)):
            good.append(kept.good_output_tokens_per_s)
            attainment.append(kept.attainment)
    inputs = [_per_second(run, _computed_input(run)) for run in runs]
    first = runs[0]
    ok = sum(run.requests.ok for run in runs)
    prompt = _total([run.tokens.input for run in runs])
    output = _total([run.tokens.output for run in runs])
    chosen = [splits[id(run)] for run in runs if id(run) in splits]
    split = None
    if chosen and len(chosen) == len(runs):
        split = Split(math.fsum(one.prefill_share for one in chosen) / len(chosen), chosen[0].rule)
    return MeasuredLoad(
        tokens=Rate(
            output=estimate([(run.tokens.output or 0) / run.duration_s for run in runs]),
            input=_estimate(inputs),
            cached=_estimate([_per_second(run, run.tokens.cached) for run in runs]),
            total=_estimate([_per_second(run, _plus(_computed_input(run), run.tokens.output)) for run in runs]),
            good=_estimate(good) if len(good) == len(runs) else None,
        ),
        rate=first.rate,
        concurrency=first.concurrency,
        repeats=len(runs),
        requests_per_s=math.fsum(run.throughput.requests_per_s for run in runs) / len(runs),
        attainment=math.fsum(attainment) / len(attainment) if len(attainment) == len(runs) else None,
        ttft_p95_s=_mean([None if run.latency.ttft_s is None else run.latency.ttft_s.p95 for run in runs]),
        service_s=_mean([_service_seconds(run) for run in runs]),
        prompt_tokens=None if prompt is None else prompt / ok,
        output_tokens=None if output is None else output / ok,
        split=split,
    )


def _splits(run_file: RunFile, runs: Sequence[Run]) -> dict[int, Split]:
    """How each run's time divides into prefill and decode, all by one rule: the best that all runs allow."""
    for rule in (_by_server, _by_steps, _by_requests):
        found = rule(run_file, runs)
        if found is not None:
            return {id(run): split for run, split in zip(runs, found, strict=True)}
    return {}


def _by_server(run_file: RunFile, runs: Sequence[Run]) -> list[Split] | None:
    found = []
    for run in runs:
        prefill, decode = run.server.get("prefill_seconds"), run.server.get("decode_seconds")
        if prefill is None or decode is None or prefill + decode <= 0:
            return None
        found.append(Split(prefill / (prefill + decode), "the server's own prefill and decode seconds"))
    return found


def _by_steps(run_file: RunFile, runs: Sequence[Run]) -> list[Split] | None:
    """Step times fitted to the runs, times what the runs computed. What a step costs at all counts as decoding."""
    if not all(run.server.get("steps") and run.records and _computed_input(run) is not None for run in runs):
        return None
    try:
        times = fit_step_times(runs, limits_from(run_file.target)).times
    except InputError:
        return None
    found = []
    for run in runs:
        prefill = times.per_prefill_token * (_computed_input(run) or 0)
        decoded = (run.tokens.output or 0) - run.requests.ok
        decode = times.base * run.server["steps"] + times.per_sequence * decoded
        if prefill + decode <= 0:
            return None
        found.append(Split(prefill / (prefill + decode), "step times fitted to the runs, by tokens computed"))
    return found


def _by_requests(run_file: RunFile, runs: Sequence[Run]) -> list[Split] | None:
    found = []
    for run in runs:
        timings = [record.timings for record in run.records if record.ok and record.timings is not None]
        prefill = math.fsum(timing.prefill_s for timing in timings)
        decode = math.fsum(timing.decode_s for timing in timings)
        if prefill + decode <= 0:
            return None
        found.append(Split(prefill / (prefill + decode), "the requests' own prefill and decode seconds, which overlap"))
    return found


def _service_seconds(run: Run) -> float | None:
    timings = [record.timings for record in run.records if record.ok and record.timings is not None]
    if timings:
        return math.fsum(timing.prefill_s + timing.decode_s for timing in timings) / len(timings)
    return None if run.latency.e2e_s is None else run.latency.e2e_s.mean


def _computed_input(run: Run) -> int | None:
    """Prompt tokens that the prefix cache did not have."""
    return None if run.tokens.input is None else run.tokens.input - (run.tokens.cached or 0)


def _per_second(run: Run, tokens: int | None) -> float | None:
    return None if tokens is None else tokens / run.duration_s


def _estimate(values: Sequence[float | None]) -> Estimate | None:
    known = [value for value in values if value is not None]
    return estimate(known) if known and len(known) == len(values) else None


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return math.fsum(known) / len(known) if known else None


def _total(values: Sequence[int | None]) -> int | None:
    return None if any(value is None for value in values) else sum(value or 0 for value in values)


def _plus(left: int | None, right: int | None) -> int | None:
    return None if left is None or right is None else left + right


def _whole(value: object) -> int | None:
    return value if type(value) is int and value > 0 else None
