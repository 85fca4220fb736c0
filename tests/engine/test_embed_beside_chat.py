"""The demo models on one engine thread: while a stream is written, steps of both halves take turns exactly."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from servekit.config import EngineConfig
from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.core.request import Request, SamplingParams
from servekit.engine.core.scheduler import ScheduleOutput
from servekit.engine.load import load_engine, open_model
from servekit.engine.open_embedder import open_embedder
from servekit.store.resolve import find_model

pytestmark = [pytest.mark.demo, pytest.mark.anyio]

BUDGET = 256
NUM_TOKENS = 30


async def test_steps_of_chat_and_embeddings_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(dtype="float32", device="cpu", threads=1, parallel=2, max_model_len=512)
    loaded = load_engine(open_model(find_model("demo")), config, embedder=open_embedder(find_model("demo-embedding")))
    engine = loaded.engine
    embedder = engine.embedder
    assert embedder is not None
    journal: list[tuple[str, int]] = []
    step, embed = loaded.runner.step, embedder.runner.embed

    def noted_step(output: ScheduleOutput) -> Any:
        journal.append(("chat", output.num_batched_tokens))
        return step(output)

    def noted_embed(inputs: Sequence[EmbedInput]) -> Any:
        journal.append(("texts", sum(len(text.token_ids) for text in inputs)))
        return embed(inputs)

    monkeypatch.setattr(loaded.runner, "step", noted_step)
    monkeypatch.setattr(embedder.runner, "embed", noted_embed)
    texts = ["the river runs past old houses " * (1 + i % 4) for i in range(600)]
    engine.start()
    try:
        alone = await embedder.embed(await embedder.encode(texts[:8]))
        journal.clear()
        inputs = await embedder.encode(texts)
        embedding = asyncio.create_task(embedder.embed(inputs))
        await asyncio.sleep(0)
        sampling = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
        async with engine.generate(Request("chat", tuple(range(20, 60)), sampling, 0.0)) as chunks:
            async for _ in chunks:
                pass
        first, last = (pick(i for i, (kind, _) in enumerate(journal) if kind == "chat") for pick in (min, max))
        embedded = await embedding
    finally:
        await engine.close()

    beside = journal[first : last + 1]
    assert [kind for kind, _ in beside] == ["chat", "texts"] * (NUM_TOKENS - 1) + ["chat"]
    assert beside[0] == ("chat", 40)
    assert {size for kind, size in beside[1:] if kind == "chat"} == {1}
    # A chunk takes all that the step before it has left, but for less than one more text.
    longest = max(len(text.token_ids) for text in inputs)
    for (_, written), (_, read) in zip(beside[::2], beside[1::2], strict=False):
        assert BUDGET - written - longest < read <= BUDGET - written
    np.testing.assert_allclose(embedded.vectors[:8], alone.vectors, atol=1e-5)
