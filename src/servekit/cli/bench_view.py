"""Run files and comparisons as people read them, at 80 columns and without colour too. It must not compute."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from servekit.bench.compare import Change
from servekit.bench.result import Run, RunFile, Summary
from servekit.bench.words import number, seconds, share
from servekit.cli.kv_view import make_console

_MAX_DETAILS = 1
_LATENCIES = (
    ("TTFT", "ttft_s"),
    ("  from send", "ttft_from_send_s"),
    ("TPOT", "tpot_s"),
    ("ITL per token", "itl_s"),
    ("chunk gap", "chunk_gap_s"),
    ("E2E", "e2e_s"),
    ("  from send", "e2e_from_send_s"),
)


def show_run_file(run_file: RunFile) -> None:
    """One run in detail; several as a table with a few lines each."""
    console = make_console()
    target = run_file.target
    console.print(Text(_headline(run_file), style="bold"))
    console.print(f"{target.model} at {target.url} ({target.kind}), seed {run_file.seed}", style="dim")
    console.print()
    if len(run_file.runs) > _MAX_DETAILS:
        _show_overview(console, run_file.runs)
    for run in run_file.runs:
        if len(run_file.runs) <= _MAX_DETAILS:
            _show_latencies(console, run)
        _show_remarks(console, run, with_name=len(run_file.runs) > _MAX_DETAILS)
    _show_knee(console, run_file)


def show_changes(before: str, after: str, changes: Sequence[Change], different: Sequence[str]) -> None:
    """What changed, metric by metric."""
    console = make_console()
    table = _table(f"{after} against {before}")
    table.add_column("load", no_wrap=True)
    table.add_column("metric", no_wrap=True)
    for name in ("before", "after", "change", "95 % interval"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("")
    point: tuple[float | None, int | None] | None = None
    for change in changes:
        is_new = point != (change.rate, change.concurrency)
        point = (change.rate, change.concurrency)
        table.add_row(
            _load(*point) if is_new else "",
            change.metric,
            _value(change.before, change.unit),
            _value(change.after, change.unit),
            f"{change.change:+.1%}",
            "unknown" if change.interval is None else f"{change.interval[0]:+.1%} to {change.interval[1]:+.1%}",
            _verdict(change),
        )
    console.print(table)
    if not any(change.is_paired for change in changes):
        console.print("not paired: the two files did not send the same requests at the same times", style="yellow")
    if different:
        console.print(f"the loads differ in {', '.join(different)}", style="yellow")


def change_fields(change: Change) -> dict[str, Any]:
    """A change for JSON."""
    return {**asdict(change), "change": change.change, "worse_by": change.worse_by}


def _headline(run_file: RunFile) -> str:
    if len(run_file.runs) != 1:
        return f"{len(run_file.runs)} runs"
    run = run_file.runs[0]
    ttft, e2e = run.latency.ttft_s, run.latency.e2e_s
    parts = [f"{_load(run.rate, run.concurrency)}: {run.requests.ok} of {run.requests.sent} answered"]
    if run.throughput.output_tokens_per_s:
        parts.append(f"{number(run.throughput.output_tokens_per_s)} tokens/s")
    if ttft is not None:
        parts.append(f"TTFT p95 {seconds(ttft.p95)}")
    elif e2e is not None:
        parts.append(f"E2E p95 {seconds(e2e.p95)}")
    return ", ".join(parts)


def _show_overview(console: Console, runs: Sequence[Run]) -> None:
    table = _table("Latency from the scheduled arrival, in ms")
    table.add_column("load", no_wrap=True)
    for name in ("answered", "tok/s", "TTFT p50", "p95", "TPOT p50", "E2E p95"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limit", overflow="fold")
    for run in runs:
        latency = run.latency
        table.add_row(
            _load(run.rate, run.concurrency),
            f"{run.requests.ok}/{run.requests.sent}",
            number(run.throughput.output_tokens_per_s),
            *(
                number(None if summary is None else getattr(summary, point) * 1e3)
                for summary, point in (
                    (latency.ttft_s, "p50"),
                    (latency.ttft_s, "p95"),
                    (latency.tpot_s, "p50"),
                    (latency.e2e_s, "p95"),
                )
            ),
            Text("INVALID", style="bold red") if not run.valid else run.limit.name if run.limit else "-",
        )
    console.print(table)


def _show_latencies(console: Console, run: Run) -> None:
    from_what = "the send (closed loop)" if run.concurrency is not None else "the scheduled arrival"
    table = _table(f"Latency from {from_what}, in ms")
    table.add_column("", no_wrap=True)
    for name in ("p50", "p90", "p95", "p99", "max", "95 % of p95"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, attribute in _LATENCIES:
        if run.concurrency is not None and attribute.endswith("from_send_s"):
            continue
        summary: Summary | None = getattr(run.latency, attribute)
        if summary is None:
            continue
        low, high = summary.ci95.get("p95", (None, None))
        table.add_row(
            name,
            *(number(getattr(summary, point) * 1e3) for point in ("p50", "p90", "p95", "p99", "max")),
            "-" if low is None or high is None else f"{number(low * 1e3)} to {number(high * 1e3)}",
        )
    console.print(table)


def _show_remarks(console: Console, run: Run, *, with_name: bool) -> None:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(no_wrap=True, style="dim")
    grid.add_column(overflow="fold")
    if with_name:
        repeat = f", repeat {run.repeat + 1}" if run.repeat else ""
        console.print(Text(f"{_load(run.rate, run.concurrency)}{repeat}", style="bold"))
    for reason in run.invalid_reasons:
        grid.add_row(Text("INVALID", style="bold red"), reason)
    if run.limit is not None:
        also = f" (also {', '.join(run.limit.also)})" if run.limit.also else ""
        grid.add_row("limit", Text.assemble((run.limit.name, "bold"), f"{also}: {'; '.join(run.limit.evidence)}"))
    grid.add_row("throughput", _throughput_words(run))
    if run.goodput is not None:
        grid.add_row("SLO", _goodput_words(run))
    if run.little is not None:
        little = run.little
        product = (
            f"{number(little.arrivals_per_s)}/s x {seconds(little.mean_s)} = {number(little.expected)} in the system"
        )
        grid.add_row("Little", f"{product}, time average {number(little.time_average)}: {little.verdict}")
    if run.audit is not None:
        grid.add_row("generator", _audit_words(run))
    for note in run.notes:
        grid.add_row(Text("note", style="yellow"), note)
    console.print(grid)
    console.print()


def _show_knee(console: Console, run_file: RunFile) -> None:
    knee = run_file.knee
    if knee is None:
        return
    needed = f"{knee.min_attainment:.0%} of the requests keep the SLO"
    if knee.rate is None:
        words = f"knee: at no rate that was tried {needed}"
    elif knee.missed_rate is None:
        words = f"knee: at least {knee.rate:g}/s; {needed} at every rate that was tried"
    else:
        words = f"knee: {knee.rate:g}/s; {needed} there, but not at {knee.missed_rate:g}/s"
    console.print(Text(words, style="bold"))


def _throughput_words(run: Run) -> str:
    flow = run.throughput
    parts = [f"{number(flow.requests_per_s)} requests/s"]
    if flow.output_tokens_per_s:
        parts.append(f"{number(flow.output_tokens_per_s)} output tokens/s")
    if flow.input_tokens_per_s:
        parts.append(f"{number(flow.input_tokens_per_s)} input tokens/s")
    words = ", ".join(parts)
    if run.window is not None:
        inside = run.window.throughput
        rate = f"{number(inside.output_tokens_per_s)} tokens/s" if flow.output_tokens_per_s else ""
        rate = rate or f"{number(inside.requests_per_s)} requests/s"
        words += f"; {rate} between filling and draining, {number(run.window.mean_in_flight)} requests at once"
    return words


def _goodput_words(run: Run) -> str:
    good = run.goodput
    assert good is not None
    low, high = good.attainment_ci95
    bounds = ", ".join(
        f"{name} within {seconds(bound)}: {share(good.by_metric[name])}" for name, bound in good.slo.items()
    )
    kept = f"kept by {share(good.attainment)} (95 % interval {share(low)} to {share(high)})"
    return f"{kept}, {number(good.good_requests_per_s)} good requests/s; {bounds}"


def _audit_words(run: Run) -> str:
    audit = run.audit
    assert audit is not None
    parts = []
    if audit.offered_rate is not None:
        parts.append(f"sent {number(audit.achieved_rate)}/s of {number(audit.offered_rate)}/s")
    if audit.lateness_p99_s is not None:
        parts.append(f"late by {seconds(audit.lateness_p99_s)} (p99)")
    if audit.dispersion is not None:
        parts.append(f"dispersion {number(audit.dispersion)}")
    if audit.loop_lag_p99_s is not None:
        parts.append(f"loop lag {seconds(audit.loop_lag_p99_s)} (p99)")
    if audit.cpu_share is not None:
        parts.append(f"{share(audit.cpu_share)} of a core")
    return ", ".join(parts)


def _verdict(change: Change) -> Text:
    if change.interval is None or not change.is_beyond_chance:
        return Text("chance" if change.interval is not None else "", style="dim")
    return Text("worse", style="bold red") if change.worse_by > 0 else Text("better", style="green")


def _load(rate: float | None, concurrency: int | None) -> str:
    if concurrency is not None:
        return f"{concurrency} client{'' if concurrency == 1 else 's'}"
    return "trace" if rate is None else f"{rate:g}/s"


def _value(value: float, unit: str) -> str:
    return seconds(value) if unit == "s" else number(value)


def _table(title: str) -> Table:
    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
