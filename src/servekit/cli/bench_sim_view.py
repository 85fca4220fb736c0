"""Simulations as people read them: a table of runs, a fit with its errors, and slots drawn in characters."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table
from rich.text import Text

from servekit.bench.fit import FittedFile, ServerLimits
from servekit.bench.result import Run, Summary
from servekit.bench.sim import StepTimes
from servekit.bench.sim_steps import StepCount
from servekit.cli.kv_view import make_console as make_console

_NAMES = {
    "output_tokens_per_s": "output tokens/s",
    "ttft_p50_s": "TTFT p50, s",
    "ttft_p95_s": "TTFT p95, s",
    "tpot_p50_s": "TPOT p50, s",
    "e2e_p50_s": "E2E p50, s",
    "e2e_p95_s": "E2E p95, s",
}


def show_runs(
    console: Console, runs: Sequence[tuple[str, Run]], limits: ServerLimits, times: StepTimes | None = None
) -> None:
    """A row for each policy and rate, and what limited it."""
    blocks = "" if limits.num_blocks is None else f", {limits.num_blocks:,} KV blocks of {limits.block_size} tokens"
    table = _table(f"Simulated: {limits.slots} slots, {limits.max_num_batched_tokens:,} tokens a step{blocks}")
    table.add_column("policy", no_wrap=True)
    table.add_column("rate", justify="right")
    table.add_column("tok/s", justify="right")
    for name in ("TTFT p50", "p95", "E2E p50", "p95"):
        table.add_column(name, justify="right", no_wrap=True)
    has_limits = any(run.limit is not None for _, run in runs)
    if has_limits:
        table.add_column("limit", overflow="fold")
    for policy, run in runs:
        row = [policy, "-" if run.rate is None else f"{run.rate:g}", f"{run.throughput.output_tokens_per_s:.1f}"]
        row += [*_pair(run.latency.ttft_s), *_pair(run.latency.e2e_s)]
        if has_limits:
            row.append(run.limit.name if run.limit else "")
        table.add_row(*row)
    console.print(table)
    if times is not None:
        console.print(
            f"a step takes {times.base * 1e3:.3g} ms, {times.per_sequence * 1e3:.3g} ms more for each sequence that "
            f"decodes and {times.per_prefill_token * 1e3:.3g} ms for each prompt token",
            style="dim",
        )


def show_fit(console: Console, fitted: FittedFile) -> None:
    """The fitted step times, and measured against predicted for every run."""
    fit = fitted.fit
    console.print(Text(f"Step times fitted to {fit.num_phases} phases of requests", style="bold"))
    console.print(f"a phase is {fit.relative_error:.1%} off, typically")
    for name in fit.left_out:
        console.print(f"{name} cannot be told apart in these runs and is left at 0", style="dim")
    if not any(record.chunks for run in fitted.runs for record in run.records):
        console.print("the file has no times of single tokens, so the fit is coarse", style="yellow")
    for check in fitted.checks:
        rate = "the run" if check.rate is None else f"{check.rate:g} requests/s"
        how = "predicted from the other runs" if check.held_out else "predicted from itself"
        table = _table(f"{rate}, {how}")
        table.add_column("metric")
        for name in ("measured", "predicted", "error"):
            table.add_column(name, justify="right")
        for found in check.predictions:
            error = f"{found.error:+.1%}" if found.measured else "-"
            table.add_row(_NAMES[found.metric], f"{found.measured:.3f}", f"{found.predicted:.3f}", error)
        console.print(table)


def show_steps(console: Console, counts: Sequence[StepCount]) -> None:
    """Each policy's steps, drawn: a line for each slot, a column for each step, a letter for each request."""
    for count in counts:
        steps = f"{count.steps} step{'' if count.steps == 1 else 's'}"
        show_chart(console, f"{count.policy}: {steps}, {count.idle_slot_steps} idle slot steps", count.chart)


def show_chart(console: Console, title: str, lines: Sequence[str]) -> None:
    """Slots over steps, in as many pieces as the width needs."""
    console.print(Text(title, style="bold"))
    margin = len(f"slot {len(lines)} ")
    width = max(10, console.width - margin)
    length = max((len(line) for line in lines), default=0)
    for start in range(0, length, width):
        for number, line in enumerate(lines, start=1):
            console.print(Text(f"slot {number}".ljust(margin) + line[start : start + width]), soft_wrap=True)
        console.print()


def _pair(summary: Summary | None) -> tuple[str, str]:
    return ("-", "-") if summary is None else (f"{summary.p50:.2f}", f"{summary.p95:.2f}")


def _table(title: str) -> Table:
    return Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, expand=False, pad_edge=False
    )
