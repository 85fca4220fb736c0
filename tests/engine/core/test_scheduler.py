"""Scheduler: exact steps and exact block ids on small cases. A block has 4 tokens unless a test says otherwise."""

from dataclasses import replace

import pytest

from servekit.engine.core.policy import Policy
from servekit.engine.core.request import (
    FinishReason,
    RequestTimings,
    SampledToken,
    SamplingParams,
    TokenLogprob,
    Update,
)
from servekit.engine.core.scheduler import ScheduleOutput, SchedulerConfig
from servekit.engine.core.sequence import Sequence, SequenceStatus
from servekit.errors import ConfigError, ContextLengthError, InputError, KvCapacityError

from .harness import PagedModel, advance, make_request, make_scheduler, run_to_end, shape, solo


def find(output: ScheduleOutput, request_id: str) -> Sequence:
    return next(item.seq for item in output.scheduled if item.seq.request.request_id == request_id)


# --- budget and chunks ------------------------------------------------------------------------------------------------


def test_a_prompt_is_computed_in_chunks_of_the_budget_and_sampled_at_its_end() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    scheduler.add(make_request("a", 19, max_tokens=2), 0.0)
    steps = []
    for _ in range(4):
        output, updates = advance(scheduler)
        (item,) = output.scheduled
        steps.append((item.num_new_tokens, item.needs_sample, len(updates)))
    assert steps == [(8, False, 0), (8, False, 0), (3, True, 1), (1, True, 1)]
    assert not scheduler.has_work


def test_admission_takes_all_blocks_of_the_prompt_at_once() -> None:
    scheduler = make_scheduler(max_num_seqs=2, max_num_batched_tokens=8)
    scheduler.add(make_request("a", 19), 0.0)
    output = scheduler.schedule(0.0)
    assert find(output, "a").block_table == [1, 2, 3, 4, 5]


def test_nobody_is_admitted_while_a_prompt_uses_up_the_budget() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    scheduler.add(make_request("long", 12), 0.0)
    scheduler.add(make_request("short", 2), 0.0)
    assert [shape(advance(scheduler)[0]) for _ in range(2)] == [[("long", 8)], [("long", 4), ("short", 2)]]


def test_decode_goes_before_anybodys_prefill_chunk() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    scheduler.add(make_request("stream", 3), 0.0)
    advance(scheduler)
    scheduler.add(make_request("long", 30), 0.0)
    scheduler.add(make_request("later", 9), 0.0)
    steps = [shape(advance(scheduler)[0]) for _ in range(6)]
    assert steps[:4] == [[("stream", 1), ("long", 7)]] * 4
    assert steps[4] == [("stream", 1), ("long", 2), ("later", 5)]
    assert steps[5] == [("stream", 1), ("long", 1), ("later", 4)]


def test_decode_of_a_younger_sequence_goes_before_prefill_of_an_older_one() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8)
    scheduler.add(make_request("young", 3), 0.0)
    advance(scheduler)
    scheduler.add(make_request("urgent", 30, priority=-1), 0.0)
    assert shape(advance(scheduler)[0]) == [("young", 1), ("urgent", 7)]
    assert shape(advance(scheduler)[0]) == [("young", 1), ("urgent", 7)]


def test_every_running_stream_gets_a_token_in_every_step_of_a_long_prompt() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=8, num_blocks=100)
    for name in "abcdefg":
        scheduler.add(make_request(name, 1), 0.0)
    advance(scheduler)
    scheduler.add(make_request("long", 20), 0.0)
    for _ in range(20):
        output, updates = advance(scheduler)
        assert shape(output) == [(name, 1) for name in "abcdefg"] + [("long", 1)]
        assert [update.request_id for update in updates][:7] == list("abcdefg")
    assert updates[-1].request_id == "long"


def test_no_more_than_max_num_seqs_run() -> None:
    scheduler = make_scheduler(max_num_seqs=2)
    for name in "abc":
        scheduler.add(make_request(name, 3, max_tokens=2), 0.0)
    assert shape(advance(scheduler)[0]) == [("a", 3), ("b", 3)]
    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert shape(advance(scheduler)[0]) == [("a", 1), ("b", 1)]
    assert shape(advance(scheduler)[0]) == [("c", 3)]


