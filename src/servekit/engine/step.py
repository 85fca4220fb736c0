"""The seam between the engine loop and whatever computes a step: a model on a device, or a test double.

It imports no torch, so that the loop, the facade and the server run in tests without a model.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.core.request import SampledToken
from servekit.engine.core.scheduler import ScheduleOutput
from servekit.engine.core.sequence import Sequence
from servekit.engine.device.lazy import LazyResult, Ready

StepTokens = Seq[SampledToken | None]
"""One entry for each scheduled sequence; None where its prefill is not finished yet."""


@dataclass(frozen=True, slots=True)
class GraphStats:
    """What became of steps where a device can record them. All but `graphs` and `bytes` count from the start.

    `warm_ups` ran piece by piece on the padded batch, `eager` as they were, `replays` as one recorded piece.
    """

    graphs: int = 0
    bytes: int = 0
    captures: int = 0
    capture_seconds: float = 0.0
    replays: int = 0
    warm_ups: int = 0
    eager: int = 0
    failures: int = 0
    evictions: int = 0


class AllowedTokens(Protocol):
    """What may follow in sequences that have a grammar (engine/grammar.py)."""

    def allowed(self, seqs: Seq[Sequence], pending: Mapping[Sequence, int]) -> npt.NDArray[np.bool_]:
        """One row of the vocabulary for each of `seqs`; `pending` are last tokens that no sequence holds yet."""
        ...


def spread(output: ScheduleOutput, chosen: Seq[SampledToken]) -> StepTokens:
    """The tokens that were `chosen` for those who have caught up, as one entry for each scheduled sequence."""
    tokens = iter(chosen)
    return [next(tokens) if item.needs_sample else None for item in output.scheduled]


class Runner(Protocol):
    """Computes one step. `step` may return before the device is done; `close` frees what it holds.

    `steps_ahead` is how many steps may be launched before the first of them is read: 0 where a step is done when it
    returns. A step that was launched behind another takes that one's tokens from the device.
    """

    @property
    def steps_ahead(self) -> int: ...

    def graph_stats(self) -> GraphStats: ...

    def step(self, output: ScheduleOutput) -> LazyResult[StepTokens]: ...

    def close(self) -> None: ...


class FakeRunner:
    """A Runner without a model: token i of an answer is the prompt's token i, over and over.

    So an answer proves which prompt it belongs to. `fail_on` makes every step that contains that prompt token raise,
    as a broken request would.
    """

    def __init__(self, *, fail_on: int | None = None, steps_ahead: int = 0) -> None:
        self._fail_on = fail_on
        self.steps_ahead = steps_ahead
        self.num_steps = 0

    def step(self, output: ScheduleOutput) -> LazyResult[StepTokens]:
        """Echo the next prompt token of every sequence whose prefill is complete."""
        self.num_steps += 1
        tokens: list[SampledToken | None] = []
        for scheduled in output.scheduled:
            seq = scheduled.seq
            prompt = seq.request.prompt_token_ids
            if self._fail_on is not None and self._fail_on in prompt:
                raise RuntimeError(f"token {self._fail_on} cannot be computed")
            index = scheduled.end - seq.num_prompt_tokens
            tokens.append(SampledToken(prompt[index % len(prompt)]) if scheduled.needs_sample else None)
        return Ready(tokens)

    def graph_stats(self) -> GraphStats:
        """Nothing is recorded."""
        return GraphStats()

    def close(self) -> None:
        """Nothing is held."""


FloatArray = npt.NDArray[np.float32]


class EmbedRunner(Protocol):
    """Computes the vectors [n, dim] of n texts in one step; `close` frees what it holds."""

    def embed(self, inputs: Seq[EmbedInput]) -> LazyResult[FloatArray]: ...

    def close(self) -> None: ...


class FakeEmbedRunner:
    """An EmbedRunner without a model: a text's vector is its first token, its last token and its length.

    `fail_on` makes every step that contains that token raise. `steps` keeps the lengths of each step's texts.
    """

    def __init__(self, *, fail_on: int | None = None) -> None:
        self._fail_on = fail_on
        self.steps: list[list[int]] = []

    def embed(self, inputs: Seq[EmbedInput]) -> LazyResult[FloatArray]:
        """Three numbers a text."""
        self.steps.append([len(text.token_ids) for text in inputs])
        if any(self._fail_on in text.token_ids for text in inputs):
            raise RuntimeError(f"token {self._fail_on} cannot be computed")
        rows = [(text.token_ids[0], text.token_ids[-1], len(text.token_ids)) for text in inputs]
        return Ready(np.array(rows, dtype=np.float32))

    def close(self) -> None:
        """Nothing is held."""


class NoRunner:
    """The Runner of a server without a model that writes: its scheduler never has work."""

    steps_ahead = 0

    def step(self, output: ScheduleOutput) -> LazyResult[StepTokens]:
        """Never called."""
        raise AssertionError("there is no model that could compute a step")

    def graph_stats(self) -> GraphStats:
        """Nothing is recorded."""
        return GraphStats()

    def close(self) -> None:
        """Nothing is held."""
