"""The engine's own Scheduler without a model: what a server would do to a workload, given how long its steps take.

Owns the clock that stands in for the device. It must not know where the step times or the requests come from, and it
decides nothing itself: admission, batching, preemption and finishing are the Scheduler's.
"""

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from servekit.bench.result import Record, Timings
from servekit.engine.core.request import Request, RequestTimings, SampledToken, SamplingParams
from servekit.engine.core.scheduler import ScheduledSequence, ScheduleOutput, Scheduler, SchedulerConfig

StepSeconds = Callable[[int, int], float]
"""Seconds of a step from the sequences that decode in it and the prompt tokens that it computes."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step takes `base` seconds, and more for each sequence that decodes and for each prompt token."""

    base: float
    per_sequence: float
    per_prefill_token: float

    def __call__(self, num_decoding: int, num_prefill_tokens: int) -> float:
        """Seconds of one step."""
        return self.base + self.per_sequence * num_decoding + self.per_prefill_token * num_prefill_tokens


@dataclass(frozen=True, slots=True)
class SimRequest:
    """When somebody asks, how long the prompt is, and after how many tokens the answer ends."""

    arrival_s: float
    prompt_tokens: int
    output_tokens: int


@dataclass(frozen=True, slots=True)
class SimStep:
    """One step: its seconds, what it computed, and who held which slot (slot, index of the request)."""

    start_s: float
    end_s: float
    num_decoding: int
    num_prefill_tokens: int
    slots: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class SimRun:
    """What came of it. `steps` are all of them in order; shares are of the time in which a step ran.

    `budget_full` is the share of steps that used all of `max_num_batched_tokens`. The others are shares with somebody
    waiting: because all slots were taken, because a batch has to end first, or because too few blocks were free.
    """

    records: tuple[Record, ...]
    steps: tuple[SimStep, ...]
    num_preemptions: int
    budget_full: float
    waiting_for_slots: float
    waiting_for_batch: float
    waiting_for_blocks: float

    @property
    def end_s(self) -> float:
        """When the last request had its last token."""
        return max((record.end_s or 0.0 for record in self.records), default=0.0)

    @property
    def busy_s(self) -> float:
        """Seconds in which a step ran."""
        return sum(step.end_s - step.start_s for step in self.steps)


def simulate(requests: Sequence[SimRequest], config: SchedulerConfig, seconds: StepSeconds) -> SimRun:
    """Play `requests` through a Scheduler whose steps take as long as `seconds` says.

    Raises what Scheduler.check raises for a request that could never run.
    """
    return _Simulation(requests, config, seconds).run()