def test_priority_then_arrival_decides_who_is_admitted() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    for name, priority in (("a", 1), ("b", 0), ("c", 0), ("d", -5)):
        scheduler.add(make_request(name, 3, max_tokens=1, priority=priority), 0.0)
    assert [shape(advance(scheduler)[0])[0][0] for _ in range(4)] == ["d", "b", "c", "a"]


def test_nobody_overtakes_the_first_in_line() -> None:
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_request("a", 9, max_tokens=3), 0.0)  # 3 of 5 blocks
    scheduler.add(make_request("big", 12, max_tokens=1), 0.0)  # 3
    scheduler.add(make_request("small", 2, max_tokens=1), 0.0)  # 1
    assert [shape(advance(scheduler)[0]) for _ in range(4)] == [
        [("a", 9)],
        [("a", 1)],
        [("a", 1)],
        [("big", 12), ("small", 2)],
    ]
    assert scheduler.stats().num_preemptions == 0


# --- slots ------------------------------------------------------------------------------------------------------------


def test_the_lowest_free_slot_is_taken_and_given_back() -> None:
    scheduler = make_scheduler(max_num_seqs=3)
    for name in "abc":
        scheduler.add(make_request(name, 3), 0.0)
    output, _ = advance(scheduler)
    a, b, c = (item.seq for item in output.scheduled)
    assert (a.slot, b.slot, c.slot) == (0, 1, 2)
    scheduler.abort("b")
    scheduler.abort("a")
    assert (a.slot, b.slot, c.slot) == (-1, -1, 2)
    for name in "de":
        scheduler.add(make_request(name, 3), 0.0)
    output, _ = advance(scheduler)
    assert (find(output, "d").slot, find(output, "e").slot) == (0, 1)


# --- prefix cache -----------------------------------------------------------------------------------------------------


def test_a_prefix_hit_shares_blocks_and_computes_only_the_rest() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(10), max_tokens=5), 0.0)
    output, _ = advance(scheduler)
    assert find(output, "a").block_table == [1, 2, 3]
    scheduler.add(make_request("b", [*range(8), 50, 51, 52], max_tokens=1), 0.0)
    output, updates = advance(scheduler)
    assert shape(output) == [("a", 1), ("b", 3)]
    assert [update.num_cached_tokens for update in updates] == [0, 8]
    assert [scheduler.pool.ref_count(block_id) for block_id in (1, 2, 3, 4)] == [1, 1, 1, 0]
    stats = scheduler.stats()
    assert (stats.num_prefix_query_tokens, stats.num_prefix_hit_tokens) == (21, 8)


def test_num_cached_tokens_comes_with_every_update() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(8), max_tokens=1), 0.0)
    advance(scheduler)
    scheduler.add(make_request("b", range(9), max_tokens=3), 0.0)
    assert [advance(scheduler)[1][0].num_cached_tokens for _ in range(3)] == [8, 8, 8]


