"""Step times out of a measured run, and how well a simulation with them predicts that run.

Owns the regression `step = base + per_sequence x decoding + per_prefill_token x prompt tokens`. It needs nothing but
the times at which clients saw their tokens, so that runs of any server can be fitted.

Steps are not seen from outside, so each request's decode phase is one equation: its seconds are the sum over its
steps, one for each token after the first. The sum of "sequences that decoded" over these steps is the number of tokens
that all requests got in that time, and the prompt tokens are those of the prefills that lie in it. The prefill phase
gives a second equation. All are solved together by least squares with no negative part.
"""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import combinations
from typing import Any

from servekit.bench.result import Record, Run, RunFile, Target
from servekit.bench.sim import SimRequest, StepTimes, scheduler_config, simulate
from servekit.bench.stats import percentile
from servekit.bench.times import end_to_end, time_per_output_token, time_to_first_token
from servekit.engine.core.scheduler import SchedulerConfig
from servekit.errors import InputError

_MIN_PHASES = 8
_AS_GOOD = 1.01
"""A part of the formula is left out when the squared error grows by no more than this without it."""


@dataclass(frozen=True, slots=True)
class ServerLimits:
    """What a simulation has to know of a server. `num_blocks` leaves out the null block; None is never short."""

    slots: int
    max_num_batched_tokens: int = 256
    block_size: int = 16
    num_blocks: int | None = None
    policy: str = "continuous"
    static_wait: float = 0.5

    def scheduler_config(self, requests: Sequence[SimRequest], *, policy: str | None = None) -> SchedulerConfig:
        """The Scheduler of such a server for these requests, or the same under another policy."""
        return scheduler_config(
            requests,
            slots=self.slots,
            policy=policy or self.policy,
            max_num_batched_tokens=self.max_num_batched_tokens,
            block_size=self.block_size,
            num_blocks=self.num_blocks,
            static_wait=self.static_wait,
        )


@dataclass(frozen=True, slots=True)
class Fit:
    """Step times in seconds; `relative_error` is the typical error of one phase, `left_out` what could not be seen."""

    times: StepTimes
    num_phases: int
    relative_error: float
    left_out: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Prediction:
    """One metric: measured, predicted by the simulation, and the error as a share of the measured value."""

    metric: str
    measured: float
    predicted: float

    @property
    def error(self) -> float:
        """(predicted - measured) / measured."""
        return self.predicted / self.measured - 1 if self.measured else float("inf")


@dataclass(frozen=True, slots=True)
class Check:
    """How well one run is predicted; `held_out` when it had no part in the fit that predicts it."""

    rate: float | None
    repeat: int
    held_out: bool
    predictions: tuple[Prediction, ...]


@dataclass(frozen=True, slots=True)
class FittedFile:
    """The valid runs of a run file, the server they ran on, its step times, and how good these are."""

    runs: tuple[Run, ...]
    limits: ServerLimits
    fit: Fit
    checks: tuple[Check, ...]


def fit_run_file(run_file: RunFile, *, slots: int | None = None) -> FittedFile:
    """Fit and check. `slots` is for servers that do not say how many they have. Raises InputError."""
    runs = tuple(run for run in run_file.runs if run.valid)
    if not runs:
        raise InputError("the file has no valid run", hint="a run that fails its audit is no basis", param="fit")
    limits = limits_from(run_file.target, slots=slots)
    return FittedFile(runs, limits, fit_step_times(runs, limits), tuple(cross_validate(runs, limits)))


def limits_from(target: Target, *, slots: int | None = None) -> ServerLimits:
    """The limits that a servekit server shows in its props; `slots` are taken where it does not.

    Raises InputError when the number of slots is in neither.
    """
    props = target.props or {}
    config, kv = props.get("config") or {}, props.get("kv") or {}
    blocks = kv.get("num_blocks")
    shown: dict[str, Any] = {
        "slots": config.get("parallel") or slots,
        "max_num_batched_tokens": config.get("max_num_batched_tokens"),
        "policy": config.get("scheduling"),
        "static_wait": config.get("static_wait"),
        "block_size": kv.get("block_size"),
        "num_blocks": blocks - 1 if isinstance(blocks, int) else None,
    }
    if shown["slots"] is None:
        raise InputError("the run file does not say how many slots the server had", hint="give --slots", param="slots")
    return ServerLimits(**{name: value for name, value in shown.items() if value is not None})


