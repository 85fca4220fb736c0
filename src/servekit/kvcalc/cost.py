"""What tokens cost: machine-seconds for a million of them, and from there money, energy and machines.

Arithmetic on measured numbers. It must not know where they come from, nor a price or a power that nobody gave.
A machine-second is one machine for one second, busy or not: whoever pays for the machine pays for its idle time too.
"""

import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

MILLION = 1_000_000
SECONDS_PER_HOUR = 3600
SECONDS_PER_DAY = 86_400

# Student's t for a two-sided interval of 95 %, by degrees of freedom.
_T_975 = (
    12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228, 2.201, 2.179, 2.160, 2.145, 2.131,
    2.120, 2.110, 2.101, 2.093, 2.086, 2.080, 2.074, 2.069, 2.064, 2.060, 2.056, 2.052, 2.048, 2.045, 2.042,
)  # fmt: skip
_T_MANY = 1.960


@dataclass(frozen=True, slots=True)
class Estimate:
    """A mean over `count` repeats and its 95 % interval, None from a single one."""

    mean: float
    low: float | None = None
    high: float | None = None
    count: int = 1


def estimate(values: Sequence[float]) -> Estimate:
    """Mean and Student's interval of at least one value."""
    count = len(values)
    mean = math.fsum(values) / count
    if count < 2:
        return Estimate(mean)
    variance = math.fsum((value - mean) ** 2 for value in values) / (count - 1)
    factor = _T_975[count - 2] if count - 2 < len(_T_975) else _T_MANY
    half = factor * math.sqrt(variance / count)
    return Estimate(mean, mean - half, mean + half, count)


@dataclass(frozen=True, slots=True)
class TokenCost:
    """Machine-seconds for a million tokens. `low` and `high` are the 95 % interval; `high` is None when unbounded."""

    seconds: float
    low: float | None = None
    high: float | None = None


def token_cost(tokens_per_second: Estimate, machines: int = 1, share: float = 1.0) -> TokenCost:
    """1e6 x machines / rate, for that share of the machines' time. The rate must be over 0."""
    work = MILLION * machines * share
    low = None if tokens_per_second.high is None else work / tokens_per_second.high
    is_bounded = tokens_per_second.low is not None and tokens_per_second.low > 0
    high = work / tokens_per_second.low if is_bounded and tokens_per_second.low else None
    return TokenCost(work / tokens_per_second.mean, low, high)


def money(machine_seconds: float, price_per_hour: float) -> float:
    """What so many machine-seconds cost, in the currency of the price."""
    return machine_seconds * price_per_hour / SECONDS_PER_HOUR


def watt_hours(machine_seconds: float, watts: float) -> float:
    """The energy of so many seconds at a constant power."""
    return machine_seconds * watts / SECONDS_PER_HOUR


@dataclass(frozen=True, slots=True)
class Rate:
    """Tokens a second of one measured load, over the repeats; None for what was not measured.

    `input` are computed prompt tokens, `cached` those that the prefix cache had, `good` the output tokens of requests
    that kept the SLO.
    """

    output: Estimate
    input: Estimate | None = None
    cached: Estimate | None = None
    total: Estimate | None = None
    good: Estimate | None = None


@dataclass(frozen=True, slots=True)
class Split:
    """Which share of the machine's time went into prompts, and by what rule that was found."""

    prefill_share: float
    rule: str


@dataclass(frozen=True, slots=True)
class Costs:
    """Machine-seconds per million tokens under named rules; None for what cannot be said.

    `output`, `total` and `good` carry the machine's whole time each: over output tokens, over computed tokens (prompt
    and output, cached ones left out), over output tokens within the SLO. `prefill` and `decode` divide it by `split`,
    over computed prompt tokens and over output tokens. `cached` is 0 where cached tokens were seen: nothing is computed
    for them. `prompt` is the prefill time over all prompt tokens, cached ones included.
    """

    output: TokenCost
    total: TokenCost | None = None
    good: TokenCost | None = None
    prefill: TokenCost | None = None
    decode: TokenCost | None = None
    cached: TokenCost | None = None
    prompt: TokenCost | None = None
    split: Split | None = None


def costs(rate: Rate, *, machines: int = 1, split: Split | None = None) -> Costs:
    """The cost of every kind of token at one measured load."""
    prefill = decode = prompt = None
    if split is not None and rate.input is not None and rate.input.mean > 0:
        prefill = token_cost(rate.input, machines, split.prefill_share)
        decode = token_cost(rate.output, machines, 1 - split.prefill_share)
        cached_rate = rate.cached.mean if rate.cached is not None else 0.0
        prompt = token_cost(Estimate(rate.input.mean + cached_rate), machines, split.prefill_share)
    return Costs(
        output=token_cost(rate.output, machines),
        total=_cost_of(rate.total, machines),
        good=_cost_of(rate.good, machines),
        prefill=prefill,
        decode=decode,
        cached=TokenCost(0.0) if rate.cached is not None and rate.cached.mean > 0 else None,
        prompt=prompt,
        split=split,
    )


