"""A run file as one HTML file: no script, no network, light or dark as the reader's system is. It must not measure."""

from collections.abc import Sequence
from html import escape

from servekit.bench.charts import Row, Segment, Series, histogram, line_chart, timeline
from servekit.bench.result import Record, Run, RunFile, Summary
from servekit.bench.times import inter_token_latencies
from servekit.bench.words import number, round_seconds, seconds, share

_MAX_ROWS = 200

_STYLE = """
:root { color-scheme: light dark; --page: #fff; --ink: #1d2129; --soft: #5b6472; --line: #d9dde3; --card: #f5f6f8;
  --queue: #e0a030; --prefill: #2f6fde; --decode: #2e9d63; --failed: #cf3f36; --mark: #1d2129; --warn: #fff3d6; }
@media (prefers-color-scheme: dark) { :root { --page: #14171c; --ink: #e6e9ee; --soft: #9aa4b2; --line: #323842;
  --card: #1d222a; --queue: #d9a441; --prefill: #6ea3ff; --decode: #4fc487; --failed: #ff7a70; --mark: #e6e9ee;
  --warn: #3a3016; } }
* { box-sizing: border-box; }
body { margin: 0 auto; max-width: 1180px; padding: 28px 24px 64px; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, "Segoe UI", Roboto, "Noto Sans", sans-serif; font-variant-numeric: tabular-nums; }
h1 { font-size: 25px; line-height: 1.25; margin: 0 0 4px; } h2 { font-size: 18px; margin: 36px 0 6px; }
h3 { font-size: 15px; margin: 22px 0 4px; } p { margin: 4px 0; } .soft { color: var(--soft); }
.cards { display: flex; flex-wrap: wrap; gap: 12px; margin: 18px 0 6px; }
.card { background: var(--card); border-radius: 8px; padding: 10px 16px; min-width: 140px; flex: 1 1 auto; }
.card b { display: block; font-size: 21px; line-height: 1.3; white-space: nowrap; }
.card span { color: var(--soft); font-size: 13px; }
table { border-collapse: collapse; width: 100%; margin: 8px 0; font-size: 14px; }
th, td { text-align: right; padding: 5px 10px; border-bottom: 1px solid var(--line); white-space: nowrap; }
th { font-weight: 600; color: var(--soft); } th:first-child, td:first-child, .left { text-align: left; }
td.wide { white-space: normal; text-align: left; }
details { border-top: 1px solid var(--line); padding: 10px 0; } summary { cursor: pointer; font-weight: 600; }
.note { background: var(--warn); border-radius: 6px; padding: 6px 12px; margin: 6px 0; }
.bad { color: var(--failed); font-weight: 600; }
svg { width: 100%; height: auto; display: block; margin: 6px 0; }
svg text { font-size: 13px; fill: var(--ink); } svg .tick, svg .axis { fill: var(--soft); }
svg .grid { stroke: var(--line); stroke-width: 1; } svg .mark { stroke: var(--mark); stroke-dasharray: 3 3; }
svg .line { fill: none; stroke-width: 2; } svg .whisker { stroke-width: 1.5; opacity: .55; }
svg g.c1 .line, svg g.c1 .whisker { stroke: var(--prefill); } svg g.c1 .dot { fill: var(--prefill); }
svg g.c2 .line, svg g.c2 .whisker { stroke: var(--queue); } svg g.c2 .dot { fill: var(--queue); }
svg g.c3 .line, svg g.c3 .whisker { stroke: var(--decode); } svg g.c3 .dot { fill: var(--decode); }
.queue { fill: var(--queue); } .prefill { fill: var(--prefill); } .decode { fill: var(--decode); }
.failed { fill: var(--failed); }
.key { display: inline-block; width: 12px; height: 12px; border-radius: 3px; margin: 0 6px 0 16px;
  vertical-align: -1px; } .key:first-child { margin-left: 0; }
.key.queue { background: var(--queue); } .key.prefill { background: var(--prefill); }
.key.decode { background: var(--decode); } .key.failed { background: var(--failed); }
"""


def render_report(run_file: RunFile) -> str:
    """The whole document."""
    target, runs = run_file.target, run_file.runs
    title = f"{target.model or 'a server'} under load"
    parts = [
        f"<h1>{escape(title)}</h1>",
        f'<p class="soft">{escape(_subtitle(run_file))}</p>',
        _cards(run_file),
        _overview(runs),
        _rate_chart(runs),
        *(_run_section(run, is_open=position == len(runs) - 1) for position, run in enumerate(runs)),
        f'<h2>How it was measured</h2><p class="soft">{escape(_method(run_file))}</p>',
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style>"
    )
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body>\n{body}\n</body></html>\n'


