"""Puts a source, the options and the arithmetic together into one report, which is the JSON as well."""

from dataclasses import asdict, dataclass
from typing import Any

from servekit.cli.cost_source import CostSource, MeasuredLoad
from servekit.errors import ConfigError, NegativeResult
from servekit.kvcalc.cost import (
    BreakEven,
    Costs,
    Demand,
    LoadPoint,
    MachineLimits,
    MachinePlan,
    TokenCost,
    break_even,
    costs,
    little_rate,
    load_curve,
    money,
    plan_machines,
    watt_hours,
)

VERSION = 1
_REPEATABLE = {"number": "give several, as 700,712,705", "run file": "`servekit bench serve --repeats 3` gives one"}


@dataclass(frozen=True, slots=True)
class CostOptions:
    """What was asked beside the source; None for what was not."""

    machines: int = 1
    min_attainment: float = 0.9
    loads: tuple[float, ...] = (0.1, 0.3, 0.5, 1.0)
    price_per_hour: float | None = None
    watts: float | None = None
    demand: Demand | None = None
    spare: int = 1
    kv_tokens: int | None = None
    slots: int | None = None
    api_price_in: float | None = None
    api_price_out: float | None = None


@dataclass(frozen=True, slots=True)
class Energy:
    """`watts` and where they are from; `is_bound` for a name plate, which says no more than a bound."""

    watts: float | None
    source: str
    is_bound: bool = False


@dataclass(frozen=True, slots=True)
class CostReport:
    """The answer. `point` is the load that is priced, `by_load` has all loads with their costs."""

    source: CostSource
    options: CostOptions
    point: MeasuredLoad
    by_load: tuple[tuple[MeasuredLoad, Costs], ...]
    curve: tuple[LoadPoint, ...]
    energy: Energy
    plan: MachinePlan | None
    break_even: BreakEven | None
    notes: tuple[str, ...]

    @property
    def costs(self) -> Costs:
        """Those of the operating point."""
        return next(found for load, found in self.by_load if load is self.point)


def make_report(source: CostSource, options: CostOptions, energy: Energy) -> CostReport:
    """Price the operating point. Raises NegativeResult when no measured load keeps the SLO, ConfigError for a plan
    that lacks something."""
    point = source.operating_point(options.min_attainment)
    if point is None:
        raise NegativeResult(
            f"at no measured load do {options.min_attainment:.0%} of the requests keep the SLO",
            hint="measure lower rates, or loosen --slo",
        )
    by_load = tuple((load, costs(load.tokens, machines=options.machines, split=load.split)) for load in source.loads)
    notes = list(source.notes)
    if point.repeats == 1 and source.kind in _REPEATABLE:
        notes.append(f"measured once, so there is no interval: {_REPEATABLE[source.kind]}")
    plan = even = None
    if options.demand is not None:
        plan, more = _plan(source, options, point, options.demand)
        notes += more
        even = _break_even(options, options.demand, plan)
    curve = _curve(source, options, point)
    if not curve:
        notes.append("a curve over load needs runs at known rates: `servekit bench serve --rate 1,2,4 --json`")
    return CostReport(source, options, point, by_load, tuple(curve), energy, plan, even, tuple(notes))


def report_fields(report: CostReport, inputs: dict[str, Any]) -> dict[str, Any]:
    """The JSON: every input as it was given, what was measured, and every number of the answer."""
    options, point = report.options, report.point
    found = report.costs
    return {
        "version": VERSION,
        "inputs": inputs,
        "source": {
            "kind": report.source.kind,
            "name": report.source.name,
            "sha256": report.source.sha256,
            "slo": dict(report.source.slo),
        },
        "operating_point": _load_fields(point),
        "machine_seconds_per_million": _cost_fields(found),
        "split": None if found.split is None else asdict(found.split),
        "loads": [
            {**_load_fields(load), "machine_seconds_per_million": _cost_fields(other)} for load, other in report.by_load
        ],
        "load_curve": [asdict(at) for at in report.curve],
        "money_per_million": _each(found, options.price_per_hour, money),
        "energy": {**asdict(report.energy), "watt_hours_per_million": _each(found, report.energy.watts, watt_hours)},
        "plan": _plan_fields(report),
        "break_even": None if report.break_even is None else asdict(report.break_even),
        "notes": list(report.notes),
    }


def kinds(found: Costs) -> dict[str, TokenCost | None]:
    """The costs by the kind of token, in the order in which they are shown."""
    return {
        "output": found.output,
        "good": found.good,
        "total": found.total,
        "prefill": found.prefill,
        "decode": found.decode,
        "cached": found.cached,
        "prompt": found.prompt,
    }


