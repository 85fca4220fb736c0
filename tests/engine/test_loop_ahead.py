"""The engine thread one step ahead of its device, over a runner without a model."""

import asyncio
import threading

import pytest

from servekit.engine.core.request import FinishReason, Request, Update
from servekit.engine.core.scheduler import ScheduleOutput, Scheduler, SchedulerConfig
from servekit.engine.device.lazy import Deferred, LazyResult
from servekit.engine.generation import Generation
from servekit.engine.loop import Add, EngineLoop, Stop
from servekit.engine.step import FakeRunner, StepTokens
from tests.engine.test_engine import request, running, until
from tests.engine.text.byte_tokenizer import EOS

pytestmark = pytest.mark.anyio


class AheadRunner(FakeRunner):
    """Echoes a step ahead. `journal` says which step was launched (+) and which was read (-), counted from 1.

    `lose` makes the reading of so many results fail that were computed with others, as a device's fault would.
    """

    def __init__(self, *, fail_on: int | None = None, lose: int = 0) -> None:
        super().__init__(fail_on=fail_on, steps_ahead=1)
        self.journal: list[int] = []
        self._lose = lose

    def step(self, output: ScheduleOutput) -> LazyResult[StepTokens]:
        tokens = super().step(output).get()
        number = self.num_steps
        self.journal.append(number)

        def read() -> StepTokens:
            self.journal.append(-number)
            if self._lose and len(output.scheduled) > 1:
                self._lose -= 1
                raise RuntimeError("the result was lost")
            return tokens

        return Deferred(lambda: False, lambda: None, read)


async def text_of(generation: Generation) -> tuple[str, FinishReason | None]:
    text, reason = "", None
    async with generation as chunks:
        async for chunk in chunks:
            text += chunk.text
            reason = chunk.finish_reason
    return text, reason


async def test_a_step_is_launched_before_the_one_before_it_is_read() -> None:
    runner = AheadRunner()
    async with running(runner) as engine:
        assert await text_of(engine.generate(request("abc", max_tokens=4))) == ("abca", FinishReason.LENGTH)
    assert runner.journal == [1, 2, -1, 3, -2, 4, -3, -4]


async def test_many_at_once_get_their_own_answers() -> None:
    async with running(AheadRunner()) as engine:
        names = [f"request {i:02}" for i in range(20)]
        answers = await asyncio.gather(
            *(text_of(engine.generate(request(name, name, max_tokens=3 + i))) for i, name in enumerate(names))
        )
        for i, (name, (text, _)) in enumerate(zip(names, answers, strict=True)):
            assert text == (name * 3)[: 3 + i]


async def test_the_token_behind_a_stop_is_never_seen() -> None:
    runner = AheadRunner()
    async with running(runner) as engine:
        prompt = Request("r", (*b"ab", EOS, *b"cd"), request(max_tokens=50).sampling, 0.0)
        assert await text_of(engine.generate(prompt)) == ("ab", FinishReason.STOP)
        # The next one is not disturbed by what was computed too much.
        assert await text_of(engine.generate(request("xy", "s", max_tokens=4))) == ("xyxy", FinishReason.LENGTH)
        await until(lambda: engine.stats().live_blocks == 0)
    assert runner.num_steps == 4 + 4


@pytest.mark.parametrize("lose", [0, 3])
async def test_a_failing_request_takes_nobody_with_it(lose: int) -> None:
    """Whether the launch fails or the reading, what can be computed alone is, and the answers stay right."""
    async with running(AheadRunner(fail_on=ord("!"), lose=lose)) as engine:
        good = [engine.generate(request(f"good {i}", f"g{i}", max_tokens=30)) for i in range(3)]
        bad = engine.generate(request("bad!", "bad"))
        texts = await asyncio.gather(*(text_of(generation) for generation in good))
        assert [text for text, _ in texts] == [(f"good {i}" * 5)[:30] for i in range(3)]
        assert await text_of(bad) == ("", FinishReason.ERROR)


async def test_an_abort_between_launch_and_reading_frees_the_slot() -> None:
    async with running(AheadRunner(), max_num_seqs=1) as engine:
        async with engine.generate(request("abc", "first", max_tokens=90)) as chunks:
            async for _ in chunks:
                break
        assert await text_of(engine.generate(request("xyz", "second", max_tokens=3))) == ("xyz", FinishReason.LENGTH)


async def test_closing_with_a_step_in_flight_ends_the_thread() -> None:
    before = threading.active_count()
    async with running(AheadRunner()) as engine:
        generation = engine.generate(request("abc", max_tokens=90))
    text, reason = await text_of(generation)
    assert text == ("abc" * 30)[: len(text)]
    assert reason is not FinishReason.LENGTH
    assert threading.active_count() <= before + 1


def scheduler() -> Scheduler:
    return Scheduler(
        SchedulerConfig(
            max_num_seqs=2,
            max_num_batched_tokens=256,
            max_model_len=256,
            num_blocks=64,
            block_size=4,
            eos_token_ids=frozenset({EOS}),
        )
    )


def test_the_time_of_a_prompt_token_is_that_of_steps_over_their_tokens() -> None:
    """A short prompt's step takes nearly what a long one's does; its tokens must not speak for all."""
    loop = EngineLoop(scheduler(), FakeRunner(), lambda updates: None, lambda error: None)
    loop._record_step(ScheduleOutput((), num_batched_tokens=10, num_preempted=0), 0.1)
    loop._record_step(ScheduleOutput((), num_batched_tokens=200, num_preempted=0), 0.2)
    # Means in which the last step has a fifth: 0.12 s and 48 tokens.
    assert loop._snapshot().prefill_token_seconds == pytest.approx(0.12 / 48)


def test_what_was_delivered_is_counted() -> None:
    """Who has an answer and asks for the numbers finds its step in them, and its slot free."""
    seen: list[tuple[int, int]] = []
    ended = threading.Event()

    def deliver(updates: list[Update]) -> None:
        stats = loop.stats()
        seen.append((stats.num_steps, stats.scheduler.num_running))
        if any(update.finish_reason for update in updates):
            ended.set()

    loop = EngineLoop(scheduler(), FakeRunner(), deliver, lambda error: None)
    loop.start()
    loop.send(Add(request("abc", max_tokens=3)))
    assert ended.wait(60)
    loop.send(Stop())
    loop.join()
    assert seen[:3] == [(1, 1), (2, 1), (3, 0)]
