"""Scheduling a step before the one before it has been read: random traffic over a paged memory that notices mistakes.

The model is the one of harness.py behind a queue: its tokens are known to it at once and to the scheduler only when
they are applied. Whatever is aborted, stopped or preempted in between, every answer is what it would be alone.
"""

import random
from collections import deque

import pytest

from servekit.engine.core.request import FinishReason, Request, SampledToken, SamplingParams, Update
from servekit.engine.core.scheduler import ScheduleOutput, Scheduler, SchedulerConfig
from servekit.engine.core.sequence import Sequence
from tests.engine.core.harness import PagedModel, choose, make_request, make_scheduler, shape, solo, state_after

BLOCK_SIZE = 4


class QueuedModel:
    """A PagedModel that keeps the last token of every sequence, as a device does."""

    def __init__(self) -> None:
        self._memory: dict[tuple[int, int], int] = {}
        self._last: dict[Sequence, int] = {}

    def step(self, output: ScheduleOutput) -> list[SampledToken | None]:
        tokens: list[SampledToken | None] = []
        for item in output.scheduled:
            known = item.seq.token_ids
            ids = list(known[: item.end])
            if item.end > len(known):
                assert item.end == len(known) + 1
                ids.append(self._last[item.seq])
            state = 0
            for position, token_id in enumerate(ids):
                state = state_after(state, token_id)
                cell = item.seq.block_table[position // BLOCK_SIZE], position % BLOCK_SIZE
                if position < item.start:
                    assert self._memory.get(cell) == state, f"{item.seq} reads foreign contents at {position}"
                else:
                    self._memory[cell] = state
            self._last[item.seq] = choose(state)
            tokens.append(SampledToken(choose(state)) if item.needs_sample else None)
        return tokens


def expected(request: Request, max_context_len: int) -> list[int]:
    """The answer that the request gets alone."""
    room = max_context_len - len(request.prompt_token_ids)
    answer = solo(request.prompt_token_ids, min(request.sampling.max_tokens or room, room))
    stops = [place for place, token in enumerate(answer) if token in request.sampling.stop_token_ids]
    return answer[: stops[0] + 1] if stops else answer


class Traffic:
    """Requests that come, go and are computed `ahead` steps before anything is read."""

    def __init__(self, ahead: int, seed: int) -> None:
        self.rng = random.Random(seed)
        self.scheduler = Scheduler(SchedulerConfig(5, 12, 40, 21, BLOCK_SIZE))
        self.ahead = ahead
        self.model = QueuedModel()
        self.in_flight: deque[tuple[ScheduleOutput, list[SampledToken | None]]] = deque()
        self.requests: dict[str, Request] = {}
        self.answers: dict[str, list[int]] = {}
        self.num_finished = self.num_stopped = self.num_dropped = self.num_retracted = 0
        self.now = 0.0

    def add(self) -> None:
        name = f"r{len(self.answers)}"
        shared = tuple(range(self.rng.choice((0, 5, 9))))
        own = tuple(1000 + len(self.answers) * 50 + place for place in range(self.rng.randint(1, 12)))
        # Any answer token may be a stop: a hundredth of the vocabulary is.
        stops = frozenset(range(self.rng.randrange(100), 1000, 50 if self.rng.random() < 0.5 else 400))
        sampling = SamplingParams(temperature=0.0, max_tokens=self.rng.randint(1, 25), stop_token_ids=stops)
        self.requests[name] = Request(name, shared + own, sampling, self.now, self.rng.choice((0, 0, 1)))
        self.answers[name] = []
        self.scheduler.add(self.requests[name], self.now)

    def abort(self) -> None:
        if self.requests:
            name = self.rng.choice(list(self.requests))
            self.scheduler.abort(name)
            del self.requests[name]

    def step(self) -> None:
        self.now += 1.0
        output = self.scheduler.schedule(self.now)
        if not output.is_empty:
            self.in_flight.append((output, self.model.step(output)))
            self.scheduler.launched(output)
        self.scheduler.check_integrity()
        while len(self.in_flight) > (0 if output.is_empty else self.ahead):
            if len(self.in_flight) > 1 and self.rng.random() < 0.05:
                self.scheduler.retract(self.in_flight.pop()[0])
                self.num_retracted += 1
            self.land()

    def land(self) -> None:
        output, tokens = self.in_flight.popleft()
        self.num_dropped += sum(item.seq.is_finished for item in output.scheduled)
        for update in self.scheduler.apply(output, tokens, self.now):
            self.receive(update)
        self.scheduler.check_integrity()

    def receive(self, update: Update) -> None:
        request = self.requests[update.request_id]
        self.answers[update.request_id] += update.token_ids
        if update.finish_reason is not None:
            assert self.answers[update.request_id] == expected(request, self.scheduler.max_context_len)
            self.num_finished += 1
            self.num_stopped += update.finish_reason is FinishReason.STOP
            del self.requests[update.request_id]

    def drain(self) -> None:
        while self.scheduler.has_work or self.in_flight:
            self.step()
        assert not self.requests
        assert self.scheduler.pool.num_live == 0


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("ahead", [0, 1])
def test_random_traffic_gets_the_same_answers_however_far_ahead(ahead: int, seed: int) -> None:
    traffic = Traffic(ahead, seed)
    for _ in range(1500):
        action = traffic.rng.random()
        if action < 0.2 and len(traffic.requests) < 10:
            traffic.add()
        elif action < 0.22:
            traffic.abort()
        else:
            traffic.step()
    traffic.drain()
    assert traffic.num_finished > 100
    assert traffic.num_stopped > 20
    assert traffic.scheduler.stats().num_preemptions > 5
    assert (traffic.num_dropped > 20) is (traffic.num_retracted > 0) is (ahead == 1)


def test_the_next_token_is_scheduled_while_the_last_one_is_being_chosen() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6, 3), 0.0)
    first = scheduler.schedule(0.0)
    scheduler.launched(first)
    second = scheduler.schedule(0.0)
    assert [(item.start, item.end, item.needs_sample) for item in second.scheduled] == [(6, 7, True)]
    scheduler.launched(second)
    (update,) = scheduler.apply(first, [SampledToken(1)], 0.0)
    assert update.token_ids == (1,)
    third = scheduler.schedule(0.0)
    scheduler.launched(third)
    scheduler.apply(second, [SampledToken(2)], 0.0)
    # The third token is the last by max_tokens, whichever it is: nothing is computed behind it.
    assert scheduler.schedule(0.0).is_empty
    (last,) = scheduler.apply(third, [SampledToken(3)], 0.0)
    assert last.finish_reason is FinishReason.LENGTH


