"""`servekit bench analyze`: the metrics of a load test out of a table that another tool wrote."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from servekit.bench.result import Run


def analyze(
    file: Annotated[
        str, typer.Argument(help="CSV, JSON lines or a run file; - is standard input.", show_default=False)
    ],
    start: Annotated[float, typer.Option(help="When the run began, on the clock of arrival_s.")] = 0.0,
    slo: Annotated[str | None, typer.Option(metavar="BOUNDS", help="Such as ttft=2s,tpot=100ms,e2e=10s.")] = None,
    json: Annotated[bool, typer.Option("--json", help="A run file on standard output.")] = False,
) -> int:
    """Percentiles, throughput, goodput and Little's law from arrival_s, ttft_s, e2e_s and output_tokens."""
    import sys

    from servekit.bench.analyze import read_measured
    from servekit.bench.measure import measure
    from servekit.bench.result import RunFile, Target, encode_run_file
    from servekit.bench.slo import parse_slo

    bounds = parse_slo(slo) if slo is not None else {}
    records = read_measured(file, sys.stdin.buffer, start=start)
    first, last = min(r.scheduled_s for r in records), max(r.end_s or 0.0 for r in records)
    if first > 0.5 * last:
        print(
            f"hint: the first request arrives {first:g} s after the start; --start {start + first:g} begins with it",
            file=sys.stderr,
        )
    run = measure(records, arrival="recorded", slo=bounds)
    run_file = RunFile(command="bench analyze", target=Target(url=file), load={"start": start, "slo": slo}, runs=[run])
    if json:
        sys.stdout.buffer.write(encode_run_file(run_file))
    else:
        _show(run_file.runs[0])
    return 0


def _show(run: "Run") -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from servekit.bench.words import number, seconds, share
    from servekit.cli.kv_view import make_console

    console = make_console()
    flow = run.throughput
    words = f"{run.requests.sent} requests in {seconds(run.duration_s)}, {number(flow.output_tokens_per_s)} tokens/s"
    console.print(Text(words, style="bold"))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("", no_wrap=True)
    points = ("p50", "p90", "p95", "p99", "max", "mean")
    for name in points:
        table.add_column(name, justify="right", no_wrap=True)
    for name, summary in (("TTFT", run.latency.ttft_s), ("TPOT", run.latency.tpot_s), ("E2E", run.latency.e2e_s)):
        if summary is not None:
            table.add_row(name, *(seconds(getattr(summary, point)) for point in points))
    console.print(table)
    if run.little is not None:
        little = run.little
        product = f"{number(little.arrivals_per_s)}/s x {seconds(little.mean_s)} = {number(little.expected)}"
        console.print(f"Little: {product} in the system, time average {number(little.time_average)}: {little.verdict}")
    if run.goodput is not None:
        good = run.goodput
        kept = f"{share(good.attainment)} of the requests keep the SLO"
        console.print(f"{kept}, {number(good.good_requests_per_s)} good requests/s")