def _subtitle(run_file: RunFile) -> str:
    target, machine = run_file.target, run_file.machine
    where = f"{target.url} ({target.kind})"
    cores = f"{machine['cores']} cores" if "cores" in machine else ""
    said = [where, run_file.created, str(machine.get("processor", "")), cores, f"seed {run_file.seed}"]
    return ", ".join(part for part in said if part)


def _cards(run_file: RunFile) -> str:
    """The numbers that matter, of the run with the most load that is valid."""
    run = next((run for run in reversed(run_file.runs) if run.valid), run_file.runs[-1])
    cards = [("tokens out a second", number(run.throughput.output_tokens_per_s or None))]
    if run.latency.ttft_s is not None:
        cards.append(("TTFT p95", seconds(run.latency.ttft_s.p95)))
    if run.latency.tpot_s is not None:
        cards.append(("TPOT p50", seconds(run.latency.tpot_s.p50)))
    if run.latency.e2e_s is not None:
        cards.append(("E2E p95", seconds(run.latency.e2e_s.p95)))
    if run.goodput is not None:
        cards.append(("kept the SLO", share(run.goodput.attainment)))
    if run_file.knee is not None:
        knee = run_file.knee.rate
        cards.append(("knee", "none" if knee is None else f"{knee:g}/s"))
    elif run.limit is not None:
        cards.append(("limit", run.limit.name))
    boxes = "".join(f'<div class="card"><b>{escape(text)}</b><span>{escape(name)}</span></div>' for name, text in cards)
    return f'<div class="cards">{boxes}</div><p class="soft">at {escape(_name(run))}</p>'


def _overview(runs: Sequence[Run]) -> str:
    head = ("load", "answered", "tokens/s", "TTFT p50", "p95", "p99", "TPOT p50", "p95", "E2E p50", "p95", "limit")
    rows = "".join(_overview_row(run) for run in runs)
    titles = "".join(f"<th>{escape(name)}</th>" for name in head)
    return f"<h2>Every run</h2><table><thead><tr>{titles}</tr></thead><tbody>{rows}</tbody></table>"


def _overview_row(run: Run) -> str:
    latency = run.latency
    cells = [
        escape(_name(run)),
        f"{run.requests.ok}/{run.requests.sent}",
        number(run.throughput.output_tokens_per_s or None),
        *(_point(latency.ttft_s, point) for point in ("p50", "p95", "p99")),
        *(_point(latency.tpot_s, point) for point in ("p50", "p95")),
        *(_point(latency.e2e_s, point) for point in ("p50", "p95")),
        '<span class="bad">invalid</span>' if not run.valid else escape(run.limit.name) if run.limit else "-",
    ]
    return "<tr>" + "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"


def _rate_chart(runs: Sequence[Run]) -> str:
    """Latency over the rate, or over the clients of closed loops, from the first repeat of each."""
    is_closed = all(run.concurrency is not None for run in runs)
    points = [
        (float(run.concurrency or 0) if is_closed else run.rate, run)
        for run in runs
        if run.repeat == 0 and (is_closed or run.rate is not None)
    ]
    placed = sorted(((x, run) for x, run in points if x is not None), key=lambda point: point[0])
    wanted = (
        ("TTFT p50", "c1", "circle", "ttft_s", "p50"),
        ("TTFT p95", "c2", "square", "ttft_s", "p95"),
        ("E2E p95", "c3", "triangle", "e2e_s", "p95"),
    )
    series = []
    for name, css, mark, attribute, point in wanted:
        known: list[tuple[float, Summary]] = [
            (x, summary) for x, run in placed if (summary := getattr(run.latency, attribute)) is not None
        ]
        if known:
            dots = [(x, getattr(summary, point)) for x, summary in known]
            series.append(Series(name, css, mark, dots, [summary.ci95.get(point) for _, summary in known]))
    if not series:
        return ""
    x_name = "clients (closed loop)" if is_closed else "arrivals a second"
    chart = line_chart(
        series,
        x_name=x_name,
        x_words=lambda x: f"{x:g}",
        y_words=seconds,
        tick_words=round_seconds,
        label=f"Latency against {x_name}",
    )
    from_what = "the send" if is_closed else "the scheduled arrival"
    return (
        f"<h2>Latency against {'clients' if is_closed else 'rate'}</h2>"
        f'<p class="soft">From {from_what}; the vertical axis is logarithmic, bars are 95 % intervals.</p>{chart}'
    )