@dataclass(frozen=True, slots=True)
class LoadPoint:
    """`requests_per_s` offered, output tokens a second that came of it, and the cost. `is_measured` or in between."""

    load: float
    requests_per_s: float
    output_tokens_per_s: float
    seconds_per_million: float
    is_measured: bool


def load_curve(
    measured: Sequence[tuple[float, float]], full_rate: float, loads: Sequence[float], machines: int = 1
) -> list[LoadPoint]:
    """The cost at shares of `full_rate`, from (rate, output tokens a second) pairs in the order of their rates.

    Between two measured rates the throughput is interpolated; below the lowest it is what arrives. The machine is paid
    for as a whole at every load.
    """
    points = [(0.0, 0.0), *measured]
    found = []
    for load in loads:
        rate = load * full_rate
        tokens = _interpolate(points, rate)
        is_measured = any(math.isclose(rate, at, rel_tol=1e-9) for at, _ in measured)
        found.append(LoadPoint(load, rate, tokens, MILLION * machines / tokens, is_measured))
    return found


class BindingLimit(StrEnum):
    """What keeps one machine from serving more."""

    COMPUTE = "compute"
    KV = "kv"
    SLOTS = "slots"
    LATENCY = "latency"


@dataclass(frozen=True, slots=True)
class Demand:
    """The requests of a day, `peak_factor` times their mean rate at the peak, and the size of each."""

    requests_per_day: float
    prompt_tokens: int
    output_tokens: int
    peak_factor: float = 1.0

    @property
    def mean_rate(self) -> float:
        """Requests a second over the day."""
        return self.requests_per_day / SECONDS_PER_DAY

    @property
    def peak_rate(self) -> float:
        """Requests a second at the peak."""
        return self.mean_rate * self.peak_factor


@dataclass(frozen=True, slots=True)
class MachineLimits:
    """Requests a second that one machine can serve, by what limits it; None where that is not known."""

    compute: float | None = None
    kv: float | None = None
    slots: float | None = None
    latency: float | None = None

    def binding(self) -> tuple[BindingLimit, float]:
        """The smallest. At least one must be known."""
        known = {
            limit: value
            for limit in BindingLimit
            if (value := getattr(self, limit.value)) is not None  # the fields are named as the limits
        }
        limit = min(known, key=lambda name: known[name])
        return limit, known[limit]


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """`machines` in all, `spare` of them beside those that the peak needs; the utilisations leave the spare out."""

    needed: int
    spare: int
    limits: MachineLimits
    binding: BindingLimit
    requests_per_s_per_machine: float
    mean_utilisation: float
    peak_utilisation: float

    @property
    def machines(self) -> int:
        """To be paid for."""
        return self.needed + self.spare


def plan_machines(demand: Demand, limits: MachineLimits, *, spare: int = 1) -> MachinePlan:
    """Machines for the peak, and `spare` more so that one may fail (N+1)."""
    binding, each = limits.binding()
    needed = max(1, math.ceil(demand.peak_rate / each - 1e-9))
    return MachinePlan(
        needed=needed,
        spare=spare,
        limits=limits,
        binding=binding,
        requests_per_s_per_machine=each,
        mean_utilisation=demand.mean_rate / (needed * each),
        peak_utilisation=demand.peak_rate / (needed * each),
    )


def little_rate(*, concurrency: float, seconds: float) -> float:
    """Little's law turned round: arrivals a second that keep `concurrency` requests of `seconds` each in the system."""
    return concurrency / seconds


@dataclass(frozen=True, slots=True)
class BreakEven:
    """Own machines against an API, a day. Above `requests_per_day` the machines are cheaper.

    They serve at most `servable_per_day` with the same peaks, so a break-even above that is never reached by them.
    """

    own_per_day: float
    api_per_day: float
    api_per_request: float
    requests_per_day: float
    servable_per_day: float
    own_is_cheaper: bool


def break_even(
    demand: Demand, plan: MachinePlan, *, price_per_hour: float, api_price_in: float, api_price_out: float
) -> BreakEven:
    """API prices are for a million tokens each. `api_price_in` and `api_price_out` must not both be 0."""
    api_per_request = (demand.prompt_tokens * api_price_in + demand.output_tokens * api_price_out) / MILLION
    own = plan.machines * 24 * price_per_hour
    api = demand.requests_per_day * api_per_request
    servable = plan.needed * plan.requests_per_s_per_machine * SECONDS_PER_DAY / demand.peak_factor
    return BreakEven(own, api, api_per_request, own / api_per_request, servable, own < api)


def _cost_of(rate: Estimate | None, machines: int) -> TokenCost | None:
    return None if rate is None or rate.mean <= 0 else token_cost(rate, machines)


def _interpolate(points: Sequence[tuple[float, float]], rate: float) -> float:
    """Linear between neighbours; beyond the last point its value."""
    at = bisect_left([x for x, _ in points], rate)
    if at == len(points):
        return points[-1][1]
    if at == 0:
        return points[0][1]
    (left, low), (right, high) = points[at - 1], points[at]
    return low + (high - low) * (rate - left) / (right - left)
