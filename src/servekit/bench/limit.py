"""Names what kept a server from being faster, from its own samples and its answers' timings. It must not measure.

The order is that of blame: a load generator that failed its audit says nothing about the server; blocks that ran out
explain a queue; a queue for slots explains idle capacity; only then is it the work itself.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean

from servekit.bench.probe import Bounds, Sample
from servekit.bench.result import Limit, Run
from servekit.bench.times import end_to_end

CLIENT = "client"
KV_BLOCKS = "KV blocks"
SLOTS = "queue (slots)"
TOKEN_BUDGET = "token budget (prefill)"  # noqa: S105 - no password
DEVICE = "device"
API_LAYER = "API layer"
NONE = "none"
UNKNOWN = "unknown"

_OFTEN = 0.25
_FULL = 0.9
_BUSY = 0.8
_BUDGET_SHARE = 0.6
_MIN_API_S = 0.005


@dataclass(frozen=True, slots=True)
class _Facts:
    """What there is to judge by; None for what the server did not say."""

    run: Run
    samples: Sequence[Sample]
    bounds: Bounds

    def change(self, name: str) -> float | None:
        return self.run.server.get(name)

    @property
    def waiting(self) -> list[Sample]:
        return [sample for sample in self.samples if sample.waiting]

    @property
    def known(self) -> int:
        return sum(sample.running is not None for sample in self.samples)

    def is_full(self, sample: Sample) -> bool:
        return self.bounds.slots is not None and sample.running is not None and sample.running >= self.bounds.slots

    def mean_times(self) -> tuple[float, float, float, float] | None:
        """Queue, prefill, decode and what is outside the engine, averaged over the answers that have timings."""
        rows = [
            (record.timings, total)
            for record in self.run.records
            if record.ok and record.timings and (total := end_to_end(record, from_send=True)) is not None
        ]
        if not rows:
            return None
        queue = fmean(timings.queue_s for timings, _ in rows)
        prefill = fmean(timings.prefill_s for timings, _ in rows)
        decode = fmean(timings.decode_s for timings, _ in rows)
        return queue, prefill, decode, max(0.0, fmean(total for _, total in rows) - queue - prefill - decode)


def name_limit(run: Run, samples: Sequence[Sample], bounds: Bounds) -> Limit:
    """The first limit that the evidence shows; `also` has those that it shows as well."""
    facts = _Facts(run, samples, bounds)
    rules: dict[str, Callable[[_Facts], list[str]]] = {
        CLIENT: _client,
        KV_BLOCKS: _kv_blocks,
        SLOTS: _slots,
        TOKEN_BUDGET: _token_budget,
        DEVICE: _device,
        API_LAYER: _api_layer,
    }
    found = {name: evidence for name, rule in rules.items() if (evidence := rule(facts))}
    if found:
        first = next(iter(found))
        return Limit(name=first, evidence=found[first], also=[name for name in found if name != first])
    if not facts.known and facts.mean_times() is None:
        return Limit(name=UNKNOWN, evidence=["the server shows neither its state nor timings of its answers"])
    return Limit(name=NONE, evidence=_idle(facts))


def _client(facts: _Facts) -> list[str]:
    return [] if facts.run.valid else list(facts.run.invalid_reasons)


def _kv_blocks(facts: _Facts) -> list[str]:
    evidence = []
    preemptions = facts.change("preemptions")
    if preemptions:
        evidence.append(f"{preemptions:.0f} preemptions: running requests lost their KV blocks to others")
    starved = [sample for sample in facts.waiting if (sample.kv_used or 0.0) >= _FULL and not facts.is_full(sample)]
    if facts.known and len(starved) / facts.known >= _OFTEN:
        evidence.append(f"{_share(starved, facts)} requests waited with slots free and the KV pool {_FULL:.0%} full")
    return evidence


def _slots(facts: _Facts) -> list[str]:
    evidence = []
    full = [sample for sample in facts.waiting if facts.is_full(sample)]
    if facts.known and len(full) / facts.known >= _OFTEN:
        evidence.append(f"{_share(full, facts)} requests waited while all {facts.bounds.slots} slots were taken")
    times = facts.mean_times()
    if times and times[0] >= _OFTEN * sum(times) and (evidence or not facts.known):
        evidence.append(f"a request waited {times[0]:.2f} s of its {sum(times):.2f} s in the server's queue")
    refused = facts.run.requests.by_status.get("429", 0)
    if refused:
        evidence.append(f"{refused} requests were refused with 429: the waiting line was full")
    return evidence


def _token_budget(facts: _Facts) -> list[str]:
    steps, tokens, budget = facts.change("steps"), facts.change("batched_tokens"), facts.bounds.max_num_batched_tokens
    evidence = []
    if steps and tokens and budget and tokens / steps >= _BUDGET_SHARE * budget:
        evidence.append(f"a step took {tokens / steps:.0f} of the {budget} tokens it may take, on average")
    held = [
        sample
        for sample in facts.waiting
        if facts.bounds.slots is not None and not facts.is_full(sample) and (sample.kv_used or 0.0) < _FULL
    ]
    if facts.known and len(held) / facts.known >= _OFTEN:
        evidence.append(
            f"{_share(held, facts)} requests waited with slots and KV blocks free: prompts filled the steps"
        )
    return evidence


def _device(facts: _Facts) -> list[str]:
    busy = _busy_share(facts)
    return [] if busy is None or busy < _BUSY else [f"the model was computing {busy:.0%} of the time"]


def _api_layer(facts: _Facts) -> list[str]:
    times = facts.mean_times()
    if times is None or times[3] < max(_MIN_API_S, _OFTEN * sum(times)):
        return []
    return [f"{times[3] * 1e3:.0f} ms of a request's {sum(times) * 1e3:.0f} ms were spent outside the engine"]


def _idle(facts: _Facts) -> list[str]:
    evidence = []
    busy = _busy_share(facts)
    if busy is not None:
        evidence.append(f"the model was computing only {busy:.0%} of the time")
    if facts.known:
        evidence.append(f"{_share(facts.waiting, facts)} a request waited")
    times = facts.mean_times()
    if times:
        evidence.append(f"a request waited {times[0] * 1e3:.0f} ms in the server's queue, on average")
    return evidence


def _busy_share(facts: _Facts) -> float | None:
    """The share of the time between the first and the last sample that was spent in the model."""
    seconds = facts.change("model_seconds")
    span = facts.samples[-1].time - facts.samples[0].time if len(facts.samples) > 1 else 0.0
    return None if seconds is None or span <= 0 else min(1.0, seconds / span)


def _share(samples: Sequence[Sample], facts: _Facts) -> str:
    return f"in {len(samples)} of {facts.known} samples"
