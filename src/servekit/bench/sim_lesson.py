"""The textbook comparison of static, dynamic and continuous batching, as a fixed workload with fixed step times.

A prefill stops everybody, and a decode step takes longer the more sequences share it. The static and dynamic rows come
out of the engine's own Scheduler. The continuous one has a loop of its own: in the textbook a request that was just
prefilled joins the decode step of the same turn, in the engine the step after.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from servekit.bench.result import Record
from servekit.bench.sim import SimRequest, scheduler_config, simulate

SEED: Final = 83
NUM_REQUESTS: Final = 400
SLOTS: Final = 4
PROMPT_TOKENS: Final = 110
OUTPUT_CHOICES: Final = (32, 64, 128)
RATES: Final = (0.5, 0.8, 1.0)
STATIC_WAIT_S: Final = 0.5
POLICIES: Final = ("static", "dynamic", "continuous")


@dataclass(frozen=True, slots=True)
class TextbookTimes:
    """Prefill and decode one after the other; a step without decoding sequences has no decode part.

    The defaults were measured with a model of half a billion parameters in 4 bits on three CPU cores.
    """

    prefill_per_token: float = 0.0034
    decode_base: float = 0.00729
    decode_per_sequence: float = 0.00486

    def __call__(self, num_decoding: int, num_prefill_tokens: int) -> float:
        """Seconds of one step."""
        decode = self.decode_base + self.decode_per_sequence * num_decoding if num_decoding else 0.0
        return self.prefill_per_token * num_prefill_tokens + decode


def lesson_requests(rate: float) -> list[SimRequest]:
    """The workload at `rate` requests a second: Poisson arrivals, then lengths, from one seeded generator."""
    import numpy as np

    rng = np.random.default_rng(SEED)
    arrivals = np.cumsum(rng.exponential(1 / rate, NUM_REQUESTS))
    outputs = rng.choice(OUTPUT_CHOICES, NUM_REQUESTS)
    return [
        SimRequest(float(arrival), PROMPT_TOKENS, int(output))
        for arrival, output in zip(arrivals, outputs, strict=True)
    ]


def lesson_records(policy: str, rate: float) -> Sequence[Record]:
    """What every request of the workload gets under one policy."""
    requests = lesson_requests(rate)
    if policy == "continuous":
        return textbook_continuous(requests, slots=SLOTS, times=TextbookTimes())
    config = scheduler_config(
        requests,
        slots=SLOTS,
        policy=policy,
        max_num_batched_tokens=SLOTS * PROMPT_TOKENS,
        static_wait=STATIC_WAIT_S,
    )
    return simulate(requests, config, TextbookTimes()).records


def textbook_continuous(requests: Sequence[SimRequest], *, slots: int, times: TextbookTimes) -> list[Record]:
    """In each turn fill the free slots, prefill the new ones together, then give everybody a token."""
    records = [
        Record(
            index=index,
            scheduled_s=request.arrival_s,
            sent_s=request.arrival_s,
            status=200,
            input_tokens=request.prompt_tokens,
            output_tokens=request.output_tokens,
        )
        for index, request in enumerate(requests)
    ]
    left: dict[int, int] = {}  # tokens that each running request still lacks
    now, num_joined = 0.0, 0
    while num_joined < len(requests) or left:
        if not left:
            now = max(now, requests[num_joined].arrival_s)
        joined = []
        while num_joined < len(requests) and len(left) < slots and requests[num_joined].arrival_s <= now:
            left[num_joined] = requests[num_joined].output_tokens
            joined.append(num_joined)
            num_joined += 1
        if joined:
            now += times(0, sum(requests[index].prompt_tokens for index in joined))
            _give_token(joined, left, records, now)
        if left:
            now += times(len(left), 0)
            _give_token(list(left), left, records, now)
    return records


def _give_token(indices: Sequence[int], left: dict[int, int], records: Sequence[Record], now: float) -> None:
    for index in indices:
        record = records[index]
        record.first_token_s = now if record.first_token_s is None else record.first_token_s
        left[index] -= 1
        if left[index] == 0:
            del left[index]
            record.end_s = now