def _run_section(run: Run, *, is_open: bool) -> str:
    parts = [f'<p class="bad">Not valid: {escape(reason)}</p>' for reason in run.invalid_reasons]
    if run.limit is not None:
        evidence = escape("; ".join(run.limit.evidence))
        also = f" Also: {escape(', '.join(run.limit.also))}." if run.limit.also else ""
        parts.append(f"<p><b>Limit: {escape(run.limit.name)}.</b> {evidence}.{also}</p>")
    if run.little is not None:
        little = run.little
        words = (
            f"Little's law: {number(little.arrivals_per_s)} requests/s x {seconds(little.mean_s)} = "
            f"{number(little.expected)} in the system; time average {number(little.time_average)}: {little.verdict}."
        )
        parts.append(f"<p>{escape(words)}</p>")
    parts += [f'<p class="note">{escape(note)}</p>' for note in run.notes]
    parts.append(_timeline(run))
    parts.append(_gap_chart(run))
    return f"<details{' open' if is_open else ''}><summary>{escape(_name(run))}</summary>{''.join(parts)}</details>"


def _timeline(run: Run) -> str:
    rows = [_row(record) for record in run.records[:_MAX_ROWS] if record.end_s is not None]
    if not rows or run.duration_s <= 0:
        return ""
    has_timings = any(record.timings is not None for record in run.records)
    keys = [("queue", "queue"), ("prefill", "prefill"), ("decode", "decode")]
    if not has_timings:
        keys = [("queue", "until the first token"), ("decode", "decode")]
    if any(not record.ok for record in run.records):
        keys.append(("failed", "failed"))
    legend = "".join(f'<span class="key {css}"></span>{name}' for css, name in keys)
    cut = f", the first {_MAX_ROWS} of {len(run.records)}" if len(run.records) > _MAX_ROWS else ""
    chart = timeline(rows, end=run.duration_s, words=round_seconds, label="Timeline of the requests")
    return f'<h3>Requests over time</h3><p class="soft">One row a request{cut}: {legend}</p>{chart}'


def _row(record: Record) -> Row:
    """A request's phases: by the server's own timings where it gives them, else by its first token."""
    start, end = record.scheduled_s, record.end_s or record.scheduled_s
    title = f"request {record.index}: arrived {seconds(start)}, ended after {seconds(end - start)}"
    if not record.ok:
        return Row([Segment(start, end, "failed")], f"{title}, {record.error}")
    title += f", {record.input_tokens} tokens in, {record.output_tokens} out"
    first = record.first_token_s
    if first is None:
        return Row([Segment(start, end, "queue")], title)
    if record.timings is None:
        return Row([Segment(start, first, "queue"), Segment(first, end, "decode")], title)
    began = max(start, first - record.timings.prefill_s)
    phases = [Segment(start, began, "queue"), Segment(began, first, "prefill"), Segment(first, end, "decode")]
    words = ", ".join(f"{phase.css} {seconds(phase.end - phase.start)}" for phase in phases)
    return Row(phases, f"{title}: {words}")


def _gap_chart(run: Run) -> str:
    values = [value for record in run.records if record.ok for value in inter_token_latencies(record)]
    summary = run.latency.itl_s
    if not any(value > 0 for value in values) or summary is None:
        return ""
    marks = [("p50", summary.p50), ("p95", summary.p95), ("p99", summary.p99)]
    chart = histogram(
        values, marks, words=seconds, tick_words=round_seconds, label="Distribution of the time between tokens"
    )
    return (
        f'<h3>Time between tokens (ITL)</h3><p class="soft">Share of {len(values):,} tokens by the time that each took '
        f"after the one before; the horizontal axis is logarithmic.</p>{chart}"
    )


def _method(run_file: RunFile) -> str:
    load = run_file.load
    asked = ", ".join(f"{name} {load[name]}" for name in ("endpoint", "prompts", "outputs", "arrival") if name in load)
    return (
        f"servekit {run_file.machine.get('servekit', '')}, {run_file.command}: {asked}. Arrivals follow a seeded "
        "schedule on a monotonic clock, and latency counts from the scheduled arrival. The first token is the first "
        "chunk with text; token counts come from the server's usage; percentiles interpolate linearly; intervals are "
        "from resampled blocks of requests."
    )


def _name(run: Run) -> str:
    repeat = f", repeat {run.repeat + 1}" if run.repeat else ""
    if run.concurrency is not None:
        return f"{run.concurrency} client{'' if run.concurrency == 1 else 's'}, closed loop{repeat}"
    return f"trace{repeat}" if run.rate is None else f"{run.rate:g}/s{repeat}"


def _point(summary: Summary | None, name: str) -> str:
    return "-" if summary is None else seconds(getattr(summary, name))
