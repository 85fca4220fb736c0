"""The async facade over the engine thread, with a runner that echoes prompts instead of a model."""

import asyncio
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from servekit.engine.core.request import FinishReason, Request, SamplingParams
from servekit.engine.core.scheduler import ScheduleOutput, Scheduler, SchedulerConfig
from servekit.engine.device.lazy import LazyResult
from servekit.engine.engine import Engine
from servekit.engine.generation import Generation
from servekit.engine.output import Chunk, SamplingDefaults
from servekit.engine.step import FakeRunner, Runner, StepTokens
from servekit.errors import (
    ContextLengthError,
    InputError,
    KvCapacityError,
    OverloadedError,
    ServekitError,
    UnavailableError,
)
from tests.engine.text.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

pytestmark = pytest.mark.anyio


class GatedRunner(FakeRunner):
    """Every step waits for one `release()`, so that a test can look between steps."""

    def __init__(self) -> None:
        super().__init__()
        self._permits = threading.Semaphore(0)
        self.entered = threading.Semaphore(0)

    def step(self, output: ScheduleOutput) -> LazyResult[StepTokens]:
        self.entered.release()
        assert self._permits.acquire(timeout=20), "the test never released this step"
        return super().step(output)

    def release(self, num_steps: int = 1) -> None:
        self._permits.release(num_steps)


@asynccontextmanager
async def running(runner: Runner | None = None, queue_limit: int = 100, **config: Any) -> AsyncIterator[Engine]:
    limits: dict[str, Any] = {
        "max_num_seqs": 4,
        "max_num_batched_tokens": 64,
        "max_model_len": 100,
        "num_blocks": 65,
        "block_size": 4,
        "eos_token_ids": frozenset({EOS}),
    }
    engine = Engine(
        model_name="echo",
        scheduler=Scheduler(SchedulerConfig(**{**limits, **config})),
        runner=runner or FakeRunner(),
        tokenizer=byte_tokenizer(),
        vocab_size=VOCAB_SIZE,
        max_model_len=100,
        defaults=SamplingDefaults(),
        queue_limit=queue_limit,
    )
    engine.start()
    try:
        yield engine
    finally:
        if isinstance(runner, GatedRunner):
            runner.release(10_000)
        await engine.close()


def request(text: str | bytes = "ab", request_id: str = "r", **params: Any) -> Request:
    ids = tuple(text.encode() if isinstance(text, str) else text)
    return Request(request_id, ids, SamplingParams(**{"temperature": 0.0, "max_tokens": 8, **params}), 0.0)


async def collect(generation: Generation) -> tuple[str, Chunk]:
    chunks = [chunk async for chunk in generation]
    return "".join(chunk.text for chunk in chunks), chunks[-1]