def fit_step_times(runs: Sequence[Run], limits: ServerLimits) -> Fit:
    """Fit the step times of all runs together. Raises InputError when they show too few phases."""
    import numpy as np

    rows = [row for run in runs for row in _equations(run, limits)]
    if len(rows) < _MIN_PHASES:
        raise InputError(
            f"{len(rows)} phases of requests are too few to fit step times; {_MIN_PHASES} are needed",
            hint="measure more requests, with answers of more than one token",
            param="fit",
        )
    table = np.array([row.counts for row in rows])
    seconds = np.array([row.seconds for row in rows])
    # The spread of a sum of steps grows with their number, and so does the sum: weigh by its root.
    weights = 1 / np.sqrt(seconds)
    found: list[tuple[float, tuple[int, ...], Any]] = []
    for size in (1, 2, 3):
        for columns in combinations(range(3), size):
            part = table[:, columns]
            solution, _, rank, _ = np.linalg.lstsq(part * weights[:, None], seconds * weights, rcond=1e-6)
            if rank == size and (solution >= 0).all():
                error = float((((part @ solution - seconds) * weights) ** 2).sum())
                found.append((error, columns, solution))
    least = min(error for error, _, _ in found)
    # The simplest of those that are as good: a batch that never changed cannot be told from the base.
    _, columns, solution = min(
        (entry for entry in found if entry[0] <= least * _AS_GOOD + 1e-12), key=lambda entry: (len(entry[1]), entry[0])
    )
    values = [0.0, 0.0, 0.0]
    for column, value in zip(columns, solution, strict=True):
        values[column] = float(value)
    errors = np.abs(table[:, columns] @ solution / seconds - 1)
    names = ("base", "per_sequence", "per_prefill_token")
    left_out = tuple(name for column, name in enumerate(names) if column not in columns)
    return Fit(StepTimes(*values), len(rows), float(np.median(errors)), left_out)


def requests_of(run: Run) -> list[SimRequest]:
    """What was asked in a run: the whole answers, when they were sent, without the cached tokens of their prompts.

    Raises InputError when there are none.
    """
    requests = [
        SimRequest(_sent(record), max(1, _computed_prompt(record)), record.output_tokens or 1)
        for record in run.records
        if _is_whole(record)
    ]
    if not requests:
        raise InputError(
            "the run has no record with a first token and an end",
            hint="write the run file with its records",
            param="fit",
        )
    return requests


def predict(run: Run, limits: ServerLimits, times: StepTimes) -> tuple[Prediction, ...]:
    """Simulate the run's own requests at their own times, and compare what the clients saw."""
    requests = requests_of(run)
    config = limits.scheduler_config(requests)
    measured, predicted = _metrics(run.records), _metrics(simulate(requests, config, times).records)
    return tuple(Prediction(name, measured[name], predicted[name]) for name in measured if name in predicted)


def cross_validate(runs: Sequence[Run], limits: ServerLimits) -> list[Check]:
    """Predict each run from a fit of all the others; with one run only there is nothing to keep out."""
    checks = []
    for index, run in enumerate(runs):
        others = [other for position, other in enumerate(runs) if position != index]
        fitted = fit_step_times(others or runs, limits)
        checks.append(Check(run.rate, run.repeat, bool(others), predict(run, limits, fitted.times)))
    return checks


@dataclass(frozen=True, slots=True)
class _Equation:
    """Seconds of one phase, and what its steps counted: steps, sequences that decoded, prompt tokens."""

    seconds: float
    counts: tuple[float, float, float]


@dataclass(frozen=True, slots=True)
class _Phases:
    """One request's moments and tokens; `decoded` are the times of all tokens but the first."""

    started_s: float
    first_s: float
    end_s: float
    prompt_tokens: int
    decoded: tuple[float, ...]


