"""How many requests fit in a memory, and what limits them. It must not know where the numbers come from."""

from dataclasses import dataclass
from enum import StrEnum
from fractions import Fraction


class Limit(StrEnum):
    """What keeps one more request from fitting."""

    KV_MEMORY = "kv_memory"
    WEIGHTS = "weights"
    UNKNOWN_WEIGHTS = "unknown_weights"
    NOTHING_KEPT = "nothing_kept"


@dataclass(frozen=True, slots=True)
class Budget:
    """A memory in bytes, divided: `reserve` for everything unforeseen, `weights`, and `kv`, which is what is left.

    `weights` is None when unknown, and then `kv` is too. `kv` is negative when the weights alone do not fit.
    """

    memory: int
    reserve: int
    weights: int | None
    kv: int | None


def make_budget(memory: int, *, reserve: Fraction | int, weights: int | None) -> Budget:
    """Divides `memory`; a Fraction reserves that share of it, an int that many bytes."""
    kept = -int(-memory * reserve // 1) if isinstance(reserve, Fraction) else reserve
    return Budget(memory, kept, weights, None if weights is None else memory - kept - weights)


@dataclass(frozen=True, slots=True)
class Capacity:
    """`requests` of a given size that fit at once, None when that cannot be said, and the `limit`."""

    requests: int | None
    limit: Limit


def requests_that_fit(budget: Budget, request_bytes: int, *, reserved_bytes: int = 0) -> Capacity:
    """Whole requests of `request_bytes`; `reserved_bytes` is the pool's null block."""
    if budget.kv is None:
        return Capacity(None, Limit.UNKNOWN_WEIGHTS)
    if budget.kv <= 0:
        return Capacity(0, Limit.WEIGHTS)
    if request_bytes == 0:
        return Capacity(None, Limit.NOTHING_KEPT)
    return Capacity(max(0, budget.kv - reserved_bytes) // request_bytes, Limit.KV_MEMORY)


def end_to_end_seconds(*, ttft: float, tpot: float, output_tokens: int) -> float:
    """Seconds from arrival to the last token: the first token, then one step for each further one."""
    return ttft + (output_tokens - 1) * tpot


def concurrency_needed(*, rate: float, seconds: float) -> float:
    """Little's law: requests in the system at once, for `rate` arrivals a second that stay `seconds` each."""
    return rate * seconds
