"""What the next step computes, and what its results mean.

Owns the running sequences, their blocks and slots, and the finish rules. It must not know torch, the model or a clock:
the time is an argument, so that a simulation runs the same code.

A step is `schedule(now)`, the forward pass, `apply(output, tokens, now)`. Nothing advances before `apply`: a step that
failed can be dropped and scheduled again. In between requests may be added and aborted.

Where the device runs behind the host, `launched(output)` lets the next step be scheduled before this one is applied:
the next token of a decoding sequence is then one that is still being chosen. Steps are applied in their order.

One rule covers prefill, chunked prefill, prefix hits, decode and resume: under the budget of `max_num_batched_tokens`
a sequence lets `num_computed_tokens` catch up with `num_tokens` (Orca, OSDI '22; Sarathi-Serve, arXiv:2403.02310).

  1. Every running sequence that is one token behind gets that token, so a prompt never stalls a stream.
  2. Running sequences that are further behind share what is left of the budget, first come first served.
  3. Waiting sequences are admitted in order. One is admitted only when all blocks for the tokens it has so far are
     there, and takes them at once. So only a decoding sequence ever lacks a block, and only one block.

When it does, the last of the running sequences (worst priority, then youngest) is preempted: its blocks are freed and
it is recomputed later, from the prefix cache where that still holds them. The first always makes progress, because the
others can be preempted for it and no sequence may grow beyond the pool: one that reaches the pool's edge ends there
with `length`, as at the edge of the context. A step that preempted admits nobody, and admission preempts nobody.
"""

from bisect import insort
from collections import Counter, deque
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import attrgetter
from typing import get_args

from servekit.engine.core.block_pool import BlockPool
from servekit.engine.core.policy import Admission, Policy
from servekit.engine.core.prefix_cache import PrefixCache
from servekit.engine.core.preview import Preview, preview
from servekit.engine.core.request import FinishReason, Request, RequestTimings, SampledToken, Update
from servekit.engine.core.sequence import Sequence, SequenceStatus
from servekit.errors import ConfigError, ContextLengthError, InputError, KvCapacityError

_ORDER = attrgetter("order")


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    """The limits of a step and of the pool. `num_blocks` includes the null block, `static_wait` is in seconds.

    `max_num_batched_tokens` is at least `max_num_seqs`, so that every running sequence can get a token in every step.

    Raises ConfigError, with `param` naming the field, for a value that cannot work.
    """

    max_num_seqs: int
    max_num_batched_tokens: int
    max_model_len: int
    num_blocks: int
    block_size: int
    policy: Policy = "continuous"
    static_wait: float = 0.5
    enable_prefix_caching: bool = True
    eos_token_ids: frozenset[int] = frozenset()
    cache_seed: bytes = b""

    def __post_init__(self) -> None:
        for name, value, low in (
            ("max_num_seqs", self.max_num_seqs, 1),
            ("max_model_len", self.max_model_len, 2),
            ("num_blocks", self.num_blocks, 2),
            ("block_size", self.block_size, 1),
            ("static_wait", self.static_wait, 0),
        ):
            if not value >= low:
                raise ConfigError(f"{name} must be at least {low}, not {value}", param=name)
        if self.max_num_batched_tokens < self.max_num_seqs:
            raise ConfigError(
                f"max_num_batched_tokens {self.max_num_batched_tokens} is less than max_num_seqs {self.max_num_seqs}, "
                "so some running requests would get no token",
                hint="raise max_num_batched_tokens, or lower max_num_seqs",
                param="max_num_batched_tokens",
            )
        if self.policy not in get_args(Policy):
            raise ConfigError(f"policy {self.policy!r} is not one of {', '.join(get_args(Policy))}", param="policy")


@dataclass(frozen=True, slots=True)
class ScheduledSequence:
    """A sequence's part in a step: `num_new_tokens` (one or more) from position `start` on.

    `needs_sample` is True when that reaches its last token, whose logits give the next one.
    """

    seq: Sequence
    num_new_tokens: int
    needs_sample: bool
    start: int

    @property
    def end(self) -> int:
        """The position after its last token in this step."""
        return self.start + self.num_new_tokens


