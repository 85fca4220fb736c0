"""What a request would meet, on exact numbers, and that looking changes nothing."""

import pytest

from servekit.engine.core.request import Request, SampledToken, SamplingParams
from servekit.engine.core.scheduler import Scheduler, SchedulerConfig
from servekit.errors import KvCapacityError


def request(name: str, tokens: list[int], *, max_tokens: int | None = None, priority: int = 0) -> Request:
    return Request(name, tuple(tokens), SamplingParams(max_tokens=max_tokens), 0.0, priority)


def test_a_request_behind_others() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=40, num_blocks=33, block_size=4)
    scheduler = Scheduler(config)
    fresh = scheduler.preview(request("p", list(range(9))))
    assert (fresh.num_cached_tokens, fresh.num_new_blocks, fresh.queue_position) == (0, 3, 0)
    assert (fresh.num_free_slots, fresh.num_tokens_ahead, fresh.num_steps_to_slot) == (2, 9, 0)

    scheduler.add(request("a", list(range(9)), max_tokens=6), 0.0)
    scheduler.add(request("b", [50, 51], max_tokens=8), 0.0)
    scheduler.add(request("c", [60, 61, 62]), 0.0)
    output = scheduler.schedule(0.0)
    scheduler.apply(output, [SampledToken(1)] * 2, 0.0)

    seen = scheduler.preview(request("p", list(range(9))))
    # a and b run, one token behind each; c waits with three. a has 5 tokens to go and b 7: c gets a's slot.
    assert (seen.num_prompt_tokens, seen.num_cached_tokens, seen.num_new_blocks) == (9, 8, 1)
    assert (seen.num_free_slots, seen.queue_position) == (0, 1)
    assert (seen.num_tokens_ahead, seen.num_steps_to_slot) == (1 + 1 + 3 + 1, 7)
    assert scheduler.preview(request("q", [7], priority=-1)).queue_position == 0
    scheduler.check_integrity()


def test_what_never_fits_is_said() -> None:
    config = SchedulerConfig(max_num_seqs=1, max_num_batched_tokens=8, max_model_len=40, num_blocks=3, block_size=4)
    with pytest.raises(KvCapacityError):
        Scheduler(config).preview(request("p", list(range(8))))


def test_the_mean_batch_size_counts_all_steps_of_a_sequence() -> None:
    config = SchedulerConfig(max_num_seqs=2, max_num_batched_tokens=64, max_model_len=40, num_blocks=33, block_size=4)
    scheduler = Scheduler(config)
    scheduler.add(request("a", [1, 2], max_tokens=3), 0.0)
    sizes = []
    for step in range(3):
        if step == 1:
            scheduler.add(request("b", [3, 4], max_tokens=9), 0.0)
        output = scheduler.schedule(0.0)
        (update, *_) = scheduler.apply(output, [SampledToken(1)] * len(output.scheduled), 0.0)
        assert update.timings is not None
        sizes.append(update.timings.mean_batch_size)
    assert sizes == [1.0, 1.5, 5 / 3]