async def until(condition: Callable[[], bool]) -> None:
    """Yield to the event loop until `condition` holds; the engine thread brings it about."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.001)


async def test_an_answer_in_text() -> None:
    async with running() as engine:
        text, last = await collect(engine.generate(request("ab", max_tokens=5)))
    assert text == "ababa"
    assert last.finish_reason is FinishReason.LENGTH
    assert (last.usage.prompt_tokens, last.usage.completion_tokens, last.usage.cached_tokens) == (2, 5, 0)
    assert last.timings is not None


async def test_many_at_once_are_not_mixed_up() -> None:
    async with running() as engine:
        prompts = [f"<{i}>" for i in range(40)]
        generations = [engine.generate(request(p, p, max_tokens=2 * len(p))) for p in prompts]
        answers = [text for text, _ in await asyncio.gather(*map(collect, generations))]
        assert answers == [2 * p for p in prompts]
        await until(lambda: engine.stats().live_blocks == 0)


async def test_characters_arrive_whole() -> None:
    async with running() as engine:
        generation = engine.generate(request("é日😀", max_tokens=9))
        chunks = [chunk async for chunk in generation]
    assert [chunk.text for chunk in chunks] == ["", "é", "", "", "日", "", "", "", "😀"]


async def test_a_character_cut_by_the_token_limit_ends_as_the_replacement_character() -> None:
    async with running() as engine:
        assert (await collect(engine.generate(request("😀", max_tokens=6))))[0] == "😀\ufffd"


async def test_a_stop_string_across_tokens_ends_the_answer_before_it_and_frees_the_slot() -> None:
    async with running() as engine:
        text, last = await collect(engine.generate(request("hello world", stop=("lo wo",), max_tokens=50)))
        assert (text, last.finish_reason, last.stop_reason) == ("hel", FinishReason.STOP, "lo wo")
        assert last.usage.completion_tokens == 8
        assert last.timings is not None
        await until(lambda: engine.stats().live_blocks == 0)


async def test_a_stop_string_is_not_looked_for_before_min_tokens() -> None:
    async with running() as engine:
        text, _ = await collect(engine.generate(request("abc", stop=("b",), min_tokens=3, max_tokens=9)))
    assert text == "abca"


async def test_a_stop_string_that_does_not_come_is_given_back_at_the_end() -> None:
    async with running() as engine:
        text, last = await collect(engine.generate(request("abc", stop=("cab!",), max_tokens=6)))
    assert (text, last.finish_reason) == ("abcabc", FinishReason.LENGTH)


async def test_a_stop_token_is_counted_but_not_shown() -> None:
    async with running() as engine:
        eos = Request("r", (97, 98, EOS), SamplingParams(temperature=0.0), 0.0)
        text, last = await collect(engine.generate(eos))
        assert (text, last.finish_reason, last.stop_reason) == ("ab", FinishReason.STOP, EOS)
        assert (last.usage.completion_tokens, last.token_ids) == (3, ())
        other, last = await collect(engine.generate(request("abc", "s", stop_token_ids=frozenset({99}))))
        assert (other, last.stop_reason) == ("ab", 99)


async def test_logprobs_belong_to_visible_tokens() -> None:
    async with running() as engine:
        chunks = [c async for c in engine.generate(request("abc", stop=("c",)))]
    assert [token_id for chunk in chunks for token_id in chunk.token_ids] == [97, 98, 99]


async def test_closing_a_generation_frees_its_slot_for_the_next() -> None:
    runner = GatedRunner()
    async with running(runner, max_num_seqs=1) as engine:
        first = engine.generate(request("ab", "first", max_tokens=90))
        runner.release(3)
        for _ in range(3):
            await anext(first)
        second = engine.generate(request("xy", "second", max_tokens=2))
        await first.aclose()
        await first.aclose()
        # One more step of the first may be under way; then the second runs, though the first wanted 87 more.
        runner.release(3)
        assert (await collect(second))[0] == "xy"
        await until(lambda: engine.stats().open == 0)


async def test_leaving_the_context_aborts() -> None:
    async with running(max_num_seqs=1) as engine:
        async with engine.generate(request("ab", max_tokens=90)) as generation:
            await anext(generation)
        await until(lambda: (engine.stats().running, engine.stats().live_blocks) == (0, 0))


async def test_one_wake_up_a_step_however_many_sequences(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    wake_ups: list[object] = []
    original = loop.call_soon_threadsafe

    def counted(callback: Callable[..., object], *args: Any, **kwargs: Any) -> asyncio.Handle:
        wake_ups.append(callback)
        return original(callback, *args, **kwargs)

    runner = GatedRunner()
    async with running(runner) as engine:
        generations = [engine.generate(request("ab", str(i), max_tokens=5)) for i in range(4)]
        await until(lambda: runner.entered.acquire(blocking=False))
        monkeypatch.setattr(loop, "call_soon_threadsafe", counted)
        runner.release(10)
        await asyncio.gather(*map(collect, generations))
        assert len(wake_ups) <= runner.num_steps
        monkeypatch.undo()


async def test_a_request_that_cannot_be_computed_fails_alone() -> None:
    async with running(FakeRunner(fail_on=ord("!"))) as engine:
        good = [engine.generate(request("ok", str(i), max_tokens=6)) for i in range(3)]
        bad = engine.generate(request("no!", "bad", max_tokens=6))
        assert [text for text, _ in await asyncio.gather(*map(collect, good))] == ["okokok"] * 3
        _, last = await collect(bad)
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the model could not compute this request")
        assert engine.is_alive
        assert (await collect(engine.generate(request("ab", "after", max_tokens=2))))[0] == "ab"
        await until(lambda: engine.stats().live_blocks == 0)


async def test_a_dead_engine_fails_what_runs_and_refuses_what_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    async with running() as engine:
        monkeypatch.setattr(Scheduler, "apply", broken)
        _, last = await collect(engine.generate(request()))
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the engine has stopped")
        assert not engine.is_alive
        with pytest.raises(UnavailableError, match="the engine has stopped"):
            engine.generate(request(request_id="later"))


async def test_closing_lets_running_answers_end_within_the_grace_and_refuses_new_ones() -> None:
    runner = GatedRunner()
    async with running(runner) as engine:
        generation = engine.generate(request("ab", max_tokens=3))
        closing = asyncio.create_task(engine.close(grace=20))
        await asyncio.sleep(0)
        with pytest.raises(UnavailableError, match="shutting down"):
            engine.generate(request(request_id="late"))
        runner.release(3)
        assert (await collect(generation))[0] == "aba"
        await closing


async def test_closing_fails_what_outlasts_the_grace() -> None:
    runner = GatedRunner()
    async with running(runner) as engine:
        generation = engine.generate(request("ab", max_tokens=3))
        closing = asyncio.create_task(engine.close(grace=0.01))
        _, last = await collect(generation)
        assert (last.finish_reason, last.error) == (FinishReason.ERROR, "the server is shutting down")
        runner.release(3)
        await closing


class TestAdmission:
    """Refused at once, before anything is computed."""

    @pytest.mark.parametrize(
        ("bad", "kind", "param"),
        [
            (request(""), InputError, "prompt"),
            (request("a" * 100), ContextLengthError, "messages"),
            (Request("r", (VOCAB_SIZE,), SamplingParams(), 0.0), InputError, "prompt"),
            (Request("r", (-1,), SamplingParams(), 0.0), InputError, "prompt"),
            (request(logit_bias={VOCAB_SIZE: 1.0}), InputError, "logit_bias"),
            (request(stop_token_ids=frozenset({VOCAB_SIZE})), InputError, "stop_token_ids"),
        ],
    )
    async def test_what_can_never_run(self, bad: Request, kind: type[ServekitError], param: str) -> None:
        async with running() as engine:
            with pytest.raises(kind) as caught:
                engine.generate(bad)
            assert caught.value.param == param
            assert engine.stats().open == 0

    async def test_a_prompt_larger_than_the_pool_names_both_numbers_and_blocks_nobody(self) -> None:
        async with running(num_blocks=6) as engine:
            with pytest.raises(KvCapacityError) as caught:
                engine.generate(request("a" * 40))
            assert (caught.value.num_blocks_needed, caught.value.num_blocks_total) == (11, 5)
            assert (await collect(engine.generate(request("ab", max_tokens=2))))[0] == "ab"

    async def test_the_waiting_line_has_an_end(self) -> None:
        runner = GatedRunner()
        async with running(runner, queue_limit=2, max_num_seqs=1) as engine:
            accepted = [engine.generate(request("ab", str(i), max_tokens=1)) for i in range(3)]
            with pytest.raises(OverloadedError) as caught:
                engine.generate(request("ab", "one too many"))
            assert (caught.value.http_status, caught.value.retry_after_s) == (429, 1)
            runner.release(3)
            assert [text for text, _ in await asyncio.gather(*map(collect, accepted))] == ["a"] * 3

    async def test_a_text_that_is_far_too_long_is_refused_without_tokenizing(self) -> None:
        async with running() as engine:
            engine.tokenizer.max_token_chars = 1
            with pytest.raises(ContextLengthError, match="at least 100000000 tokens"):
                await engine.encode_text("a" * 100_000_000)


async def test_slots_show_what_runs() -> None:
    runner = GatedRunner()
    async with running(runner, max_num_seqs=2) as engine:
        assert await engine.slots() == []
        generations = [engine.generate(request("abcdefgh", str(i), max_tokens=9)) for i in range(3)]
        runner.release(2)
        for generation in generations[:2]:
            await anext(generation)
        for _ in range(3):
            assert await asyncio.to_thread(runner.entered.acquire, timeout=20)
        # The third step is held: the answer comes when it has been let go.
        asking = asyncio.create_task(engine.slots())
        await asyncio.sleep(0)
        runner.release(1)
        rows = await asking
        assert [(row.slot, row.request_id, row.state, row.prompt_tokens) for row in rows] == [
            (0, "0", "decode", 8),
            (1, "1", "decode", 8),
        ]
        assert all(row.output_tokens in (2, 3) and row.blocks == 3 for row in rows)
        assert all(row.queue_ms >= 0 and row.prefill_ms > 0 and row.decode_ms >= 0 for row in rows)


async def test_asking_a_closed_engine_for_its_slots_is_refused() -> None:
    async with running() as engine:
        await engine.close()
        with pytest.raises(UnavailableError):
            await engine.slots()


async def test_seeds_are_drawn_for_choices_that_have_none() -> None:
    async with running() as engine:
        first, second = (engine.generate(request("ab", name, temperature=1.0)).request for name in "xy")
        assert first.sampling.seed is not None
        assert first.sampling.seed != second.sampling.seed
        assert engine.generate(request("ab", "z")).request.sampling.seed is None


async def test_chat_and_text_are_encoded() -> None:
    async with running() as engine:
        assert await engine.encode_text("ab") == (97, 98)
        messages = [{"role": "user", "content": "a"}]
        assert await engine.encode_chat(messages) == (257, *b"user:a", 258, 257)
