"""The embedding half of the engine thread over a runner without a model: room, waiting, failures and order."""

from collections.abc import Sequence

import numpy as np

from servekit.engine.core.embed_queue import EmbedInput, EmbedRequest
from servekit.engine.device.lazy import Deferred, LazyResult
from servekit.engine.embed_work import MAX_STEPS_WITHOUT_ROOM, EmbedUpdate, EmbedWork
from servekit.engine.step import FakeEmbedRunner, FloatArray

BUDGET = 10


def request(name: str, *lengths: int, token: int = 7) -> EmbedRequest:
    return EmbedRequest(name, tuple(EmbedInput((token,) * length) for length in lengths), 0.0)


def work_with(runner: FakeEmbedRunner, *requests: EmbedRequest) -> tuple[EmbedWork, list[EmbedUpdate]]:
    updates: list[EmbedUpdate] = []
    work = EmbedWork(runner, BUDGET, updates.extend)
    for item in requests:
        work.add(item)
    return work, updates


def test_a_step_takes_what_the_writing_half_has_left() -> None:
    runner = FakeEmbedRunner()
    work, _ = work_with(runner, request("a", *[2] * 8))
    work.step(5)
    work.step(0)
    assert runner.steps == [[2, 2], [2, 2, 2, 2, 2]]


def test_waiting_for_room_is_bounded() -> None:
    """A writing half that takes the whole budget for ever lets a chunk through every few steps."""
    runner = FakeEmbedRunner()
    work, updates = work_with(runner, request("a", 9, 9, 9))
    computed = []
    for _ in range(3 * (MAX_STEPS_WITHOUT_ROOM + 1)):
        work.step(BUDGET)
        computed.append(len(runner.steps))
    wait = MAX_STEPS_WITHOUT_ROOM
    assert computed == [*[0] * wait, *[1] * (wait + 1), *[2] * (wait + 1), 3]
    assert runner.steps == [[9]] * 3
    assert not work.has_work
    assert sorted(row for update in updates for row in update.rows) == [0, 1, 2]


def test_a_text_longer_than_the_room_waits_its_bound_too() -> None:
    runner = FakeEmbedRunner()
    work, _ = work_with(runner, request("a", 8))
    for _ in range(MAX_STEPS_WITHOUT_ROOM):
        work.step(5)
    assert runner.steps == []
    work.step(5)
    assert runner.steps == [[8]]


def test_a_text_longer_than_the_budget_goes_alone_when_nobody_writes() -> None:
    runner = FakeEmbedRunner()
    work, _ = work_with(runner, request("a", 25), request("b", 1))
    work.step(0)
    work.step(0)
    assert runner.steps == [[25], [1]]


def test_vectors_come_with_their_places() -> None:
    work, updates = work_with(FakeEmbedRunner(), request("a", 3, 1, 2), request("b", 4, token=9))
    work.step(0)
    assert [(update.request_id, update.rows) for update in updates] == [("a", (1, 2, 0)), ("b", (0,))]
    vectors = [update.vectors for update in updates]
    assert [[] if v is None else v.tolist() for v in vectors] == [[[7, 7, 1], [7, 7, 2], [7, 7, 3]], [[9, 9, 4]]]


def test_only_the_request_that_fails_is_lost() -> None:
    work, updates = work_with(
        FakeEmbedRunner(fail_on=66), request("good", 2), request("bad", 2, 2, 9, token=66), request("late", 1)
    )
    while work.has_work:
        work.step(0)
    ended = {update.request_id: update.error for update in updates}
    assert ended == {"good": None, "bad": "the model could not compute this request", "late": None}
    assert [update.request_id for update in updates if update.error] == ["bad"]


def test_an_aborted_request_is_not_computed() -> None:
    runner = FakeEmbedRunner()
    work, _ = work_with(runner, request("a", *[5] * 4), request("b", 5))
    work.step(0)
    work.abort("a")
    work.step(0)
    assert runner.steps == [[5, 5], [5]]
    assert not work.has_work


def test_ending_answers_what_waits() -> None:
    work, updates = work_with(FakeEmbedRunner(), request("a", 1), request("b", 1))
    work.end("over")
    assert [(update.request_id, update.error) for update in updates] == [("a", "over"), ("b", "over")]


class SlowRunner(FakeEmbedRunner):
    """Results that are ready only when the test says so, as a device's are."""

    def __init__(self) -> None:
        super().__init__()
        self.ready = False

    def embed(self, inputs: Sequence[EmbedInput]) -> LazyResult[FloatArray]:
        result = super().embed(inputs)
        return Deferred(lambda: self.ready, lambda: None, result.get)


def test_the_next_step_is_launched_while_the_last_still_runs() -> None:
    runner = SlowRunner()
    work, updates = work_with(runner, request("a", *[10] * 3))
    work.step(0)
    assert (len(runner.steps), len(updates)) == (1, 0)
    work.step(0)
    assert (len(runner.steps), len(updates)) == (2, 1)
    work.step(0)
    assert (len(runner.steps), len(updates)) == (3, 3)
    assert not work.has_work


def test_totals_are_counted() -> None:
    work, _ = work_with(FakeEmbedRunner(), request("a", *[5] * 3), request("b", 2))
    work.step(0)
    stats = work.stats()
    assert (stats.steps, stats.sequences, stats.tokens, stats.chunks, stats.waiting) == (1, 2, 10, 1, 2)
    work.step(0)
    stats = work.stats()
    assert (stats.steps, stats.sequences, stats.tokens, stats.chunks, stats.waiting) == (2, 4, 17, 3, 0)
    assert (stats.last_sequences, stats.last_tokens) == (2, 7)
    assert np.isfinite(stats.device_seconds)


def test_what_was_delivered_is_counted() -> None:
    """Who has an answer and asks for the numbers finds his texts in them."""
    seen: list[int] = []
    work = EmbedWork(FakeEmbedRunner(), BUDGET, lambda updates: seen.append(work.stats().sequences))
    work.add(request("a", *[10] * 3))
    while work.has_work:
        work.step(0)
    assert seen == [1, 2, 3]
