"""What a storm of requests leaves behind in the process: nothing, counted object by object."""

import asyncio
import gc
from collections import Counter

import pytest

from servekit.engine.engine import Engine
from servekit.server.app import create_app
from tests.engine.test_engine import running, until
from tests.server.client import COMPLETIONS, HandMadeRequest, http_client, state_with

pytestmark = pytest.mark.anyio

NUM_PROMPTS = 70
"""More than the prompts that the cache's history remembers."""


def living() -> Counter[str]:
    """How many instances there are of each of our classes, and how many tasks."""
    gc.collect()
    kinds = (type(thing) for thing in gc.get_objects())
    return Counter(
        f"{kind.__module__}.{kind.__qualname__}"
        for kind in kinds
        if str(kind.__module__).startswith(("servekit.", "sse_starlette")) or kind is asyncio.Task
    )


async def storm(engine: Engine) -> None:
    """Whole answers, streams, refusals, and clients that leave before and in the middle of an answer."""
    state = state_with(engine)  # type: ignore[arg-type]  # the real one, where most tests have a double
    app = create_app(state)

    def body(i: int, **fields: object) -> dict[str, object]:
        return {"prompt": [97 + i % 20, *range(30, 40 + i)], "temperature": 0, "max_tokens": 6, **fields}

    async with http_client(state) as client:
        asked = [body(i, stream=i % 2 == 0, n=0 if i % 7 == 0 else 1) for i in range(NUM_PROMPTS)]
        answers = await asyncio.gather(*(client.post(COMPLETIONS, json=fields) for fields in asked))
    assert {answer.status_code for answer in answers} == {200, 400}
    for i in range(20):
        request = HandMadeRequest(app, COMPLETIONS, body(i, stream=i % 2 == 0, max_tokens=20))
        task = asyncio.create_task(request.run())
        if i % 4 == 0:
            await until(lambda request=request: bool(request.sent))  # type: ignore[misc]  # bound at once
        request.disconnect()
        await task
    await until(lambda: engine.stats().open == 0)


async def test_a_storm_leaves_no_object_behind() -> None:
    async with running(queue_limit=1000) as engine:
        await storm(engine)  # what is kept on purpose is there after the first one
        before = living()
        await storm(engine)
        await storm(engine)
        after = living()
        assert engine.stats().live_blocks == 0
    grown = {name: (before[name], count) for name, count in after.items() if count > before[name]}
    assert not grown