def test_the_token_behind_a_stop_is_dropped() -> None:
    scheduler = make_scheduler(eos_token_ids=frozenset({9}))
    scheduler.add(make_request("a", 6, 30), 0.0)
    first = scheduler.schedule(0.0)
    scheduler.launched(first)
    second = scheduler.schedule(0.0)
    scheduler.launched(second)
    (update,) = scheduler.apply(first, [SampledToken(9)], 0.0)
    assert update.finish_reason is FinishReason.STOP
    assert scheduler.apply(second, [SampledToken(5)], 0.0) == []
    scheduler.check_integrity()
    assert scheduler.pool.num_live == 0


def test_a_token_of_a_sequence_that_was_preempted_meanwhile_is_kept() -> None:
    """Two sequences of four blocks in a pool of five: the younger gives way while its token is being chosen."""
    scheduler = make_scheduler(num_blocks=6, max_num_seqs=2)
    scheduler.add(make_request("old", 8, 9), 0.0)
    scheduler.add(make_request("young", 8, 9), 0.0)
    first = scheduler.schedule(0.0)
    assert shape(first) == [("old", 8), ("young", 8)]
    scheduler.launched(first)
    second = scheduler.schedule(0.0)
    assert shape(second) == [("old", 1)]
    assert second.num_preempted == 1
    scheduler.launched(second)
    updates = scheduler.apply(first, [SampledToken(1), SampledToken(2)], 0.0)
    assert [(update.request_id, update.token_ids) for update in updates] == [("old", (1,)), ("young", (2,))]
    scheduler.check_integrity()


def test_a_step_that_is_given_up_leaves_no_trace() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 6, 5), 0.0)
    first = scheduler.schedule(0.0)
    scheduler.launched(first)
    second = scheduler.schedule(0.0)
    scheduler.launched(second)
    scheduler.retract(second)
    scheduler.apply(first, [SampledToken(1)], 0.0)
    again = scheduler.schedule(0.0)
    assert [(item.start, item.end) for item in again.scheduled] == [(6, 7)]


def test_a_model_without_a_queue_agrees_with_one_that_has_it() -> None:
    """The two models of these tests compute the same, so that a difference is the scheduler's."""
    scheduler = make_scheduler(block_size=BLOCK_SIZE)
    scheduler.add(make_request("a", 9, 5), 0.0)
    output = scheduler.schedule(0.0)
    assert QueuedModel().step(output) == PagedModel(BLOCK_SIZE).step(output)
