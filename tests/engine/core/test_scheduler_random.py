"""Scheduler under random use: tiny pools, every policy, cache on and off, with a model that notices wrong reads."""

import random
from typing import get_args

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from servekit.engine.core.policy import Policy
from servekit.engine.core.request import FinishReason, Request, SamplingParams, Update
from servekit.engine.core.scheduler import ScheduleOutput, Scheduler

from .harness import PagedModel, make_scheduler, solo

BLOCK_SIZE = 4
NUM_BLOCKS = 13  # 12 usable ones, so at most 48 tokens
MAX_NUM_SEQS = 5
PREFIXES = tuple(tuple(range(100 * number, 100 * number + 20)) for number in range(3))


class Traffic:
    """Drives a scheduler by single actions and checks everything that must hold after each of them."""

    def __init__(self, policy: Policy, enable_prefix_caching: bool, max_num_batched_tokens: int = 11) -> None:
        self.scheduler: Scheduler = make_scheduler(
            max_num_seqs=MAX_NUM_SEQS,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=40,
            num_blocks=NUM_BLOCKS,
            block_size=BLOCK_SIZE,
            policy=policy,
            static_wait=2.0,
            enable_prefix_caching=enable_prefix_caching,
        )
        self.model = PagedModel(BLOCK_SIZE)
        self.now = 0.0
        self.requests: dict[str, Request] = {}  # those that have not ended
        self.answers: dict[str, list[int]] = {}
        self.output: ScheduleOutput | None = None
        self.num_ended = 0
        self.num_evicted = 0
        self._names: list[bytes | None] = [None] * NUM_BLOCKS

    def add(self, prefix: int, num_shared: int, num_own: int, max_tokens: int, priority: int) -> None:
        number = self.num_ended + len(self.requests)
        prompt = PREFIXES[prefix][:num_shared] + tuple(1000 * number + place for place in range(1, num_own + 1))
        request_id = f"r{number}"
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
        self.requests[request_id] = Request(request_id, prompt, sampling, self.now, priority)
        self.answers[request_id] = []
        self.scheduler.add(self.requests[request_id], self.now)

    def abort(self, choice: int) -> None:
        """Abort one that waits or runs, or when there is none, one that has ended long ago."""
        request_id = list(self.requests)[choice % len(self.requests)] if self.requests else "r0"
        self.scheduler.abort(request_id)
        self._end(request_id)

    def schedule(self) -> None:
        """Schedule a step, dropping one that was not applied."""
        self.now += 1.0
        best = min((seq.order for seq in self.scheduler._running), default=None)
        self.output = output = self.scheduler.schedule(self.now)
        assert output.num_batched_tokens == sum(item.num_new_tokens for item in output.scheduled)
        assert output.num_batched_tokens <= self.scheduler.config.max_num_batched_tokens
        assert all(item.num_new_tokens >= 1 for item in output.scheduled)
        orders = [item.seq.order for item in output.scheduled]
        assert len(set(orders)) == len(orders)
        # What is scheduled runs, and has the blocks for it: nobody preempted in this step is left in it.
        for item in output.scheduled:
            seq = item.seq
            assert seq in self.scheduler._running
            end = seq.num_computed_tokens + item.num_new_tokens
            assert item.needs_sample is (end == seq.num_tokens)
            assert len(seq.block_table) * BLOCK_SIZE >= end
        # The first of those who run progresses, and so does every one that decodes.
        assert best is None or best in orders
        decoding = [seq.order for seq in self.scheduler._running if seq.num_tokens - seq.num_computed_tokens == 1]
        assert set(decoding) <= set(orders)
        if output.is_empty and self.scheduler.has_work:
            deadline = self.scheduler.next_deadline()
            assert deadline is not None
            assert deadline > self.now

    def apply(self) -> None:
        """Compute and apply the step that was scheduled last, if one was."""
        if self.output is None:
            return
        # A sequence aborted since has lost its blocks; its neighbours must not notice.
        live = tuple(item for item in self.output.scheduled if not item.seq.is_finished)
        part = ScheduleOutput(live, self.output.num_batched_tokens, self.output.num_preempted, self.output.step_idx)
        for update in self.scheduler.apply(part, self.model.step(part), self.now):
            self._receive(update)
        self.output = None

    def check(self) -> None:
        self.scheduler.check_integrity()
        pool = self.scheduler.pool
        names = [pool.block_hash(block_id) for block_id in range(NUM_BLOCKS)]
        self.num_evicted += sum(
            1 for old, new in zip(self._names, names, strict=True) if old is not None and old != new
        )
        self._names = names
        stats = self.scheduler.stats()
        assert stats.num_running + stats.num_waiting == len(self.requests)
        assert stats.num_live_blocks + stats.num_cached_blocks + stats.num_free_blocks == stats.num_usable_blocks

    def drain(self) -> None:
        num_steps = 0
        while self.scheduler.has_work:
            self.schedule()
            self.apply()
            self.check()
            num_steps += 1
            assert num_steps < 20_000, "no end in sight"
        assert self.scheduler.pool.num_live == 0
        assert not self.requests

    def _receive(self, update: Update) -> None:
        request = self.requests[update.request_id]
        answer = self.answers[update.request_id]
        answer += update.token_ids
        assert update.num_cached_tokens % BLOCK_SIZE == 0
        assert update.num_cached_tokens < len(request.prompt_token_ids)
        assert update.timings is not None
        if update.finish_reason is None:
            return
        assert update.finish_reason is FinishReason.LENGTH
        room = self.scheduler.max_context_len - len(request.prompt_token_ids)
        assert len(answer) == min(request.sampling.max_tokens or room, room)
        assert answer == solo(request.prompt_token_ids, len(answer))
        self._end(update.request_id)

    def _end(self, request_id: str) -> None:
        if self.requests.pop(request_id, None) is not None:
            self.num_ended += 1


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("policy", get_args(Policy))
def test_ten_thousand_random_actions(policy: Policy, enable_prefix_caching: bool) -> None:
    rng = random.Random(f"{policy} {enable_prefix_caching}")
    traffic = Traffic(policy, enable_prefix_caching)
    for _ in range(10_000):
        action = rng.random()
        if action < 0.12 and len(traffic.requests) < 12:
            traffic.add(
                prefix=rng.randrange(3),
                num_shared=rng.randint(0, 18),
                num_own=rng.randint(1, 10),
                max_tokens=rng.randint(1, 25),
                priority=rng.choice((0, 0, 0, -1, 1)),
            )
        elif action < 0.14:
            traffic.abort(rng.randrange(12))
        elif action < 0.57:
            traffic.schedule()
        else:
            traffic.apply()
        traffic.check()
    traffic.drain()
    stats = traffic.scheduler.stats()
    assert traffic.num_ended > 300
    assert stats.num_preemptions > 50
    if enable_prefix_caching:
        assert traffic.num_evicted > 500
        assert 0 < stats.num_prefix_hit_tokens < stats.num_prefix_query_tokens
    else:
        assert (traffic.num_evicted, stats.num_cached_blocks, stats.num_prefix_query_tokens) == (0, 0, 0)