def test_a_hit_counts_against_free_blocks_when_it_is_only_cached() -> None:
    """Two cached blocks can be shared or evicted, but not both."""
    scheduler = make_scheduler(num_blocks=6)
    scheduler.add(make_request("a", range(8), max_tokens=1), 0.0)
    advance(scheduler)
    scheduler.add(make_request("filler", 5), 0.0)
    advance(scheduler)
    assert (scheduler.pool.num_free, scheduler.pool.num_cached) == (3, 2)
    scheduler.add(make_request("b", [*range(8), *range(100, 106)]), 0.0)  # 4 blocks: 2 hits, 2 new, 1 is empty
    assert shape(advance(scheduler)[0]) == [("filler", 1)]
    scheduler.abort("filler")
    output, _ = advance(scheduler)
    assert shape(output) == [("b", 6)]
    assert find(output, "b").block_table[:2] == [1, 2]


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
@pytest.mark.parametrize("num_tokens", [3, 4, 5, 8])
def test_a_prompt_wholly_in_the_cache(num_tokens: int, enable_prefix_caching: bool) -> None:
    """One token at least is computed again; the answer stays that of a server without a cache."""
    scheduler = make_scheduler(enable_prefix_caching=enable_prefix_caching)
    model = PagedModel(4)
    prompt = list(range(num_tokens))
    cached = []
    for attempt, tokens in enumerate([prompt, prompt, prompt, [*prompt, 77]]):
        scheduler.add(make_request(f"r{attempt}", tokens, max_tokens=6), 0.0)
        output = scheduler.schedule(0.0)
        (item,) = output.scheduled
        seq = item.seq
        assert item.num_new_tokens == len(tokens) - seq.num_computed_tokens >= 1
        updates = scheduler.apply(output, model.step(output), 0.0)
        answers = run_to_end(scheduler, model)
        assert [*updates[0].token_ids, *answers[f"r{attempt}"]] == solo(tokens, 6)
        cached.append(seq.num_cached_tokens)
    hit = (num_tokens - 1) // 4 * 4
    # The first answer was computed as well, so one more token finds one more full block.
    expected = [0, hit, hit, num_tokens // 4 * 4]
    assert cached == (expected if enable_prefix_caching else [0, 0, 0, 0])


def test_identical_prompts_in_one_step_do_not_hit_what_is_not_yet_written() -> None:
    scheduler = make_scheduler(max_num_seqs=16, max_num_batched_tokens=1024, num_blocks=257)
    model = PagedModel(4)
    prompt = list(range(32))
    for number in range(16):
        scheduler.add(make_request(f"r{number}", prompt, max_tokens=10), 0.0)
    output = scheduler.schedule(0.0)
    assert [item.num_new_tokens for item in output.scheduled] == [32] * 16
    scheduler.apply(output, model.step(output), 0.0)
    assert all(answer == solo(prompt, 10)[1:] for answer in run_to_end(scheduler, model).values())
    scheduler.add(make_request("later", prompt, max_tokens=10), 0.0)
    assert run_to_end(scheduler, model) == {"later": solo(prompt, 10)}
    assert scheduler.stats().num_prefix_hit_tokens == 28


def test_a_chunk_in_progress_is_matchable_only_as_far_as_it_is_applied() -> None:
    scheduler = make_scheduler(max_num_seqs=8, max_num_batched_tokens=10)
    scheduler.add(make_request("a", range(18), max_tokens=1), 0.0)
    advance(scheduler)  # 10 tokens: two full blocks and half of the third
    scheduler.add(make_request("b", range(18), max_tokens=1), 0.0)
    output, _ = advance(scheduler)
    assert shape(output) == [("a", 8), ("b", 2)]
    assert find(output, "b").num_cached_tokens == 8


def test_eviction_takes_only_what_nobody_reads_and_every_answer_stays_that_of_a_solo_run() -> None:
    scheduler = make_scheduler(max_num_seqs=9, num_blocks=64)
    model = PagedModel(4)
    shared = list(range(12))
    prompts = {f"stream{number}": [*shared, 100 + number, 200 + number] for number in range(8)}
    answers: dict[str, list[int]] = {}
    num_evicted = 0
    for name, prompt in prompts.items():
        scheduler.add(make_request(name, prompt, max_tokens=20), 0.0)
    fillers = 0
    while scheduler.has_work:
        if scheduler.num_waiting == 0 and fillers < 40:
            name = f"filler{fillers}"
            prompts[name] = [1000 + 20 * fillers + place for place in range(17)]
            scheduler.add(make_request(name, prompts[name], max_tokens=3), 0.0)
            fillers += 1
        named = {block_id: scheduler.pool.block_hash(block_id) for block_id in range(64)}
        output = scheduler.schedule(0.0)
        num_evicted += sum(
            1 for block_id, name in named.items() if name not in (None, scheduler.pool.block_hash(block_id))
        )
        for update in scheduler.apply(output, model.step(output), 0.0):
            answers.setdefault(update.request_id, []).extend(update.token_ids)
        scheduler.check_integrity()
    assert num_evicted > 50
    for name, prompt in prompts.items():
        assert answers[name] == solo(prompt, 3 if name.startswith("filler") else 20), name


@pytest.mark.parametrize("enable_prefix_caching", [True, False])
def test_the_pool_returns_to_its_base(enable_prefix_caching: bool) -> None:
    """Lengths around multiples of the block, three in ten aborted half-way (twice), one in ten refused."""
    scheduler = make_scheduler(num_blocks=65, enable_prefix_caching=enable_prefix_caching)
    model = PagedModel(4)
    num_refused = num_aborted = 0
    for number in range(500):
        num_tokens = 256 if number % 10 == 9 else 1 + number % 17
        try:
            scheduler.add(make_request(f"r{number}", num_tokens, max_tokens=1 + number % 7), 0.0)
        except ContextLengthError:
            num_refused += 1
        output = scheduler.schedule(0.0)
        tokens = model.step(output)
        if number % 10 in (2, 5, 8):
            num_aborted += 1
            for _ in range(2):
                scheduler.abort(f"r{number}")
        scheduler.apply(output, tokens, 0.0)
        stats = scheduler.stats()
        assert stats.num_live_blocks + stats.num_cached_blocks + stats.num_free_blocks == stats.num_usable_blocks == 64
        scheduler.check_integrity()
    run_to_end(scheduler, model)
    stats = scheduler.stats()
    assert (num_refused, num_aborted) == (50, 150)
    assert (stats.num_live_blocks, stats.num_running, stats.num_waiting) == (0, 0, 0)
    assert (stats.num_cached_blocks > 0) is enable_prefix_caching


# --- preemption -------------------------------------------------------------------------------------------------------


def test_the_youngest_is_preempted_and_the_oldest_gets_its_block() -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False)
    for name in "abc":
        scheduler.add(make_request(name, 3), 0.0)
    output, _ = advance(scheduler)
    a, b, c = (item.seq for item in output.scheduled)
    assert (a.block_table, b.block_table, c.block_table) == ([1], [2], [3])
    assert shape(advance(scheduler)[0]) == [("a", 1), ("b", 1), ("c", 1)]  # fills the blocks
    output, _ = advance(scheduler)
    # a needs a block: c goes. b needs one as well: b is now the last itself.
    assert (shape(output), output.num_preempted) == ([("a", 1)], 2)
    assert (a.block_table, b.block_table, c.block_table) == ([1, 3], [], [])
    assert (b.status, b.num_computed_tokens, b.slot, b.num_preemptions) == (SequenceStatus.PREEMPTED, 0, -1, 1)
    assert (b.num_tokens, c.num_tokens) == (5, 5), "generated tokens are kept"
    assert (scheduler.num_running, scheduler.num_waiting, scheduler.stats().num_preemptions) == (1, 2, 2)
    assert shape(advance(scheduler)[0]) == [("a", 1)], "b needs two blocks, and only one is free"


