"""The audit of the load generator itself: a run in which it did not do what it claims must not be believed.

It looks at the generator's own times only and must not know the server.
"""

import math
from collections.abc import Sequence

from servekit.bench.arrivals import dispersion, lag1_correlation
from servekit.bench.load import Trace
from servekit.bench.result import Audit, Record
from servekit.bench.stats import percentile
from servekit.bench.times import end_to_end

_MAX_RATE_ERROR = 0.02
_MAX_LATENESS_S = 0.02
_MAX_LATENESS_SHARE = 0.05
_MAX_CPU_SHARE = 0.8
_LATE_S = 0.005
_SIGMAS = 4.0
_MIN_REQUESTS = 10
_MIN_WALL_S = 1.0


def audit(trace: Trace, *, arrival: str, is_open: bool, max_in_flight: int | None) -> tuple[Audit, list[str]]:
    """What the generator did, and the reasons why the run must not be trusted, if there are any.

    A closed loop has no schedule to miss, and with `max_in_flight` sends are late on purpose. Everything else is held
    to: achieved within 2 % of the offered rate, 99 % of the sends and of the event loop's turns within 20 ms (or 5 % of
    the median latency, if that is more), gaps that are still Poisson if they should be, and at most 80 % of a core
    in a run of a second or more.
    """
    records = trace.records
    scheduled = [record.scheduled_s for record in records]
    sent = sorted(record.sent_s for record in records if record.sent_s is not None)
    lateness = [record.sent_s - record.scheduled_s for record in records if record.sent_s is not None]
    spread, num_windows = dispersion(sent)
    lag1 = lag1_correlation(sent)
    found = Audit(
        offered_rate=_rate(sorted(scheduled)) if is_open else None,
        achieved_rate=_rate(sent),
        lateness_p99_s=percentile(lateness, 0.99) if lateness and is_open else None,
        late_sends=sum(late > _LATE_S for late in lateness),
        dispersion=None if math.isnan(spread) else spread,
        lag1=None if math.isnan(lag1) else lag1,
        loop_lag_p99_s=percentile(trace.loop_lags, 0.99) if trace.loop_lags else None,
        cpu_share=trace.cpu_s / trace.wall_s if trace.wall_s > 0 else None,
        reused_connections=trace.reused_connections,
    )
    allowed = _allowed_lateness(records)
    reasons = _own_reasons(found, allowed, trace.wall_s)
    if is_open and max_in_flight is None:
        reasons += _schedule_reasons(found, sorted(scheduled), sent, allowed)
        if arrival == "poisson":
            reasons += _poisson_reasons(scheduled, spread, num_windows, lag1, len(sent))
    if records and not any(record.ok for record in records):
        reasons.append("no answer came whole")
    return found, reasons


def _own_reasons(found: Audit, allowed: float, wall: float) -> list[str]:
    reasons = []
    if found.cpu_share is not None and found.cpu_share > _MAX_CPU_SHARE and wall >= _MIN_WALL_S:
        reasons.append(f"the load generator used {found.cpu_share:.0%} of a core, more than {_MAX_CPU_SHARE:.0%}")
    if found.loop_lag_p99_s is not None and found.loop_lag_p99_s > allowed:
        reasons.append(f"the event loop was late by {_ms(found.loop_lag_p99_s)} (p99), more than {_ms(allowed)}")
    return reasons


def _schedule_reasons(found: Audit, scheduled: Sequence[float], sent: Sequence[float], allowed: float) -> list[str]:
    reasons = []
    if found.lateness_p99_s is not None and found.lateness_p99_s > allowed:
        reasons.append(
            f"requests were sent {_ms(found.lateness_p99_s)} after their schedule (p99), more than {_ms(allowed)}"
        )
    if len(sent) >= _MIN_REQUESTS:
        # Over a short run the rate hangs on the first and the last send alone: they may be off as any other.
        planned, taken = scheduled[-1] - scheduled[0], sent[-1] - sent[0]
        if abs(taken - planned) > max(_MAX_RATE_ERROR * planned, allowed):
            reasons.append(f"{found.achieved_rate:.2f} requests a second were sent instead of {found.offered_rate:.2f}")
    return reasons


def _poisson_reasons(
    scheduled: Sequence[float], spread: float, num_windows: int, lag1: float, num_sent: int
) -> list[str]:
    """Whether sending has spoilt the schedule; a schedule that was itself improbable is not the sender's fault."""
    reasons = []
    if not math.isnan(spread):
        allowed = _SIGMAS * math.sqrt(2 / (num_windows - 1))
        if abs(spread - 1) > allowed and abs(dispersion(scheduled)[0] - 1) <= allowed:
            reasons.append(f"the arrivals sent are not Poisson: index of dispersion {spread:.2f}, not 1")
    if not math.isnan(lag1):
        allowed = _SIGMAS / math.sqrt(num_sent)
        if abs(lag1) > allowed and abs(lag1_correlation(scheduled)) <= allowed:
            reasons.append(f"the arrivals sent are not Poisson: neighbouring gaps correlate by {lag1:.2f}")
    return reasons


def _allowed_lateness(records: Sequence[Record]) -> float:
    latencies = [value for record in records if record.ok and (value := end_to_end(record, from_send=True)) is not None]
    return max(_MAX_LATENESS_S, _MAX_LATENESS_SHARE * percentile(latencies, 0.5) if latencies else 0.0)


def _rate(times: Sequence[float]) -> float | None:
    """Requests a second between the first and the last."""
    span = times[-1] - times[0] if len(times) > 1 else 0.0
    return (len(times) - 1) / span if span > 0 else None


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
