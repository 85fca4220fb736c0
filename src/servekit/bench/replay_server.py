"""A trace against a server: the experiment of a load test, with every request's own lengths instead of drawn ones."""

import random
from collections.abc import Iterator

from servekit.bench.arrivals import stream
from servekit.bench.client import Client, Planned
from servekit.bench.experiment import Experiment, Settings, Watcher
from servekit.bench.replay import Trace
from servekit.bench.result import Run, Target
from servekit.bench.workload import PromptSource, common_words, random_prompt

_TAKE_TOKEN_IDS = ("servekit", "vllm", "llama.cpp")
_TOKEN_IDS = range(1000, 5000)
"""Ids that every vocabulary of today has, and that are no special tokens."""


class Replay(Experiment):
    """Sends a trace's requests at their times, with prompts of their lengths made of random tokens.

    Servers that take token ids get exactly so many; others get as many common words, and their usage tells.
    """

    trace: Trace
    seed: int

    def _plan(self, rate: float | None, concurrency: int | None, repeat: int) -> Iterator[Planned]:
        rng = stream(self.seed, repeat, "replay")
        for index, request in enumerate(self.trace.requests):
            yield Planned(
                index,
                self._bodies.path,
                self._body(rng, request.prompt_tokens, request.output_tokens),
                scheduled_s=request.arrival_s,
                asked_tokens=request.output_tokens,
            )

    def _body(self, rng: random.Random, prompt_tokens: int, output_tokens: int) -> bytes:
        if self.target.kind in _TAKE_TOKEN_IDS:
            self._bodies.extra = {"prompt": [rng.choice(_TOKEN_IDS) for _ in range(prompt_tokens)]}
            return self._bodies.make(iter([""]), output_tokens)
        return self._bodies.make(iter([random_prompt(rng, prompt_tokens, common_words())]), output_tokens)


async def replay_to_server(
    client: Client, trace: Trace, watcher: Watcher, *, model: str | None, slo: dict[str, float], seed: int, warmup: int
) -> tuple[Target, Run]:
    """Whom it went to and what came of it. Raises ServekitError when the server cannot be measured so."""
    settings = Settings(
        prompts=PromptSource("replay", random_tokens=16),
        outputs=(2,),
        endpoint="completions",
        arrival="trace",
        trace=tuple(request.arrival_s for request in trace.requests),
        seed=seed,
        warmup=warmup,
        slo=slo,
    )
    experiment = await Replay.begin(client, model, settings, watcher)
    assert isinstance(experiment, Replay)
    experiment.trace, experiment.seed = trace, seed
    return experiment.target, await experiment.run()
