"""Batching counted in steps, small enough for paper: who holds which slot at which step, under the engine's Scheduler.

Every step takes one unit of time and every request needs one slot for as many steps as it has tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from servekit.bench.sim import SimRequest, SimStep, scheduler_config, simulate

IDLE = "."
_NAMES = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789"


@dataclass(frozen=True, slots=True)
class StepCount:
    """`steps` from the first to the last, pauses included; `idle_slot_steps` are slots times steps without a token."""

    policy: str
    slots: int
    steps: int
    idle_slot_steps: int
    chart: tuple[str, ...]


def count_steps(policy: str, lengths: Sequence[int], arrivals: Sequence[int], *, slots: int) -> StepCount:
    """Play requests of `lengths` tokens that arrive before step `arrivals` (counted from 0).

    A static batch does not wait for members here: it forms from those who are there when the batch before it ends.
    """
    requests = [SimRequest(float(at), 1, length) for length, at in zip(lengths, arrivals, strict=True)]
    config = scheduler_config(
        requests, slots=slots, policy=policy, max_num_batched_tokens=2 * slots, block_size=1, static_wait=0.0
    )
    run = simulate(requests, config, lambda num_decoding, num_prefill_tokens: 1.0)
    clock: list[SimStep | None] = [None] * round(run.end_s)
    for step in run.steps:
        clock[round(step.start_s)] = step
    return StepCount(policy, slots, len(clock), slots * len(clock) - sum(lengths), tuple(slot_chart(clock, slots)))


def slot_chart(steps: Sequence[SimStep | None], slots: int) -> list[str]:
    """A line for each slot and a column for each step: the name of the request that was computed there, or `.`."""
    lines = [[IDLE] * len(steps) for _ in range(slots)]
    for column, step in enumerate(steps):
        for slot, index in step.slots if step else ():
            lines[slot][column] = request_name(index)
    return ["".join(line) for line in lines]


def request_name(index: int) -> str:
    """A to Z, a to z, 0 to 9, and from the start again."""
    return _NAMES[index % len(_NAMES)]
