"""`servekit bench embed`: four suites for an embedding server. The body only parses, measures and prints."""

from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.bench_target import DEFAULT_URL, ApiKey, ModelId, Url

if TYPE_CHECKING:
    from servekit.bench.embed import Agreement, Calibration, Reference
    from servekit.bench.embed_run import Measured
    from servekit.bench.result import Target


def embed(
    url: Url = DEFAULT_URL,
    model: ModelId = None,
    api_key: ApiKey = None,
    suite: Annotated[
        str, typer.Option(metavar="NAME,NAME...", help="Of latency, scoring, throughput, concurrency.")
    ] = "latency,scoring,throughput,concurrency",
    tokens: Annotated[
        int | None, typer.Option(min=1, help="Leave out cases with longer texts.", show_default=False)
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each case.")] = 50,
    duration: Annotated[str, typer.Option(help="A case ends after this at the latest.")] = "30s",
    warmup: Annotated[int, typer.Option(min=0, help="Requests before each case.")] = 2,
    reference: Annotated[
        str | None,
        typer.Option(metavar="URL|FILE", help="Right vectors: another server, or JSON lines of text and embedding."),
    ] = None,
    min_cosine: Annotated[float, typer.Option(help="Vectors must agree so well before anything is timed.")] = 0.999,
    seed: Annotated[int, typer.Option(help="Seed of the texts.")] = 0,
    timeout: Annotated[str, typer.Option(help="A request fails after this.")] = "600s",
    json: Annotated[bool, typer.Option("--json", help="A run file on standard output.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> int:
    """Check the vectors, then time single texts, candidate lists, full batches and many clients.

    Exit status: 0 measured, 1 no embeddings there or wrong ones, 2 a wrong option, 3 not to be trusted.
    """
    import sys
    from dataclasses import asdict
    from datetime import UTC, datetime

    from servekit.bench.client import Client
    from servekit.bench.connection import Address
    from servekit.bench.embed import SUITES, cases_of
    from servekit.bench.embed_run import Limits
    from servekit.bench.load import run_on_loop
    from servekit.bench.machine import describe_machine
    from servekit.bench.result import RunFile, encode_run_file
    from servekit.bench.slo import parse_duration
    from servekit.errors import ConfigError, InvalidMeasurement

    names = [name.strip() for name in suite.split(",")]
    wrong = next((name for name in names if name not in SUITES), None)
    if wrong is not None:
        raise ConfigError(f"--suite: {wrong!r} is not one of {', '.join(SUITES)}", param="suite")
    if not 0 < min_cosine <= 1:
        raise ConfigError(f"--min-cosine must be over 0, up to 1, not {min_cosine:g}", param="min_cosine")
    cases = [case for name in names for case in cases_of(name) if tokens is None or case.tokens <= tokens]
    if not cases:
        raise ConfigError(f"--tokens {tokens} leaves no case of {suite}", param="tokens")
    limits = Limits(requests, parse_duration(duration, name="--duration"), warmup)
    client = Client(Address.parse(url), api_key=api_key, timeout=parse_duration(timeout, name="--timeout"))

    async def main() -> "tuple[Target, list[Agreement], Calibration, list[Measured]]":
        from servekit.bench import embed as suites
        from servekit.bench import embed_run
        from servekit.bench.probe import identify
        from servekit.cli.bench_progress import shown_progress

        known = None
        try:
            target = await identify(client, model)
            name = target.model or ""
            known = await _reference(reference)
            found = await suites.check_vectors(client, name, seed=seed, reference=known, min_cosine=min_cosine)
            calibration = await suites.calibrate(client, name, [case.tokens for case in cases], seed)
            possible = [case for case in cases if case.tokens in calibration.words]
            texts = suites.Texts(seed, calibration.words)
            with shown_progress(is_shown=not quiet and sys.stderr.isatty()) as watcher:
                measured = await embed_run.run_cases(
                    embed_run.Target(client, name, api_key), possible, texts, limits, watcher.on_start
                )
            return target, found, calibration, measured
        finally:
            client.close()
            if known is not None and known.client is not None:
                known.client.close()

    target, agreements, calibration, measured = run_on_loop(main())
    if json:
        run_file = RunFile(
            command="bench embed",
            created=datetime.now(UTC).isoformat(timespec="seconds"),
            machine=dict(describe_machine()),
            target=target,
            seed=seed,
            load={
                "cases": [asdict(one.case) for one in measured],
                "refused": {str(length): reason for length, reason in calibration.refused.items()},
                "checks": [asdict(agreement) for agreement in agreements],
                "embeddings_per_s": [one.embeddings_per_s for one in measured],
            },
            runs=[one.run for one in measured],
        )
        sys.stdout.buffer.write(encode_run_file(run_file))
        sys.stdout.buffer.flush()
    else:
        _show(target, agreements, calibration, measured)
    invalid = next((one for one in measured if not one.run.valid), None)
    if invalid is not None:
        raise InvalidMeasurement(f"{invalid.case.label}: {'; '.join(invalid.run.invalid_reasons)}")
    return 0


async def _reference(given: str | None) -> "Reference | None":
    from servekit.bench.client import Client
    from servekit.bench.connection import Address
    from servekit.bench.embed import Reference, read_reference
    from servekit.bench.probe import identify

    if given is None:
        return None
    if not given.startswith(("http://", "https://")):
        return read_reference(given)
    client: Client = Client(Address.parse(given))
    target = await identify(client, None)
    return Reference(f"{target.model} at {target.url}", client=client, model=target.model or "")


def _show(
    target: "Target", agreements: "list[Agreement]", calibration: "Calibration", measured: "list[Measured]"
) -> None:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    from servekit.bench.words import number
    from servekit.cli.kv_view import make_console

    console = make_console()
    console.print(Text(f"{target.model} at {target.url}", style="bold"))
    for agreement in agreements:
        console.print(f"cosine at least {agreement.least:.6f} against {agreement.against}, {agreement.texts} texts")
    if len(agreements) == 1:
        console.print("no --reference was given, so only batching was checked", style="yellow")
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("suite", no_wrap=True)
    has_failures = any(one.run.requests.failed for one in measured)
    names = ["tokens", "texts", "clients", "p50 ms", "p90", "p99", "max", "emb/s"]
    for name in names + (["failed"] if has_failures else []):
        table.add_column(name, justify="right", no_wrap=True)
    for one in measured:
        case, summary, requests = one.case, one.run.latency.e2e_s, one.run.requests
        points = ("p50", "p90", "p99", "max")
        row = [case.suite, _tokens(one), str(case.batch), str(case.clients)]
        row += ["-" if summary is None else number(getattr(summary, point) * 1e3) for point in points]
        table.add_row(*row, number(one.embeddings_per_s), *([str(requests.failed)] if has_failures else []))
    console.print(table)
    for length, reason in calibration.refused.items():
        console.print(f"texts of {length:,} tokens were left out: {reason}", style="yellow")


def _tokens(one: "Measured") -> str:
    """The mean that the server counted, where it does."""
    records = [record for record in one.run.records if record.ok and record.input_tokens]
    if not records:
        return f"{one.case.tokens}?"
    return f"{sum(record.input_tokens or 0 for record in records) / len(records) / one.case.batch:.0f}"
