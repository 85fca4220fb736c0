"""Runs as flat tables: a CSV with one row a run, JSON lines with one object a request."""

import csv
import io
from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from servekit.bench.result import Run, Summary
from servekit.bench.times import end_to_end, time_per_output_token, time_to_first_token

_LATENCIES = ("ttft_s", "ttft_from_send_s", "tpot_s", "itl_s", "chunk_gap_s", "e2e_s", "e2e_from_send_s")
_POINTS = ("mean", "p50", "p90", "p95", "p99", "max")


def to_csv(runs: Sequence[Run]) -> str:
    """One row a run, a header first; an empty cell is what was not measured."""
    rows = [_row(run) for run in runs]
    text = io.StringIO()
    writer = csv.DictWriter(text, fieldnames=list(rows[0]) if rows else [], lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return text.getvalue()


def to_jsonl(runs: Sequence[Run]) -> Iterator[bytes]:
    """One line a request: the run it belongs to, its derived times, and its record."""
    for run in runs:
        for record in run.records:
            line = {
                "rate": run.rate,
                "concurrency": run.concurrency,
                "repeat": run.repeat,
                "arrival_s": record.scheduled_s,
                "ttft_s": time_to_first_token(record),
                "tpot_s": time_per_output_token(record),
                "e2e_s": end_to_end(record) if record.ok else None,
                "ok": record.ok,
            }
            yield msgspec.json.encode({**line, **msgspec.structs.asdict(record)}) + b"\n"


def _row(run: Run) -> dict[str, Any]:
    row: dict[str, Any] = {
        "rate": run.rate,
        "concurrency": run.concurrency,
        "arrival": run.arrival,
        "repeat": run.repeat,
        "valid": run.valid,
        "duration_s": run.duration_s,
        "sent": run.requests.sent,
        "ok": run.requests.ok,
        "failed": run.requests.failed,
        "input_tokens": run.tokens.input,
        "output_tokens": run.tokens.output,
        "cached_tokens": run.tokens.cached,
        "output_tokens_per_s": run.throughput.output_tokens_per_s,
        "input_tokens_per_s": run.throughput.input_tokens_per_s,
        "requests_per_s": run.throughput.requests_per_s,
    }
    for name in _LATENCIES:
        summary: Summary | None = getattr(run.latency, name)
        for point in _POINTS:
            row[f"{name.removesuffix('_s')}_{point}_s"] = None if summary is None else getattr(summary, point)
    row["attainment"] = None if run.goodput is None else run.goodput.attainment
    row["good_requests_per_s"] = None if run.goodput is None else run.goodput.good_requests_per_s
    row["limit"] = None if run.limit is None else run.limit.name
    return row