@dataclass(frozen=True, slots=True)
class ScheduleOutput:
    """One step: decoding sequences first, then those that catch up, then those that are new. Steps count from 1."""

    scheduled: tuple[ScheduledSequence, ...]
    num_batched_tokens: int
    num_preempted: int
    step_idx: int = 0

    @property
    def is_empty(self) -> bool:
        """Whether there is nothing to compute."""
        return not self.scheduled


@dataclass(frozen=True, slots=True)
class SchedulerStats:
    """A snapshot. Blocks are live, cached or free (neither), and these three add up to the usable ones.

    Preemptions and prefix tokens count from the start.
    """

    num_running: int
    num_waiting: int
    num_live_blocks: int
    num_cached_blocks: int
    num_free_blocks: int
    num_usable_blocks: int
    num_preemptions: int
    num_prefix_query_tokens: int
    num_prefix_hit_tokens: int


class Scheduler:
    """Decides step by step who computes what. One thread calls it; only `check` may be called from any.

    With work there is always something to compute, except while the static policy waits for a full batch: then
    `schedule` gives an empty output and `next_deadline` says when to ask again, unless a request arrives before.

    `max_context_len` is the most tokens, prompt and answer together, that one request can have: the model's context or
    the pool, whichever is smaller.
    """

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks, config.block_size)
        self.prefix_cache = PrefixCache(self.pool, config.enable_prefix_caching, config.cache_seed)
        self.max_context_len = min(config.max_model_len, self.pool.num_usable * config.block_size)
        self._admission = Admission(config.policy, config.max_num_seqs, config.static_wait)
        self._running: list[Sequence] = []  # sorted by order
        self._by_id: dict[str, Sequence] = {}  # waiting and running, in the order of arrival
        self._free_slots = list(range(config.max_num_seqs))  # a heap: ascending is one already
        self._num_added = 0
        self._num_preemptions = 0
        self._step_idx = 0
        self._is_in_flight = False
        self._launched: deque[ScheduleOutput] = deque()

    @property
    def num_running(self) -> int:
        """Sequences that hold blocks and a slot."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences in line, new and preempted."""
        return len(self._admission)

    @property
    def has_work(self) -> bool:
        """Whether anything runs or waits."""
        return bool(self._by_id)

    def check(self, request: Request) -> None:
        """Refuse what could never run, however idle the server. Pure, and safe from any thread.

        Raises InputError for an empty prompt, ContextLengthError for one that leaves the context no room for a token,
        KvCapacityError for one that with its first token needs more blocks than the pool has.
        """
        num_prompt_tokens = len(request.prompt_token_ids)
        if num_prompt_tokens == 0:
            raise InputError("the prompt has no tokens, so there is nothing to continue", param="prompt")
        if num_prompt_tokens >= self.config.max_model_len:
            raise ContextLengthError(num_prompt_tokens, self.config.max_model_len)
        num_blocks_needed = self.pool.num_blocks_for(num_prompt_tokens + 1)
        if num_blocks_needed > self.pool.num_usable:
            raise KvCapacityError(num_blocks_needed, self.pool.num_usable)

    def add(self, request: Request, now: float) -> None:
        """Put a request in line.

        Raises what `check` raises, and InputError when a request of that id waits or runs.
        """
        self.check(request)
        if request.request_id in self._by_id:
            raise InputError(f"request id {request.request_id!r} is in use", param="request_id")
        seq = Sequence(request, self._num_added, now)
        self._num_added += 1
        self._by_id[request.request_id] = seq
        self._admission.add(seq)

    def abort(self, request_id: str) -> None:
        """Drop a request and free its slot and blocks at once; no update follows. Unknown or finished: no-op."""
        seq = self._by_id.get(request_id)
        if seq is not None:
            self._finish(seq, FinishReason.ABORT)

    def finish_all(self, reason: FinishReason) -> list[Update]:
        """End everything that waits or runs, oldest first, with a last update for each; it has no timings."""
        updates = []
        for seq in list(self._by_id.values()):
            self._finish(seq, reason)
            request_id = seq.request.request_id
            updates.append(Update(request_id, num_cached_tokens=seq.num_cached_tokens, finish_reason=reason))
        return updates

    def schedule(self, now: float) -> ScheduleOutput:
        """Choose the next step. An output that was not applied is forgotten; nothing had advanced by it."""
        budget = self.config.max_num_batched_tokens
        scheduled: list[ScheduledSequence] = []
        behind: list[Sequence] = []
        num_preemptions_before = self._num_preemptions
        # Victims are taken from the end of the list that is being walked, so they have never been granted anything.
        for seq in self._running:
            start = seq.num_computed_tokens + seq.num_launched_tokens
            if len(seq.token_ids) + seq.num_pending_tokens - start > 1:
                behind.append(seq)
            elif seq.num_pending_tokens and self._ends_when_read(seq):
                continue
            elif self._make_room(seq):
                scheduled.append(ScheduledSequence(seq, 1, True, start))
                budget -= 1
        for seq in behind:
            if budget == 0:
                break
            budget -= self._grant(seq, budget, scheduled)
        num_preempted = self._num_preemptions - num_preemptions_before
        if not num_preempted:
            while budget > 0 and self._free_slots:
                admitted = self._admit(now)
                if admitted is None:
                    break
                budget -= self._grant(admitted, budget, scheduled)
        self._step_idx += 1
        self._is_in_flight = True
        num_batched_tokens = self.config.max_num_batched_tokens - budget
        return ScheduleOutput(tuple(scheduled), num_batched_tokens, num_preempted, self._step_idx)

    def launched(self, output: ScheduleOutput) -> None:
        """The last scheduled step is being computed and will be applied later: schedule the next one behind it."""
        assert self._is_in_flight, "a step can be launched only once"
        assert output.step_idx == self._step_idx, "only the last scheduled step can be launched"
        self._is_in_flight = False
        self._launched.append(output)
        for item in output.scheduled:
            item.seq.num_launched_tokens += item.num_new_tokens
            item.seq.num_pending_tokens += item.needs_sample

    def retract(self, output: ScheduleOutput) -> None:
        """The step that was launched last is given up, as if it had never been scheduled."""
        assert self._launched, "nothing is in flight"
        assert self._launched[-1].step_idx == output.step_idx, "only the last launched step can be given up"
        self._settle(self._launched.pop())

    def preview(self, request: Request) -> Preview:
        """What the request would meet if it were added now. Raises as `check`."""
        self.check(request)
        return preview(
            request,
            self._running,
            (seq for seq in self._by_id.values() if seq.status is not SequenceStatus.RUNNING),
            self.prefix_cache,
            self.pool,
            ordinal=self._num_added,
            max_num_seqs=self.config.max_num_seqs,
            max_context_len=self.max_context_len,
        )

    def next_deadline(self) -> float | None:
        """When the static policy stops waiting for a full batch; None when nothing is being waited for."""
        return self._admission.deadline(len(self._running))

    def apply(self, output: ScheduleOutput, tokens: Iterable[SampledToken | None], now: float) -> list[Update]:
        """Take in the results of the oldest launched step, or else of the last scheduled one: one entry for each of
        `output.scheduled`, None for none.

        Gives an update for each sequence that got a token. Those ended since `schedule` are passed over; those that
        could not be computed may be left out of `output`, and are scheduled again unless aborted. A stop token is part
        of the update; it stops only once the sequence has `min_tokens`, this one counted.
        """
        if self._launched:
            assert output.step_idx == self._launched[0].step_idx, "launched steps are applied in their order"
            self._settle(self._launched.popleft())
        else:
            assert self._is_in_flight, "a step can be applied only once"
            assert output.step_idx == self._step_idx, "only the last scheduled step can be applied"
            self._is_in_flight = False
        updates: list[Update] = []
        for item, sampled in zip(output.scheduled, tokens, strict=True):
            seq = item.seq
            assert (sampled is not None) is item.needs_sample, f"{seq} has a token too many or too few"
            if seq.status is SequenceStatus.FINISHED:
                continue
            seq.num_steps += 1
            seq.num_batch_mates += len(output.scheduled)
            # One that was preempted since it was launched has lost its blocks, but the token out of them is good.
            if seq.status is SequenceStatus.RUNNING:
                seq.num_computed_tokens += item.num_new_tokens
                self.prefix_cache.publish(seq)
            if sampled is not None:
                updates.append(self._append(seq, sampled, now))
        return updates

    @property
    def running(self) -> tuple[Sequence, ...]:
        """The sequences that hold slots, first come first."""
        return tuple(self._running)

    def stats(self) -> SchedulerStats:
        """How full everything is."""
        pool = self.pool
        return SchedulerStats(
            num_running=len(self._running),
            num_waiting=len(self._admission),
            num_live_blocks=pool.num_live,
            num_cached_blocks=pool.num_cached,
            num_free_blocks=pool.num_free - pool.num_cached,
            num_usable_blocks=pool.num_usable,
            num_preemptions=self._num_preemptions,
            num_prefix_query_tokens=self.prefix_cache.queries,
            num_prefix_hit_tokens=self.prefix_cache.hits,
        )

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong, unless sequences, slots and blocks agree. O(everything)."""
        self.pool.check_integrity()
        running = set(self._running)
        assert len(running) == len(self._running) <= self.config.max_num_seqs, "too many sequences run, or one twice"
        assert self._running == sorted(self._running, key=_ORDER), "the running sequences are out of order"
        assert len(self._by_id) == len(running) + len(self._admission), "a sequence neither runs nor waits"
        slots = sorted(self._free_slots + [seq.slot for seq in self._running])
        assert slots == list(range(self.config.max_num_seqs)), f"slots, free and taken, are {slots}"
        num_refs: Counter[int] = Counter()
        for seq in self._by_id.values():
            assert (seq in running) is (seq.status is SequenceStatus.RUNNING), f"{seq} is out of place"
            assert seq.num_computed_tokens < seq.num_tokens <= self.max_context_len, f"{seq} has a wrong length"
            if seq in running:
                num_refs.update(seq.block_table)
                capacity = len(seq.block_table) * self.config.block_size
                assert capacity >= seq.num_tokens - 1, f"{seq} lacks a block"
                num_published = seq.num_published_blocks
                assert num_published * self.config.block_size <= seq.num_computed_tokens, f"{seq} published too much"
                for block_id, block_hash in zip(seq.block_table[:num_published], seq.block_hashes, strict=False):
                    assert self.pool.block_hash(block_id) in (None, block_hash), f"{seq}: block {block_id} was renamed"
            else:
                held = (seq.block_table, seq.num_computed_tokens, seq.slot)
                assert held == ([], 0, -1), f"{seq} waits, but holds blocks, computed tokens or a slot: {held}"
        for block_id in range(self.config.num_blocks):
            assert self.pool.ref_count(block_id) == num_refs[block_id], (
                f"block {block_id} has {self.pool.ref_count(block_id)} references, "
                f"but stands in {num_refs[block_id]} block tables"
            )

    def _grant(self, seq: Sequence, budget: int, scheduled: list[ScheduledSequence]) -> int:
        """Give a sequence as many of the tokens it is behind as the budget allows; how many that is."""
        start = seq.num_computed_tokens + seq.num_launched_tokens
        num_behind = seq.num_tokens + seq.num_pending_tokens - start
        num_new_tokens = min(num_behind, budget)
        scheduled.append(ScheduledSequence(seq, num_new_tokens, num_new_tokens == num_behind, start))
        return num_new_tokens

    def _settle(self, output: ScheduleOutput) -> None:
        """What a step had launched is in flight no more."""
        for item in output.scheduled:
            item.seq.num_pending_tokens -= item.needs_sample
            if item.seq.status is SequenceStatus.RUNNING:
                item.seq.num_launched_tokens -= item.num_new_tokens

    def _ends_when_read(self, seq: Sequence) -> bool:
        """Whether the token that is being chosen is the last one by its number, whichever it is."""
        num_pending = seq.num_pending_tokens
        return (
            seq.num_output_tokens + num_pending == seq.request.sampling.max_tokens
            or seq.num_tokens + num_pending >= self.max_context_len
        )

    def _make_room(self, seq: Sequence) -> bool:
        """Find the block for the next token, preempting from the end; False when that came to `seq` itself."""
        if len(seq.block_table) * self.config.block_size > seq.num_computed_tokens + seq.num_launched_tokens:
            return True
        while (block_ids := self.pool.allocate(1)) is None:
            assert len(self._running) > 1, f"{seq} is alone and the pool is full"
            victim = self._running[-1]
            self._preempt(victim)
            if victim is seq:
                return False
        seq.block_table.extend(block_ids)
        return True

    def _preempt(self, seq: Sequence) -> None:
        """Send a running sequence back in line, with its tokens and without its blocks."""
        self._vacate(seq)
        seq.status = SequenceStatus.PREEMPTED
        seq.num_computed_tokens = 0
        seq.num_preemptions += 1
        self._num_preemptions += 1
        self._admission.resume(seq)

    def _admit(self, now: float) -> Sequence | None:
        """Let the first in line run, if it may and its blocks are there. Nobody overtakes it when they are not."""
        seq = self._admission.peek(now, len(self._running))
        if seq is None or seq.num_pending_tokens:
            return None
        block_ids = self.prefix_cache.match(seq)
        num_new_blocks = self.pool.num_blocks_for(seq.num_tokens) - len(block_ids)
        if num_new_blocks > self.pool.num_free_without(block_ids):
            return None
        self._admission.pop()
        self.pool.touch(block_ids)  # before allocating, which could evict them
        new_block_ids = self.pool.allocate(num_new_blocks)
        assert new_block_ids is not None, "the blocks were counted and are gone"
        seq.block_table = block_ids + new_block_ids
        seq.num_published_blocks = len(block_ids)
        seq.num_computed_tokens = len(block_ids) * self.config.block_size
        seq.slot = heappop(self._free_slots)
        seq.status = SequenceStatus.RUNNING
        if seq.first_scheduled_time is None:
            seq.first_scheduled_time = now
            seq.num_cached_tokens = seq.num_computed_tokens
            self.prefix_cache.record(seq.num_tokens, seq.num_cached_tokens)
        insort(self._running, seq, key=_ORDER)
        return seq

    def _append(self, seq: Sequence, sampled: SampledToken, now: float) -> Update:
        """Add a token to a sequence that has caught up, and end it when the token or its length says so."""
        token_id = sampled.token_id
        seq.token_ids.append(token_id)
        if seq.first_token_time is None:
            seq.first_token_time = now
        reason, stop_reason = self._finish_reason(seq, token_id)
        if reason is not None:
            self._finish(seq, reason)
        return Update(
            seq.request.request_id,
            (token_id,),
            () if sampled.logprob is None else (sampled.logprob,),
            seq.num_cached_tokens,
            reason,
            stop_reason,
            None,
            _timings(seq, now),
        )

    def _finish_reason(self, seq: Sequence, token_id: int) -> tuple[FinishReason | None, int | None]:
        """Why the sequence ends with this token, and the stop token that ended it."""
        sampling = seq.request.sampling
        num_output_tokens = seq.num_output_tokens
        if num_output_tokens >= sampling.min_tokens and (
            token_id in sampling.stop_token_ids or (token_id in self.config.eos_token_ids and not sampling.ignore_eos)
        ):
            return FinishReason.STOP, token_id
        if num_output_tokens == sampling.max_tokens or seq.num_tokens >= self.max_context_len:
            return FinishReason.LENGTH, None
        return None, None

    def _finish(self, seq: Sequence, reason: FinishReason) -> None:
        """End a sequence wherever it stands; its published blocks stay cached."""
        if seq.status is SequenceStatus.RUNNING:
            self._vacate(seq)
        else:
            self._admission.discard(seq)
        seq.status = SequenceStatus.FINISHED
        seq.finish_reason = reason
        del self._by_id[seq.request.request_id]

    def _vacate(self, seq: Sequence) -> None:
        """Take blocks and slot from a running sequence."""
        self._running.remove(seq)
        self.pool.release(seq.block_table)
        seq.block_table = []
        seq.num_launched_tokens = 0
        heappush(self._free_slots, seq.slot)
        seq.slot = -1


def _timings(seq: Sequence, now: float) -> RequestTimings:
    """Where the time of a sequence has gone that gets a token now."""
    assert seq.first_scheduled_time is not None, f"{seq} was never scheduled"
    assert seq.first_token_time is not None, f"{seq} has no token"
    return RequestTimings(
        queue=seq.first_scheduled_time - seq.arrival_time,
        prefill=seq.first_token_time - seq.first_scheduled_time,
        decode=now - seq.first_token_time,
        num_preemptions=seq.num_preemptions,
        mean_batch_size=seq.num_batch_mates / seq.num_steps,
    )
