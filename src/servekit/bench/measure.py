"""From the records of a run to its numbers. It must not know how the records were made or how they are shown.

Percentiles are of the answers that came whole; failures are counted beside them, never as zeros. Rates are over the
whole run, from its start to the last answer; `Window` has them without the filling and the draining.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise

from servekit.bench.result import (
    Latency,
    Little,
    Record,
    Requests,
    Run,
    Summary,
    Throughput,
    Tokens,
    Window,
)
from servekit.bench.slo import goodput
from servekit.bench.stats import summarize
from servekit.bench.times import (
    chunk_gaps,
    end_to_end,
    inter_token_latencies,
    time_per_output_token,
    time_to_first_token,
)

_MAX_ERRORS = 10
_AGREES = 0.02
_MIN_WINDOW_SHARE = 0.2
_MIN_WINDOW_REQUESTS = 10
_MIN_TREND_REQUESTS = 20


def measure(
    records: Sequence[Record],
    *,
    rate: float | None = None,
    concurrency: int | None = None,
    arrival: str = "poisson",
    repeat: int = 0,
    slo: Mapping[str, float] | None = None,
    seed: int = 0,
) -> Run:
    """The run, with everything that its records say. `seed` is that of the resampled intervals."""
    done = [record for record in records if record.ok]
    duration = max((record.end_s for record in records if record.end_s is not None), default=0.0)
    return Run(
        rate=rate,
        concurrency=concurrency,
        arrival=arrival,
        repeat=repeat,
        duration_s=duration,
        requests=count_requests(records),
        throughput=_throughput(done, duration),
        tokens=_tokens(done),
        latency=latency(done, seed=seed),
        goodput=goodput(records, slo, duration) if slo else None,
        little=little(records),
        window=steady_window(records),
        records=list(records),
    )


def count_requests(records: Sequence[Record]) -> Requests:
    """How many there were and how they ended; of the errors, the most frequent."""
    statuses = Counter("no answer" if record.status is None else str(record.status) for record in records)
    errors = Counter(record.error for record in records if record.error is not None)
    ok = sum(record.ok for record in records)
    return Requests(
        sent=len(records),
        ok=ok,
        failed=len(records) - ok,
        by_status=dict(sorted(statuses.items())),
        errors=dict(errors.most_common(_MAX_ERRORS)),
    )


def latency(done: Sequence[Record], *, seed: int = 0) -> Latency:
    """The distributions over the answers that came whole."""

    def of(values: Iterable[float | None]) -> Summary | None:
        return summarize([value for value in values if value is not None], seed=seed)

    return Latency(
        ttft_s=of(time_to_first_token(record) for record in done),
        ttft_from_send_s=of(time_to_first_token(record, from_send=True) for record in done),
        tpot_s=of(time_per_output_token(record) for record in done),
        itl_s=of(value for record in done for value in inter_token_latencies(record)),
        chunk_gap_s=of(value for record in done for value in chunk_gaps(record)),
        e2e_s=of(end_to_end(record) for record in done),
        e2e_from_send_s=of(end_to_end(record, from_send=True) for record in done),
    )


def little(records: Sequence[Record]) -> Little | None:
    """Little's law from the start of the run to the last end, failures included: they were in the system as well.

    L = lambda x W uses counts and times of requests; the time average integrates how many were there at every moment.
    They differ when requests are missing from the one or the other.
    """
    stays = [(record.scheduled_s, record.end_s) for record in records if record.end_s is not None]
    duration = max((end for _, end in stays), default=0.0)
    if duration <= 0:
        return None
    rate = len(stays) / duration
    mean = math.fsum(end - start for start, end in stays) / len(stays)
    open_records = [(record.scheduled_s, record.end_s or duration) for record in records]
    average = mean_in_flight(open_records, 0.0, duration)
    agrees = abs(rate * mean - average) <= _AGREES * max(average, 1e-9)
    return Little(
        arrivals_per_s=rate,
        mean_s=mean,
        expected=rate * mean,
        time_average=average,
        verdict="agree" if agrees else f"differ: {len(records) - len(stays)} requests never ended",
    )


def mean_in_flight(stays: Sequence[tuple[float, float]], start: float, end: float) -> float:
    """Time average of how many (begin, end) stays are open between `start` and `end`."""
    changes = sorted(
        change
        for begin, finish in stays
        if finish > start and begin < end
        for change in ((max(begin, start), 1), (min(finish, end), -1))
    )
    area, count, before = 0.0, 0, start
    for at, change in changes:
        area += count * (at - before)
        count, before = count + change, at
    return area / (end - start) if end > start else 0.0


def steady_window(records: Sequence[Record]) -> Window | None:
    """From the first answer's end to the last arrival: before it the server fills, after it the load only drains.

    None when little of the run is left. It is steady unless every quarter of it had more requests in the system than
    the one before, and the last more than twice as many as the first: then they pile up, and a longer run would only
    show longer waits. Fewer than twenty arrivals cannot tell.
    """
    done = [record for record in records if record.ok]
    if not done:
        return None
    start = min(record.end_s or 0.0 for record in done)
    end = max(record.scheduled_s for record in records)
    inside = [record for record in done if start < (record.end_s or 0.0) <= end]
    duration = max(record.end_s or 0.0 for record in records)
    if end - start < _MIN_WINDOW_SHARE * duration or len(inside) < _MIN_WINDOW_REQUESTS:
        return None
    stays = [(record.scheduled_s, record.end_s or duration) for record in records]
    span = end - start
    num_arrivals = sum(start <= record.scheduled_s <= end for record in records)
    has_input = all(record.input_tokens is not None for record in inside)
    return Window(
        start_s=start,
        end_s=end,
        throughput=Throughput(
            output_tokens_per_s=sum(_tokens_between(record, start, end) for record in done) / span,
            input_tokens_per_s=sum(record.input_tokens or 0 for record in inside) / span if has_input else None,
            requests_per_s=len(inside) / span,
        ),
        mean_in_flight=mean_in_flight(stays, start, end),
        steady=num_arrivals < _MIN_TREND_REQUESTS or not _piles_up(stays, start, end),
    )


def _piles_up(stays: Sequence[tuple[float, float]], start: float, end: float) -> bool:
    edges = [start + (end - start) * quarter / 4 for quarter in range(5)]
    means = [mean_in_flight(stays, low, high) for low, high in pairwise(edges)]
    return all(earlier < later for earlier, later in pairwise(means)) and means[-1] > 2 * means[0] + 1


def _tokens_between(record: Record, start: float, end: float) -> int:
    if not record.chunks:
        return record.output_tokens or 0 if start < (record.end_s or 0.0) <= end else 0
    count, before = 0, 0
    for at, tokens in record.chunks:
        if start < at <= end:
            count += tokens - before
        before = tokens
    return count


def _throughput(done: Sequence[Record], duration: float) -> Throughput:
    if duration <= 0:
        return Throughput()
    inputs = [record.input_tokens for record in done if record.input_tokens is not None]
    return Throughput(
        output_tokens_per_s=sum(record.output_tokens or 0 for record in done) / duration,
        input_tokens_per_s=sum(inputs) / duration if len(inputs) == len(done) else None,
        requests_per_s=len(done) / duration,
    )


def _tokens(done: Sequence[Record]) -> Tokens:
    return Tokens(
        input=_sum(record.input_tokens for record in done),
        output=_sum(record.output_tokens for record in done),
        cached=_sum(record.cached_tokens for record in done),
        estimated=sum(record.estimated for record in done),
        wrong_length=sum(
            record.asked_tokens is not None and not record.estimated and record.output_tokens != record.asked_tokens
            for record in done
        ),
    )


def _sum(counts: Iterable[int | None]) -> int | None:
    """The sum of the counts that are known; None when none is."""
    known = [count for count in counts if count is not None]
    return sum(known) if known else None