def test_worse_priority_is_preempted_before_the_youngest() -> None:
    scheduler = make_scheduler(num_blocks=4, enable_prefix_caching=False)
    scheduler.add(make_request("low", 3, priority=1), 0.0)
    scheduler.add(make_request("old", 3), 0.0)
    scheduler.add(make_request("young", 2), 0.0)
    for _ in range(2):
        assert shape(advance(scheduler)[0])[2][0] == "low"
    output, _ = advance(scheduler)
    assert (shape(output), output.num_preempted) == ([("old", 1), ("young", 1)], 1)


def test_a_preempted_sequence_resumes_from_the_cache_and_in_its_order() -> None:
    scheduler = make_scheduler(num_blocks=6)
    model = PagedModel(4)
    scheduler.add(make_request("a", range(7), max_tokens=8), 0.0)
    scheduler.add(make_request("b", range(50, 58), max_tokens=3), 0.0)
    scheduler.add(make_request("c", range(60, 62), max_tokens=2), 0.0)
    answers: dict[str, list[int]] = {}
    steps = []
    while scheduler.has_work:
        output = scheduler.schedule(0.0)
        blocks = {item.seq.request.request_id: list(item.seq.block_table) for item in output.scheduled}
        steps.append((shape(output), output.num_preempted, blocks))
        for update in scheduler.apply(output, model.step(output), 0.0):
            answers.setdefault(update.request_id, []).extend(update.token_ids)
        scheduler.check_integrity()
    assert steps == [
        ([("a", 7), ("b", 8), ("c", 2)], 0, {"a": [1, 2], "b": [3, 4], "c": [5]}),
        ([("a", 1), ("b", 1)], 1, {"a": [1, 2], "b": [3, 4, 5]}),  # b takes c's block
        ([("a", 1)], 1, {"a": [1, 2, 5]}),  # a takes b's; b's full blocks 3 and 4 stay cached, but b needs three
        ([("a", 1)], 0, {"a": [1, 2, 5]}),
        ([("a", 1)], 0, {"a": [1, 2, 5]}),
        ([("a", 1)], 0, {"a": [1, 2, 5]}),
        ([("a", 1)], 0, {"a": [1, 2, 5, 4]}),  # evicts b's tail
        ([("a", 1)], 0, {"a": [1, 2, 5, 4]}),
        ([("b", 6), ("c", 3)], 0, {"b": [3, 4, 5], "c": [2]}),  # b finds block 3 again; a's 5 and 2 are evicted
    ]
    assert answers == {
        "a": solo(range(7), 8),
        "b": solo(range(50, 58), 3),
        "c": solo(range(60, 62), 2),
    }