class TrafficMachine(RuleBasedStateMachine):
    """The same actions, chosen by hypothesis, which shortens a failure to the few that matter."""

    @initialize(
        policy=st.sampled_from(get_args(Policy)),
        enable_prefix_caching=st.booleans(),
        max_num_batched_tokens=st.integers(MAX_NUM_SEQS, 30),
    )
    def start(self, policy: Policy, enable_prefix_caching: bool, max_num_batched_tokens: int) -> None:
        self.traffic = Traffic(policy, enable_prefix_caching, max_num_batched_tokens)

    @rule(
        prefix=st.integers(0, 2),
        num_shared=st.integers(0, 20),
        num_own=st.integers(1, 10),
        max_tokens=st.integers(1, 30),
        priority=st.integers(-1, 1),
    )
    def add(self, prefix: int, num_shared: int, num_own: int, max_tokens: int, priority: int) -> None:
        self.traffic.add(prefix, num_shared, num_own, max_tokens, priority)

    @rule(choice=st.integers(0, 20))
    def abort(self, choice: int) -> None:
        self.traffic.abort(choice)

    @rule()
    def schedule(self) -> None:
        self.traffic.schedule()

    @rule()
    def apply(self) -> None:
        self.traffic.apply()

    @rule(num_steps=st.integers(1, 10))
    def step(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.traffic.schedule()
            self.traffic.apply()
            self.traffic.check()

    @invariant()
    def all_agrees(self) -> None:
        self.traffic.check()

    def teardown(self) -> None:
        if hasattr(self, "traffic"):
            self.traffic.drain()


TestTrafficMachine = TrafficMachine.TestCase
TestTrafficMachine.settings = settings(
    max_examples=60, stateful_step_count=40, deadline=None, derandomize=True, database=None
)