def _equations(run: Run, limits: ServerLimits) -> list[_Equation]:
    phases = _phases([record for record in run.records if _is_whole(record)], limits.slots)
    tokens = sorted(time for phase in phases for time in phase.decoded)
    rows = []
    for phase in phases:
        if phase.decoded and phase.end_s > phase.first_s:
            counts = (float(len(phase.decoded)), float(_count(tokens, phase.first_s, phase.end_s)))
            rows.append(_equation(phase.first_s, phase.end_s, counts, phases))
        if phase.first_s > phase.started_s and phase.prompt_tokens:
            steps = float(-(-phase.prompt_tokens // limits.max_num_batched_tokens))
            # Counting the tokens of others would miss the steps that end outside; who decodes at its middle is enough.
            middle = (phase.started_s + phase.first_s) / 2
            decoding = sum(1 for other in phases if other.first_s <= middle < other.end_s)
            counts = (steps, steps * decoding)
            rows.append(_equation(phase.started_s, phase.first_s, counts, phases))
    return rows


def _equation(begin: float, end: float, counts: tuple[float, float], phases: Sequence[_Phases]) -> _Equation:
    prompt = sum(phase.prompt_tokens * _overlap(phase, begin, end) for phase in phases)
    return _Equation(end - begin, (*counts, prompt))


def _count(times: Sequence[float], begin: float, end: float) -> int:
    """How many of the sorted times lie after `begin`, up to and with `end`."""
    return bisect_right(times, end) - bisect_right(times, begin)


def _overlap(phase: _Phases, begin: float, end: float) -> float:
    """The share of a prefill that lies in an interval."""
    shared = min(end, phase.first_s) - max(begin, phase.started_s)
    length = phase.first_s - phase.started_s
    return max(0.0, shared) / length if length > 0 else 0.0


def _phases(records: Sequence[Record], slots: int) -> list[_Phases]:
    """When each prefill began: as the server says, else when it was sent and a slot was free (first come, first)."""
    free = [0.0] * slots  # a heap: when each slot is given back
    phases = []
    for record in sorted(records, key=_sent):
        assert record.first_token_s is not None
        assert record.end_s is not None
        started = max(_sent(record), heappop(free))
        heappush(free, record.end_s)
        if record.timings is not None:
            started = record.first_token_s - record.timings.prefill_s
        started = min(started, record.first_token_s)
        decoded = tuple(_token_times(record)[1:])
        end = decoded[-1] if decoded else record.first_token_s
        phases.append(_Phases(started, record.first_token_s, end, _computed_prompt(record), decoded))
    return phases


def _token_times(record: Record) -> list[float]:
    """When each token came: several in one chunk share the time since the chunk before; without chunks, evenly."""
    assert record.first_token_s is not None
    assert record.end_s is not None
    count = record.output_tokens or 1
    chunks = record.chunks or [(record.first_token_s, 1), (record.end_s, count)]
    times: list[float] = []
    before, seen = chunks[0][0], 0
    for time, cumulative in chunks:
        new = cumulative - seen
        times.extend(before + (time - before) * (position + 1) / new for position in range(new))
        before, seen = time, max(seen, cumulative)
    return times


def _metrics(records: Sequence[Record]) -> dict[str, float]:
    """From the send, since a simulation knows no client that is late."""
    whole = [record for record in records if _is_whole(record)]
    ttft = [time_to_first_token(record, from_send=True) or 0.0 for record in whole]
    tpot = [value for record in whole if (value := time_per_output_token(record)) is not None]
    e2e = [end_to_end(record, from_send=True) or 0.0 for record in whole]
    span = max(record.end_s or 0.0 for record in whole) - min(_sent(record) for record in whole)
    metrics = {
        "output_tokens_per_s": sum(record.output_tokens or 0 for record in whole) / span if span else 0.0,
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p95_s": percentile(ttft, 0.95),
        "e2e_p50_s": percentile(e2e, 0.5),
        "e2e_p95_s": percentile(e2e, 0.95),
    }
    return metrics | ({"tpot_p50_s": percentile(tpot, 0.5)} if tpot else {})


def _is_whole(record: Record) -> bool:
    return record.ok and record.first_token_s is not None and bool(record.output_tokens)


def _sent(record: Record) -> float:
    return record.scheduled_s if record.sent_s is None else record.sent_s


def _computed_prompt(record: Record) -> int:
    """Prompt tokens that were not in the prefix cache."""
    return (record.input_tokens or 0) - (record.cached_tokens or 0)
