"""What `servekit bench serve` does with its options: run the experiment, write what was asked for, judge it."""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from servekit.bench.client import Client
from servekit.bench.compare import compare, different_loads
from servekit.bench.connection import Address
from servekit.bench.experiment import Experiment, Settings, Watcher
from servekit.bench.export import to_csv, to_jsonl
from servekit.bench.knee import find_knee
from servekit.bench.load import run_on_loop
from servekit.bench.machine import describe_machine
from servekit.bench.result import RunFile, encode_run_file, read_run_file
from servekit.bench.slo import parse_duration
from servekit.bench.tokens import CountTokens, estimate_tokens
from servekit.cli.bench_options import ServeOptions, parse_share
from servekit.errors import ConfigError, InvalidMeasurement, NegativeResult


@dataclass(frozen=True, slots=True)
class Files:
    """Paths to write to, None for what was not asked for."""

    save: str | None = None
    csv: str | None = None
    jsonl: str | None = None
    html: str | None = None


def measure_server(options: ServeOptions, files: Files, *, as_json: bool, quiet: bool) -> int:
    """Measure, write, judge.

    Raises InvalidMeasurement for a run that failed its audit and NegativeResult for a missed SLO, after everything was
    written.
    """
    from servekit.cli.bench_progress import shown_progress
    from servekit.cli.bench_view import show_run_file

    settings, points = options.settings(), options.points()
    address, timeout = Address.parse(options.url), parse_duration(options.timeout, name="--timeout")
    count_tokens = _counter(options.tokenizer)
    for path in (files.save, files.csv, files.jsonl, files.html):
        _check_writable(path)
    with shown_progress(is_shown=not quiet and sys.stderr.isatty()) as watcher:
        client = Client(address, api_key=options.api_key, timeout=timeout, count_tokens=count_tokens)
        run_file = run_on_loop(_experiment(client, options, settings, points, watcher))
    _write(run_file, files)
    if as_json:
        sys.stdout.buffer.write(encode_run_file(run_file))
        sys.stdout.buffer.flush()
    else:
        show_run_file(run_file)
    _judge(run_file, options)
    return 0


def compare_files(before: str, after: str, *, max_regression: str | None, as_json: bool) -> int:
    """Show what changed between two run files. Raises NegativeResult past `max_regression`."""
    from servekit.cli.bench_view import change_fields, show_changes

    limit = None if max_regression is None else parse_share(max_regression, name="--max-regression")
    first, second = read_run_file(before, sys.stdin.buffer), read_run_file(after, sys.stdin.buffer)
    changes, differences = compare(first, second), different_loads(first, second)
    regressed = [change for change in changes if limit is not None and change.is_regression(limit)]
    if as_json:
        found = {
            "before": before,
            "after": after,
            "max_regression": limit,
            "regressed": bool(regressed),
            "different_loads": differences,
            "changes": [change_fields(change) for change in changes],
        }
        print(msgspec.json.encode(found).decode())
    else:
        show_changes(before, after, changes, differences)
    if regressed:
        worst = max(regressed, key=lambda change: change.worse_by)
        raise NegativeResult(f"{worst.metric} is {worst.worse_by:.1%} worse, more than {limit:.1%} allows")
    return 0


async def _experiment(
    client: Client,
    options: ServeOptions,
    settings: Settings,
    points: list[tuple[float | None, int | None]],
    watcher: Watcher,
) -> RunFile:
    try:
        experiment = await Experiment.begin(client, options.model, settings, watcher)
        knee = None
        if options.find_knee:
            start = points[0][0]
            assert start is not None
            knee, runs = await find_knee(
                lambda rate: experiment.run(rate=rate), start, min_attainment=options.needed_attainment
            )
        else:
            runs = await experiment.sweep(points, options.repeats)
    finally:
        client.close()
    return RunFile(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=dict(describe_machine()),
        target=experiment.target,
        seed=options.seed,
        load=options.echo(),
        runs=runs,
        knee=knee,
    )


def _judge(run_file: RunFile, options: ServeOptions) -> None:
    for run in run_file.runs:
        if not run.valid:
            raise InvalidMeasurement(
                f"a run is not to be trusted: {'; '.join(run.invalid_reasons)}",
                hint="lower the rate, or run the load generator on an idle machine",
            )
    if run_file.knee is not None:
        if run_file.knee.rate is None:
            raise NegativeResult(
                "no rate that was tried keeps the SLO", hint="loosen --slo, or start at a lower --rate"
            )
        return
    if options.min_attainment is None:
        return
    missed = [run for run in run_file.runs if run.goodput and run.goodput.attainment < options.min_attainment]
    if missed:
        share = min(run.goodput.attainment for run in missed if run.goodput)
        raise NegativeResult(f"the SLO was kept by {share:.1%} of the requests, not by {options.min_attainment:.1%}")


def _write(run_file: RunFile, files: Files) -> None:
    if files.save is not None:
        _write_file(files.save, encode_run_file(run_file))
    if files.csv is not None:
        _write_file(files.csv, to_csv(run_file.runs).encode())
    if files.jsonl is not None:
        _write_file(files.jsonl, b"".join(to_jsonl(run_file.runs)))
    if files.html is not None:
        from servekit.bench.html import render_report

        _write_file(files.html, render_report(run_file).encode())


def _check_writable(path: str | None) -> None:
    """Say so before the load, not after it, when a result could not be written."""
    if path is not None and not Path(path).resolve().parent.is_dir():
        raise ConfigError(f"{path} cannot be written: its folder does not exist", param=path)


def _write_file(path: str, data: bytes) -> None:
    try:
        Path(path).write_bytes(data)
    except OSError as error:
        raise ConfigError(f"{path} cannot be written: {error.strerror}", param=path) from error


def _counter(name: str | None) -> CountTokens:
    """Counts with the tokenizer of a pulled model or a folder; without one, estimates."""
    if name is None:
        return estimate_tokens
    from servekit.engine.text.tokenizer import Tokenizer
    from servekit.store.resolve import find_model

    encode: Callable[[str, bool], list[int]] = Tokenizer.from_directory(find_model(name).directory).encode
    return lambda text: len(encode(text, False))
