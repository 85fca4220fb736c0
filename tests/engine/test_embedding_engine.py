"""The async facade with both halves: who waits for whom, and what becomes of requests that end early."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.core.scheduler import ScheduleOutput, Scheduler, SchedulerConfig
from servekit.engine.device.lazy import LazyResult
from servekit.engine.embedder import Embedder
from servekit.engine.engine import Engine
from servekit.engine.output import SamplingDefaults
from servekit.engine.spec.pooling import EmbeddingSpec
from servekit.engine.step import FakeEmbedRunner, FakeRunner, FloatArray, StepTokens
from servekit.engine.text.input_encoder import InputEncoder
from servekit.errors import (
    EngineError,
    InputError,
    InputLengthError,
    OverloadedError,
    UnavailableError,
    UnsupportedError,
)
from tests.engine.test_engine import request
from tests.engine.text.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

pytestmark = pytest.mark.anyio

_SPEC = EmbeddingSpec(pooling="mean", normalise=True, reason="", prompts={"query": "0 1 ", "passage": "2 "})


def digits() -> InputEncoder:
    """Each word of digits is the token of that number."""
    backend = tokenizers.Tokenizer(models.WordLevel({str(i): i for i in range(100)}, unk_token="99"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return InputEncoder(backend)


def embedder_with(runner: FakeEmbedRunner, queue_limit: int = 10, spec: EmbeddingSpec = _SPEC) -> Embedder:
    return Embedder(
        model_name="digits",
        encoder=digits(),
        runner=runner,
        spec=spec,
        vocab_size=100,
        max_tokens=20,
        size=3,
        queue_limit=queue_limit,
    )


class Journal:
    """Which half computed what, in order: `w` and `e` with the tokens of the step."""

    def __init__(self) -> None:
        self.steps: list[tuple[str, int]] = []


class WritingRunner(FakeRunner):
    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal
        self.may_step = threading.Event()
        self.may_step.set()

    def step(self, output: ScheduleOutput) -> LazyResult[StepTokens]:
        assert self.may_step.wait(20), "the test never let this step go"
        self._journal.steps.append(("w", output.num_batched_tokens))
        return super().step(output)


class EmbeddingRunner(FakeEmbedRunner):
    def __init__(self, journal: Journal) -> None:
        super().__init__()
        self._journal = journal

    def embed(self, inputs: Sequence[EmbedInput]) -> LazyResult[FloatArray]:
        self._journal.steps.append(("e", sum(len(text.token_ids) for text in inputs)))
        return super().embed(inputs)


@asynccontextmanager
async def running(runner: FakeRunner, embedder: Embedder) -> AsyncIterator[Engine]:
    limits = SchedulerConfig(
        max_num_seqs=4,
        max_num_batched_tokens=64,
        max_model_len=400,
        num_blocks=401,
        block_size=4,
        eos_token_ids=frozenset({EOS}),
    )
    engine = Engine(
        model_name="echo",
        scheduler=Scheduler(limits),
        runner=runner,
        tokenizer=byte_tokenizer(),
        vocab_size=VOCAB_SIZE,
        max_model_len=400,
        defaults=SamplingDefaults(),
        queue_limit=10,
        embedder=embedder,
    )
    engine.start()
    try:
        yield engine
    finally:
        await engine.close()


async def test_between_two_decode_steps_there_is_one_embedding_chunk_at_most() -> None:
    """2,000 texts do not hold up a stream for more than one chunk, and they are all embedded while it runs."""
    journal = Journal()
    writing = WritingRunner(journal)
    async with running(writing, embedder_with(EmbeddingRunner(journal))) as engine:
        assert engine.embedder is not None
        inputs = await engine.embedder.encode(["5 " * (1 + i % 20) for i in range(2000)])
        # No step ends before the texts are there, so nearly the whole stream is written beside them.
        writing.may_step.clear()
        generation = engine.generate(request("ab", "stream", max_tokens=390, ignore_eos=True))
        embedding = asyncio.create_task(engine.embedder.embed(inputs))
        await asyncio.sleep(0)
        writing.may_step.set()
        async for _ in generation:
            pass
        embedded = await embedding
        assert embedded.vectors[:, 2].tolist() == [1 + i % 20 for i in range(2000)]
    while_writing = [
        kind for kind, _ in journal.steps[: 1 + max(i for i, s in enumerate(journal.steps) if s[0] == "w")]
    ]
    assert "ee" not in "".join(while_writing)
    assert while_writing.count("e") > 100
    assert max(tokens for kind, tokens in journal.steps if kind == "e") <= 64
    # What decoding took is taken off the chunk beside it.
    beside = [b for a, b in zip(journal.steps, journal.steps[1:], strict=False) if (a[0], b[0]) == ("w", "e")]
    assert max(tokens for _, tokens in beside) <= 63


async def test_texts_and_ids_get_the_same_vectors_in_input_order() -> None:
    async with running(FakeRunner(), embedder_with(FakeEmbedRunner())) as engine:
        assert engine.embedder is not None
        inputs = await engine.embedder.encode(["3 1 4", (1, 5), "9"])
        assert [text.token_ids for text in inputs] == [(3, 1, 4), (1, 5), (9,)]
        embedded = await engine.embedder.embed(inputs)
        assert embedded.vectors.tolist() == [[3, 4, 3], [1, 5, 2], [9, 9, 1]]


async def test_prompts_stand_before_texts() -> None:
    embedder = embedder_with(FakeEmbedRunner())
    assert [t.token_ids for t in await embedder.encode(["5"], input_type="query")] == [(0, 1, 5)]
    assert [t.token_ids for t in await embedder.encode(["5"], input_type="document")] == [(2, 5)]
    assert [t.token_ids for t in await embedder.encode(["5"])] == [(5,)]
    plain = embedder_with(FakeEmbedRunner(), spec=EmbeddingSpec(pooling="mean", normalise=True, reason=""))
    assert [t.token_ids for t in await plain.encode(["5"], input_type="query")] == [(5,)]
    other = embedder_with(
        FakeEmbedRunner(), spec=EmbeddingSpec(pooling="mean", normalise=True, reason="", prompts={"sts": "1 "})
    )
    with pytest.raises(InputError, match="only sts"):
        await other.encode(["5"], input_type="query")


async def test_too_long_names_the_place_and_both_numbers_and_may_be_cut_on_request() -> None:
    embedder = embedder_with(FakeEmbedRunner())
    long = "1 " + "7 " * 20 + "3"
    with pytest.raises(InputLengthError) as caught:
        await embedder.encode(["5", long])
    assert (caught.value.index, caught.value.num_tokens, caught.value.max_tokens) == (1, 22, 20)
    assert [t.token_ids for t in await embedder.encode([long], truncate="right")] == [(1, *[7] * 19)]
    assert [t.token_ids for t in await embedder.encode([long], truncate="left")] == [(*[7] * 19, 3)]
    assert len((await embedder.encode(["7 " * 20]))[0].token_ids) == 20


@pytest.mark.parametrize("text", ["", (), (100,), (-1,)])
async def test_what_cannot_be_read_is_refused_by_its_place(text: str | tuple[int, ...]) -> None:
    with pytest.raises(InputError, match=r"input\[1\]"):
        await embedder_with(FakeEmbedRunner()).encode(["5", text])


async def test_sizes() -> None:
    embedder = embedder_with(FakeEmbedRunner())
    embedder.check_size(None)
    embedder.check_size(3)
    with pytest.raises(UnsupportedError):
        embedder.check_size(2)
    with pytest.raises(InputError, match="at most 3"):
        embedder.check_size(4)
    nested = EmbeddingSpec(pooling="mean", normalise=True, reason="", matryoshka=(2, 3))
    embedder = embedder_with(FakeEmbedRunner(), spec=nested)
    embedder.check_size(2)
    with pytest.raises(InputError, match="one of 2, 3"):
        embedder.check_size(1)
    async with running(FakeRunner(), embedder) as engine:
        assert engine.embedder is not None
        embedded = await engine.embedder.embed([EmbedInput((3, 4))])
    assert embedder.cut(embedded.vectors, 2).tolist() == [[pytest.approx(0.6), pytest.approx(0.8)]]


async def test_a_full_line_is_refused() -> None:
    embedder = embedder_with(FakeEmbedRunner(), queue_limit=0)
    async with running(FakeRunner(), embedder) as engine:
        first = asyncio.create_task(embedder.embed([EmbedInput((5,))] * 50))
        await asyncio.sleep(0)
        assert engine.stats().open == 1
        with pytest.raises(OverloadedError):
            await embedder.embed([EmbedInput((5,))])
        assert (await first).vectors.shape == (50, 3)
        assert engine.stats().open == 0


async def test_a_request_that_fails_says_so_and_the_next_is_served() -> None:
    embedder = embedder_with(FakeEmbedRunner(fail_on=66))
    async with running(FakeRunner(), embedder):
        with pytest.raises(EngineError):
            await embedder.embed([EmbedInput((66,)), EmbedInput((5,))])
        assert (await embedder.embed([EmbedInput((5,))])).vectors.tolist() == [[5, 5, 1]]


async def test_a_closed_engine_embeds_nothing() -> None:
    embedder = embedder_with(FakeEmbedRunner())
    async with running(FakeRunner(), embedder) as engine:
        await engine.close()
        with pytest.raises(UnavailableError):
            await embedder.embed([EmbedInput((5,))])
        assert embedder.num_open == 0


async def test_cancelling_leaves_nothing_behind() -> None:
    embedder = embedder_with(FakeEmbedRunner())
    async with running(FakeRunner(), embedder) as engine:
        task = asyncio.create_task(embedder.embed([EmbedInput((5,) * 20)] * 1000))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert engine.stats().open == 0
        assert (await embedder.embed([EmbedInput((5,))])).vectors.tolist() == [[5, 5, 1]]