class _Simulation:
    def __init__(self, requests: Sequence[SimRequest], config: SchedulerConfig, seconds: StepSeconds) -> None:
        self._requests = requests
        self._scheduler = Scheduler(config)
        order = sorted(range(len(requests)), key=lambda index: requests[index].arrival_s)
        self._pending = deque(order)
        self._records = [_record(index, request) for index, request in enumerate(requests)]
        self._steps: list[SimStep] = []
        self._seconds = seconds
        self._at_budget = self._for_slots = self._for_batch = self._for_blocks = 0.0

    def run(self) -> SimRun:
        now = 0.0
        while self._pending or self._scheduler.has_work:
            self._add_arrived(now)
            output = self._scheduler.schedule(now)
            now = self._step(output, now) if not output.is_empty else self._next_event(now)
        busy = sum(step.end_s - step.start_s for step in self._steps) or 1.0
        return SimRun(
            records=tuple(self._records),
            steps=tuple(self._steps),
            num_preemptions=self._scheduler.stats().num_preemptions,
            budget_full=self._at_budget / busy,
            waiting_for_slots=self._for_slots / busy,
            waiting_for_batch=self._for_batch / busy,
            waiting_for_blocks=self._for_blocks / busy,
        )

    def _add_arrived(self, now: float) -> None:
        while self._pending and self._requests[self._pending[0]].arrival_s <= now:
            index = self._pending.popleft()
            request = self._requests[index]
            sampling = SamplingParams(temperature=0.0, max_tokens=request.output_tokens, ignore_eos=True)
            prompt = (0,) * request.prompt_tokens
            self._scheduler.add(Request(str(index), prompt, sampling, request.arrival_s), request.arrival_s)

    def _next_event(self, now: float) -> float:
        """The next arrival, or the moment at which the static policy stops waiting for one."""
        moments = [] if not self._pending else [self._requests[self._pending[0]].arrival_s]
        deadline = self._scheduler.next_deadline()
        if deadline is not None:
            moments.append(deadline)
        assert moments, "nothing to compute, to wait for, or to arrive"
        return max(now, min(moments))

    def _step(self, output: ScheduleOutput, now: float) -> float:
        decoding = sum(1 for item in output.scheduled if _decodes(item))
        prefill = output.num_batched_tokens - decoding
        end = now + self._seconds(decoding, prefill)
        slots = tuple((item.seq.slot, int(item.seq.request.request_id)) for item in output.scheduled)
        self._steps.append(SimStep(now, end, decoding, prefill, slots))
        self._account(output, end - now)
        tokens = [SampledToken(0) if item.needs_sample else None for item in output.scheduled]
        for update in self._scheduler.apply(output, tokens, end):
            record = self._records[int(update.request_id)]
            record.output_tokens = (record.output_tokens or 0) + len(update.token_ids)
            record.chunks.append((end, record.output_tokens))
            record.first_token_s = end if record.first_token_s is None else record.first_token_s
            if update.finish_reason is not None:
                record.end_s, record.finish_reason = end, update.finish_reason.value
                record.timings = None if update.timings is None else _timings(update.timings)
        return end

    def _account(self, output: ScheduleOutput, seconds: float) -> None:
        scheduler, limits = self._scheduler, self._scheduler.config
        is_full = output.num_batched_tokens == limits.max_num_batched_tokens
        if is_full:
            self._at_budget += seconds
        if not scheduler.num_waiting:
            return
        if scheduler.num_running == limits.max_num_seqs:
            self._for_slots += seconds
        elif limits.policy != "continuous":
            self._for_batch += seconds
        elif not is_full:
            self._for_blocks += seconds


def _decodes(item: ScheduledSequence) -> bool:
    """Whether the sequence only takes its next token, with all before it computed."""
    return item.seq.num_output_tokens > 0 and item.seq.num_tokens - item.seq.num_computed_tokens == 1


def _record(index: int, request: SimRequest) -> Record:
    return Record(
        index=index,
        scheduled_s=request.arrival_s,
        sent_s=request.arrival_s,
        status=200,
        input_tokens=request.prompt_tokens,
        asked_tokens=request.output_tokens,
        cached_tokens=0,
        chunks=[],
    )


def _timings(timings: RequestTimings) -> Timings:
    return Timings(
        queue_s=timings.queue,
        prefill_s=timings.prefill,
        decode_s=timings.decode,
        preemptions=timings.num_preemptions,
    )


def scheduler_config(
    requests: Iterable[SimRequest],
    *,
    slots: int,
    policy: str = "continuous",
    max_num_batched_tokens: int = 256,
    block_size: int = 16,
    num_blocks: int | None = None,
    static_wait: float = 0.5,
) -> SchedulerConfig:
    """The Scheduler's limits for a simulation; `num_blocks` None is a pool that every slot can fill.

    The prefix cache is off: lengths alone say nothing of what prompts share. Raises ConfigError naming the field.
    """
    longest = max((request.prompt_tokens + request.output_tokens for request in requests), default=2)
    if num_blocks is None:
        num_blocks = slots * -(-longest // max(block_size, 1))
    return SchedulerConfig(
        max_num_seqs=slots,
        max_num_batched_tokens=max_num_batched_tokens,
        max_model_len=longest + 1,
        num_blocks=num_blocks + 1,
        block_size=block_size,
        policy=policy,  # type: ignore[arg-type]  # SchedulerConfig refuses what it does not know
        static_wait=static_wait,
        enable_prefix_caching=False,
    )