def test_a_step_that_preempts_admits_nobody() -> None:
    scheduler = make_scheduler(num_blocks=6, enable_prefix_caching=False)
    scheduler.add(make_request("a", 8), 0.0)
    scheduler.add(make_request("b", 12), 0.0)
    advance(scheduler)
    scheduler.add(make_request("urgent", 2, priority=-1), 0.0)
    output, _ = advance(scheduler)
    assert (shape(output), output.num_preempted) == ([("a", 1)], 1)
    assert scheduler.pool.num_free == 2, "there would have been room for the urgent one"
    assert shape(advance(scheduler)[0]) == [("a", 1), ("urgent", 2)]
    assert shape(advance(scheduler)[0]) == [("urgent", 1), ("a", 1)], "b needs four blocks"


def test_admission_preempts_nobody_even_for_a_better_priority() -> None:
    scheduler = make_scheduler(num_blocks=4)
    scheduler.add(make_request("a", 9, max_tokens=3), 0.0)
    advance(scheduler)
    scheduler.add(make_request("urgent", 5, priority=-9, max_tokens=1), 0.0)
    assert [shape(advance(scheduler)[0]) for _ in range(3)] == [[("a", 1)], [("a", 1)], [("urgent", 5)]]


def test_the_oldest_progresses_in_every_step_and_all_end_in_order() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=8, num_blocks=9, enable_prefix_caching=False)
    model = PagedModel(4)
    for name in "abcdef":
        scheduler.add(make_request(name, 9, max_tokens=20), 0.0)
    finished = ""
    while scheduler.has_work:
        output = scheduler.schedule(0.0)
        oldest = "abcdef"[len(finished)]
        assert oldest in [request_id for request_id, _ in shape(output)]
        for update in scheduler.apply(output, model.step(output), 0.0):
            if update.finish_reason:
                finished += update.request_id
    assert finished == "abcdef"
    assert scheduler.stats().num_preemptions > 0


def test_a_sequence_that_reaches_the_edge_of_the_pool_ends_with_length() -> None:
    scheduler = make_scheduler(num_blocks=4, max_model_len=256)
    assert scheduler.max_context_len == 12
    scheduler.add(make_request("a", 5), 0.0)
    scheduler.add(make_request("b", 2, max_tokens=2), 0.0)
    model = PagedModel(4)
    last: dict[str, tuple[int, FinishReason]] = {}
    num_tokens: dict[str, int] = {}
    while scheduler.has_work:
        output = scheduler.schedule(0.0)
        for update in scheduler.apply(output, model.step(output), 0.0):
            num_tokens[update.request_id] = num_tokens.get(update.request_id, 0) + len(update.token_ids)
            if update.finish_reason:
                last[update.request_id] = (num_tokens[update.request_id], update.finish_reason)
    assert last == {"a": (7, FinishReason.LENGTH), "b": (2, FinishReason.LENGTH)}
    assert scheduler.pool.num_live == 0


# --- what is refused --------------------------------------------------------------------------------------------------