def _curve(source: CostSource, options: CostOptions, point: MeasuredLoad) -> list[LoadPoint]:
    rates = sorted((load.rate, load.tokens.output.mean) for load in source.loads if load.rate is not None)
    if not rates or point.rate is None:
        return []
    return load_curve(rates, point.rate, options.loads, options.machines)


def _plan(
    source: CostSource, options: CostOptions, point: MeasuredLoad, demand: Demand
) -> tuple[MachinePlan, list[str]]:
    """One machine's rates for requests of the asked size, from those that were measured, and what is assumed."""
    notes: list[str] = []
    busiest = source.busiest
    seconds = _seconds_per_request(busiest, demand, options.machines)
    if busiest.split is None:
        notes.append("the measured time is not split, so the plan counts output tokens only; prompts as measured")
    scale = 1.0
    if point.output_tokens is not None:
        like = Demand(1, round(point.prompt_tokens or 0), round(point.output_tokens))
        scale = _seconds_per_request(point, demand, options.machines) / _seconds_per_request(
            point, like, options.machines
        )
        if abs(scale - 1) > 0.1:
            notes.append(f"the planned requests are {scale:.2f} times the work of the measured ones; times are scaled")
    kv_tokens, slots = options.kv_tokens or source.kv_tokens, options.slots or source.slots
    service = None if point.service_s is None else point.service_s * scale
    each = demand.prompt_tokens + demand.output_tokens
    limits = MachineLimits(
        compute=1 / seconds,
        kv=little_rate(concurrency=kv_tokens // each, seconds=service) if kv_tokens and service else None,
        slots=little_rate(concurrency=slots, seconds=service) if slots and service else None,
        latency=(point.requests_per_s or 0.0) / options.machines / scale if source.slo else None,
    )
    if limits.kv == 0.0:
        raise ConfigError(
            f"a request of {each} tokens is more than the {kv_tokens} that the KV pool holds", param="kv_tokens"
        )
    if kv_tokens and service is None:
        notes.append("the KV limit is unknown: one number does not say how long a request stays; use --from")
    elif limits.kv is None:
        notes.append("the KV limit is unknown: give --kv-tokens, or a run file of a server that says it")
    if limits.latency is None:
        notes.append("the latency limit is unknown without an SLO: the plan may be too tight for the peak")
    return plan_machines(demand, limits, spare=options.spare), notes


def _seconds_per_request(load: MeasuredLoad, demand: Demand, machines: int) -> float:
    """Machine-seconds of a request of that size at a load's prices."""
    found = costs(load.tokens, machines=machines, split=load.split)
    if found.prefill is not None and found.decode is not None:
        total = demand.prompt_tokens * found.prefill.seconds + demand.output_tokens * found.decode.seconds
    else:
        total = demand.output_tokens * found.output.seconds
    return total / 1e6


def _break_even(options: CostOptions, demand: Demand, plan: MachinePlan) -> BreakEven | None:
    prices = (options.api_price_in, options.api_price_out)
    if prices == (None, None):
        return None
    if None in prices or options.price_per_hour is None:
        raise ConfigError(
            "a comparison with an API needs --api-price-in, --api-price-out and --price-per-hour", param="api_price_in"
        )
    if not sum(price or 0.0 for price in prices) > 0:
        raise ConfigError("--api-price-in and --api-price-out are both 0: nothing beats that", param="api_price_in")
    return break_even(
        demand,
        plan,
        price_per_hour=options.price_per_hour,
        api_price_in=options.api_price_in or 0.0,
        api_price_out=options.api_price_out or 0.0,
    )


def _load_fields(load: MeasuredLoad) -> dict[str, Any]:
    fields = asdict(load)
    fields["tokens_per_s"] = fields.pop("tokens")
    return fields


def _cost_fields(found: Costs) -> dict[str, Any]:
    return {name: None if cost is None else asdict(cost) for name, cost in kinds(found).items()}


def _each(found: Costs, factor: float | None, convert: Any) -> dict[str, float | None] | None:
    if factor is None:
        return None
    return {name: None if cost is None else convert(cost.seconds, factor) for name, cost in kinds(found).items()}


def _plan_fields(report: CostReport) -> dict[str, Any] | None:
    plan, options = report.plan, report.options
    if plan is None:
        return None
    price = options.price_per_hour
    per_day = None if price is None else plan.machines * 24 * price
    return {**asdict(plan), "machines": plan.machines, "money_per_day": per_day}
