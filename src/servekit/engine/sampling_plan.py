"""What the sampler needs to know of a step's sequences, gathered on the host as arrays. It must not know logits.

Random numbers are a function of (seed, index of the token), so a choice depends neither on its neighbours in the batch
nor on having been preempted in between.
"""

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from servekit.engine.adjustments import Adjustments, gather_adjustments, needs_adjustment
from servekit.engine.core.request import SamplingParams
from servekit.engine.core.scheduler import ScheduleOutput
from servekit.engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to choose: number `index` of the sequence's answer, counted from 0.

    `has_pending`: the one before it is still being chosen, and is known to the device alone.
    """

    seq: Sequence
    index: int
    has_pending: bool = False

    @property
    def params(self) -> SamplingParams:
        """The request's."""
        return self.seq.request.sampling


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """How S tokens are chosen. `adjustments` and `random` are None where nobody asks for them.

    `random` [S, 6] float64 holds temperature, top_k, top_p, min_p, a number in [0, 1), and whether the row is greedy.
    """

    draws: tuple[Draw, ...]
    adjustments: Adjustments | None
    random: npt.NDArray[np.float64] | None
    grammar_rows: tuple[int, ...]

    def arrays(self) -> list[npt.NDArray[Any]]:
        """What the device needs, in the order in which the sampler takes it back as tensors."""
        adjustments = [] if self.adjustments is None else self.adjustments.arrays()
        return adjustments if self.random is None else [*adjustments, self.random]

    @property
    def has_logprobs(self) -> bool:
        """Whether anybody asks for log-probabilities."""
        return any(draw.params.logprobs is not None for draw in self.draws)

    @property
    def num_top(self) -> int:
        """How many of the most likely tokens anybody asks for."""
        return max(draw.params.logprobs or 0 for draw in self.draws)


def draws_of(output: ScheduleOutput) -> list[Draw]:
    """One for each scheduled sequence that has caught up, in the scheduler's order."""
    return [
        Draw(item.seq, item.end - item.seq.num_prompt_tokens, has_pending=item.end > item.seq.num_tokens)
        for item in output.scheduled
        if item.needs_sample
    ]


def plan_sampling(draws: Seq[Draw], eos_token_ids: frozenset[int]) -> SamplingPlan:
    """The plan of one step. A step in which nobody asks for more than the most likely token needs no arrays."""
    params = [draw.params for draw in draws]
    adjustments = None
    if any(needs_adjustment(p) for p in params):
        adjustments = gather_adjustments([draw.seq for draw in draws], [draw.index for draw in draws], eos_token_ids)
    random = None
    if not all(p.is_greedy for p in params):
        # A greedy row in a mixed batch keeps its own argmax; any positive temperature does for what it throws away.
        columns = [[p.temperature or 1.0, p.top_k, p.top_p, p.min_p, 0.0, p.is_greedy] for p in params]
        random = np.array(columns, dtype=np.float64)
        random[:, 4] = uniforms(draws)
    rows = tuple(row for row, p in enumerate(params) if p.grammar is not None)
    return SamplingPlan(tuple(draws), adjustments, random, rows)


def uniforms(draws: Seq[Draw]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) for each draw, from its seed and the index of the token."""
    seeds = np.array([(draw.params.seed or 0) % 2**64 for draw in draws], dtype=np.uint64)
    index = np.array([draw.index for draw in draws], dtype=np.uint64)
    mixed = _mix(_mix(seeds) + index)
    return (mixed >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _mix(x: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """SplitMix64's step and finaliser (Steele, Lea and Flood 2014): a counter in, well-mixed bits out."""
    x = x + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))