def test_a_prompt_larger_than_the_pool_is_refused_and_the_next_one_served() -> None:
    scheduler = make_scheduler(max_model_len=8192, num_blocks=65, block_size=16)
    assert scheduler.max_context_len == 1024
    with pytest.raises(KvCapacityError) as refusal:
        scheduler.add(make_request("big", 2000), 0.0)
    assert (refusal.value.num_blocks_needed, refusal.value.num_blocks_total) == (126, 64)
    assert not scheduler.has_work
    scheduler.add(make_request("short", 10, max_tokens=1), 0.0)
    assert advance(scheduler)[1][0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize(("num_tokens", "fits"), [(1022, True), (1023, True), (1024, False), (1025, False)])
def test_the_prompt_and_one_token_must_fit_the_pool(num_tokens: int, fits: bool) -> None:
    scheduler = make_scheduler(max_model_len=8192, num_blocks=65, block_size=16)
    request = make_request("r", num_tokens)
    if fits:
        scheduler.check(request)
    else:
        with pytest.raises(KvCapacityError):
            scheduler.check(request)


@pytest.mark.parametrize(("num_tokens", "fits"), [(30, True), (31, True), (32, False), (33, False)])
def test_the_prompt_and_one_token_must_fit_the_context(num_tokens: int, fits: bool) -> None:
    scheduler = make_scheduler(max_model_len=32)
    request = make_request("r", num_tokens)
    if fits:
        scheduler.check(request)
    else:
        with pytest.raises(ContextLengthError) as refusal:
            scheduler.check(request)
        assert (refusal.value.num_prompt_tokens, refusal.value.max_model_len) == (num_tokens, 32)


def test_an_empty_prompt_and_an_id_in_use_are_refused() -> None:
    scheduler = make_scheduler()
    with pytest.raises(InputError) as refusal:
        scheduler.check(make_request("a", []))
    assert refusal.value.param == "prompt"
    scheduler.add(make_request("a", 3, max_tokens=1), 0.0)
    with pytest.raises(InputError) as refusal:
        scheduler.add(make_request("a", 3), 0.0)
    assert refusal.value.param == "request_id"
    advance(scheduler)
    scheduler.add(make_request("a", 3), 0.0)  # free again


@pytest.mark.parametrize(
    ("param", "value"),
    [
        ("max_num_seqs", 0),
        ("max_num_batched_tokens", 3),
        ("max_model_len", 1),
        ("num_blocks", 1),
        ("block_size", 0),
        ("static_wait", -0.1),
        ("static_wait", float("nan")),
        ("policy", "random"),
    ],
)
def test_a_config_that_cannot_work_is_refused_by_name(param: str, value: object) -> None:
    config = SchedulerConfig(4, 4, 2, 2, 1)
    with pytest.raises(ConfigError) as refusal:
        replace(config, **{param: value})  # type: ignore[arg-type]
    assert refusal.value.param == param


# --- finishing --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sampling", "tokens", "num_tokens", "reason", "stop_reason"),
    [
        (SamplingParams(max_tokens=3), [5, 5, 5, 5], 3, FinishReason.LENGTH, None),
        (SamplingParams(), [5, 2, 5], 2, FinishReason.STOP, 2),
        (SamplingParams(), [5, 3, 5], 2, FinishReason.STOP, 3),
        (SamplingParams(ignore_eos=True, max_tokens=3), [5, 2, 3], 3, FinishReason.LENGTH, None),
        (SamplingParams(ignore_eos=True, stop_token_ids=frozenset({7})), [2, 7, 5], 2, FinishReason.STOP, 7),
        (SamplingParams(ignore_eos=True, stop_token_ids=frozenset({2})), [3, 2, 5], 2, FinishReason.STOP, 2),
        (SamplingParams(min_tokens=3), [2, 2, 2, 5], 3, FinishReason.STOP, 2),
        (SamplingParams(min_tokens=2, stop_token_ids=frozenset({7})), [7, 5, 7], 3, FinishReason.STOP, 7),
        (SamplingParams(max_tokens=2), [5, 2], 2, FinishReason.STOP, 2),
        (SamplingParams(min_tokens=2, max_tokens=2), [2, 5], 2, FinishReason.LENGTH, None),
    ],
)
def test_when_a_sequence_ends(
    sampling: SamplingParams, tokens: list[int], num_tokens: int, reason: FinishReason, stop_reason: int | None
) -> None:
    scheduler = make_scheduler(eos_token_ids=frozenset({2, 3}))
    scheduler.add(make_request("a", 3, sampling=sampling), 0.0)
    received: list[int] = []
    for token_id in tokens:
        _, (update,) = advance(scheduler, token_id=token_id)
        received += update.token_ids
        if update.finish_reason:
            break
        assert update.stop_reason is None
    assert (received, update.finish_reason, update.stop_reason) == (tokens[:num_tokens], reason, stop_reason)
    assert not scheduler.has_work
    assert scheduler.pool.num_live == 0


