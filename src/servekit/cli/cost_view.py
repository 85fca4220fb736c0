"""Costs as people read them: the answer first, then where it comes from. It must not compute."""

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from servekit.bench.words import number, seconds, share
from servekit.cli.cost_report import CostReport, kinds
from servekit.cli.kv_view import make_console
from servekit.kvcalc.cost import BindingLimit, TokenCost, money, watt_hours

_KINDS = {
    "output": ("output", "all machine time over output tokens"),
    "good": ("good", "the same, over tokens of requests within the SLO"),
    "total": ("total", "the same, over all computed tokens"),
    "prefill": ("input", "prefill time over computed prompt tokens"),
    "decode": ("decoded", "decode time over output tokens"),
    "cached": ("cached", "found in the prefix cache: nothing is computed"),
    "prompt": ("prompt", "prefill time over prompt tokens, cached too"),
}
_LIMITS = {
    BindingLimit.COMPUTE: "compute",
    BindingLimit.KV: "KV memory",
    BindingLimit.SLOTS: "slots",
    BindingLimit.LATENCY: "latency (SLO)",
}


def show(report: CostReport) -> None:
    """The headline, the kinds of tokens, the loads, the plan, the remarks."""
    console = make_console()
    point, found = report.point, report.costs
    console.print(
        Text(f"{found.output.seconds:,.0f} machine-seconds for a million output tokens", style="bold"),
        Text(_interval(found.output), style="dim"),
    )
    at = "" if point.rate is None and point.concurrency is None else f" at {point.label}"
    source = f"{report.source.name}{at}, {number(point.tokens.output.mean)} output tokens/s"
    machines = report.options.machines
    console.print(source + (f" on {machines} machines" if machines > 1 else ""), style="dim")
    console.print()
    _show_kinds(console, report)
    _show_loads(console, report)
    _show_curve(console, report)
    _show_plan(console, report)
    _show_remarks(console, report)


def _show_kinds(console: Console, report: CostReport) -> None:
    price, watts = report.options.price_per_hour, report.energy.watts
    table = _table("A million tokens")
    table.add_column("kind", no_wrap=True)
    table.add_column("machine-s", justify="right", no_wrap=True)
    if price is not None:
        table.add_column("money", justify="right", no_wrap=True)
    if watts is not None:
        table.add_column("Wh", justify="right", no_wrap=True)
    table.add_column("rule", overflow="fold")
    for name, cost in kinds(report.costs).items():
        if cost is None:
            continue
        label, rule = _KINDS[name]
        row = [label, f"{cost.seconds:,.0f}"]
        row += [] if price is None else [f"{money(cost.seconds, price):,.4g}"]
        row += [] if watts is None else [f"{watt_hours(cost.seconds, watts):,.4g}"]
        table.add_row(*row, rule)
    console.print(table)


def _show_loads(console: Console, report: CostReport) -> None:
    if len(report.by_load) < 2:
        return
    table = _table("Measured loads, machine-seconds for a million")
    table.add_column("load", no_wrap=True)
    for name in ("tok/s", "TTFT p95", "SLO kept", "output", "good"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for load, found in report.by_load:
        table.add_row(
            load.label,
            number(load.tokens.output.mean),
            seconds(load.ttft_p95_s),
            share(load.attainment),
            f"{found.output.seconds:,.0f}",
            "-" if found.good is None else f"{found.good.seconds:,.0f}",
            "priced" if load is report.point else "",
        )
    console.print(table)


def _show_curve(console: Console, report: CostReport) -> None:
    if not report.curve:
        return
    table = _table("By load, of what this point serves")
    for name in ("load", "requests/s", "output tok/s", "machine-s"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    for at in report.curve:
        table.add_row(
            f"{at.load:.0%}",
            number(at.requests_per_s),
            number(at.output_tokens_per_s),
            f"{at.seconds_per_million:,.0f}",
            "measured" if at.is_measured else "between measured rates",
        )
    console.print(table)


def _show_plan(console: Console, report: CostReport) -> None:
    plan, demand = report.plan, report.options.demand
    if plan is None or demand is None:
        return
    limits = plan.limits
    words = f"{plan.machines} machines: {plan.needed} for the peak and {plan.spare} spare"
    console.print(Text(words, style="bold"))
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    grid.add_row("demand", f"{number(demand.mean_rate)} requests/s, {number(demand.peak_rate)} at the peak")
    each = [
        f"{_LIMITS[limit]} {number(value)}"
        for limit in BindingLimit
        if (value := getattr(limits, limit.value)) is not None
    ]
    grid.add_row("one serves", f"{', '.join(each)} requests/s; bound by {_LIMITS[plan.binding]}")
    grid.add_row(
        "utilisation", f"{share(plan.mean_utilisation)} on average, {share(plan.peak_utilisation)} at the peak"
    )
    even = report.break_even
    if even is not None:
        cheaper = "own machines are cheaper" if even.own_is_cheaper else "the API is cheaper"
        grid.add_row("a day", f"own {even.own_per_day:,.2f}, API {even.api_per_day:,.2f}: {cheaper}")
        serve = "which they can serve" if even.requests_per_day <= even.servable_per_day else "more than they can serve"
        words = f"{even.requests_per_day:,.0f} requests a day, {serve} (at most {even.servable_per_day:,.0f})"
        grid.add_row("break-even", words)
    elif report.options.price_per_hour is not None:
        grid.add_row("a day", f"{plan.machines * 24 * report.options.price_per_hour:,.2f}")
    console.print(grid)
    console.print()


def _show_remarks(console: Console, report: CostReport) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    split = report.costs.split
    if split is not None:
        grid.add_row("split", f"{split.prefill_share:.0%} of the time in prompts, by {split.rule}")
    energy = report.energy
    power = "" if energy.watts is None else f"{number(energy.watts)} W by "
    grid.add_row("energy", f"{power}{energy.source}" + (", so a bound" if energy.is_bound else ""))
    for note in report.notes:
        grid.add_row("note", note)
    console.print(grid)


def _interval(cost: TokenCost) -> str:
    if cost.low is None:
        return ""
    high = "no bound" if cost.high is None else f"{cost.high:,.0f}"
    return f"(95 % interval {cost.low:,.0f} to {high})"


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