def test_the_context_limit_ends_a_sequence() -> None:
    scheduler = make_scheduler(max_model_len=6)
    scheduler.add(make_request("a", 3), 0.0)
    reasons = [advance(scheduler)[1][0].finish_reason for _ in range(3)]
    assert reasons == [None, None, FinishReason.LENGTH]


def test_updates_carry_logprobs_and_timings() -> None:
    scheduler = make_scheduler(max_num_seqs=4, max_num_batched_tokens=4)
    scheduler.add(make_request("a", 6, max_tokens=2), 1.0)
    logprob = TokenLogprob(9, -0.5)
    output = scheduler.schedule(3.0)
    assert scheduler.apply(output, [None], 4.0) == []
    output = scheduler.schedule(4.0)
    assert scheduler.apply(output, [SampledToken(9, logprob)], 7.5) == [
        Update("a", (9,), (logprob,), timings=RequestTimings(2.0, 4.5, 0.0, 0))
    ]
    output = scheduler.schedule(8.0)
    assert scheduler.apply(output, [SampledToken(8)], 9.0) == [
        Update("a", (8,), finish_reason=FinishReason.LENGTH, timings=RequestTimings(2.0, 4.5, 1.5, 0))
    ]


def test_full_blocks_stay_cached_after_the_end_and_the_last_token_is_not_among_them() -> None:
    """The last token was sampled, but its keys and values were never computed."""
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 7, max_tokens=1), 0.0)
    advance(scheduler)
    assert scheduler.pool.num_cached == 1
    scheduler.add(make_request("b", 7, max_tokens=2), 0.0)
    advance(scheduler)
    advance(scheduler)
    assert scheduler.pool.num_cached == 3


# --- abort, failed steps, shutdown ------------------------------------------------------------------------------------


def test_abort_frees_at_once_twice_is_once_and_unknown_is_nothing() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", 9), 0.0)
    scheduler.add(make_request("b", 9), 0.0)
    advance(scheduler)
    for request_id in ("b", "a", "a", "nobody"):
        scheduler.abort(request_id)
        scheduler.check_integrity()
    assert (scheduler.pool.num_live, scheduler.has_work) == (0, False)
    assert scheduler.schedule(0.0).is_empty


def test_what_is_aborted_between_schedule_and_apply_is_passed_over() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, range(8), max_tokens=1), 0.0)
    output = scheduler.schedule(0.0)
    b = find(output, "b")
    scheduler.abort("b")
    scheduler.add(make_request("b", 3), 0.0)  # the id is free again, and means another sequence
    updates = scheduler.apply(output, [SampledToken(5)] * 3, 0.0)
    assert [update.request_id for update in updates] == ["a", "c"]
    assert (b.status, b.finish_reason, b.num_tokens) == (SequenceStatus.FINISHED, FinishReason.ABORT, 8)
    scheduler.check_integrity()
    assert shape(scheduler.schedule(0.0)) == [("b", 3)]


def test_an_aborted_sequences_unfinished_blocks_are_not_matchable() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", range(8)), 0.0)
    output = scheduler.schedule(0.0)
    scheduler.abort("a")
    scheduler.apply(output, [SampledToken(5)], 0.0)
    assert scheduler.pool.num_cached == 0


def test_a_step_that_failed_is_scheduled_again() -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 9), 0.0)
    failed = scheduler.schedule(0.0)
    again = scheduler.schedule(1.0)
    assert shape(failed) == shape(again) == [("a", 9)]
    with pytest.raises(AssertionError, match="only the last"):
        scheduler.apply(failed, [SampledToken(1)], 1.0)
    scheduler.apply(again, [SampledToken(1)], 1.0)
    with pytest.raises(AssertionError, match="only once"):
        scheduler.apply(again, [SampledToken(1)], 1.0)


def test_part_of_a_step_can_be_applied() -> None:
    scheduler = make_scheduler()
    for name in "abc":
        scheduler.add(make_request(name, 5), 0.0)
    output = scheduler.schedule(0.0)
    part = replace(output, scheduled=(output.scheduled[0], output.scheduled[2]))
    updates = scheduler.apply(part, [SampledToken(1), SampledToken(2)], 0.0)
    assert [update.request_id for update in updates] == ["a", "c"]
    assert shape(advance(scheduler)[0]) == [("a", 1), ("c", 1), ("b", 5)]


@pytest.mark.parametrize("tokens", [[None], [SampledToken(1), SampledToken(2)], []])
def test_tokens_must_fit_the_step(tokens: list[SampledToken | None]) -> None:
    scheduler = make_scheduler()
    scheduler.add(make_request("a", 5), 0.0)
    output = scheduler.schedule(0.0)
    with pytest.raises((AssertionError, ValueError)):
        scheduler.apply(output, tokens, 0.0)


def test_finish_all_ends_what_runs_and_what_waits() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(make_request("a", 5), 0.0)
    scheduler.add(make_request("b", 5, priority=-1), 0.0)
    advance(scheduler)
    assert scheduler.finish_all(FinishReason.ABORT) == [
        Update("a", finish_reason=FinishReason.ABORT),
        Update("b", finish_reason=FinishReason.ABORT),
    ]
    scheduler.check_integrity()
    assert (scheduler.has_work, scheduler.pool.num_live, scheduler.finish_all(FinishReason.ABORT)) == (False, 0, [])


# --- policies ---------------------------------------------------------------------------------------------------------

ARRIVALS = {0: (("A", 4), ("B", 2), ("C", 3)), 1: (("D", 2),), 2: (("E", 1),)}


@pytest.mark.parametrize(
    ("policy", "steps"),
    [
        ("continuous", ["ABC", "ABC", "ACD", "ADE"]),
        ("dynamic", ["ABC", "ABC", "AC", "A", "DE", "D"]),
        ("static", ["ABC", "ABC", "AC", "A", "DE", "D"]),
    ],
)
def test_policies_on_the_same_arrivals(policy: Policy, steps: list[str]) -> None:
    """Three slots, prompts of one token, so a step is one token of each."""
    scheduler = make_scheduler(max_num_seqs=3, policy=policy, static_wait=0.5)
    seen = []
    for number in range(20):
        for name, num_tokens in ARRIVALS.get(number, ()):
            scheduler.add(make_request(name, 1, max_tokens=num_tokens), float(number))
        if not scheduler.has_work:
            break
        output, _ = advance(scheduler, float(number))
        seen.append("".join(sorted(request_id for request_id, _ in shape(output))))
    assert seen == steps


def test_static_gives_an_empty_step_and_says_when_to_ask_again() -> None:
    scheduler = make_scheduler(max_num_seqs=3, policy="static", static_wait=0.5)
    assert scheduler.next_deadline() is None
    scheduler.add(make_request("a", 1, max_tokens=1), 1.0)
    output = scheduler.schedule(1.25)
    assert (output.is_empty, output.num_batched_tokens, scheduler.next_deadline()) == (True, 0, 1.5)
    assert scheduler.has_work
    output, _ = advance(scheduler, 1.5)
    assert shape(output) == [("a", 1)]
    assert scheduler.next_deadline() is None


def test_a_batch_is_whole_even_when_the_budget_splits_its_prompts() -> None:
    scheduler = make_scheduler(max_num_seqs=3, max_num_batched_tokens=8, policy="dynamic")
    for name in "abc":
        scheduler.add(make_request(name, 6, max_tokens=2), 0.0)
    assert shape(advance(scheduler)[0]) == [("a", 6), ("b", 2)]
    scheduler.add(make_request("late", 1, priority=-1, max_tokens=1), 0.0)
    assert shape(advance(scheduler)[0]) == [("a", 1), ("b", 4), ("c", 3)]
    assert shape(advance(scheduler)[0]) == [("b", 1), ("c", 3)]
    assert shape(advance(scheduler)[0]) == [("c", 1)]
    assert shape(advance(scheduler)[0]) == [("late", 1)]
