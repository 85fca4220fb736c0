"""`servekit bench offline`: decoding by batch size and prefill by length, in process. Only parses, runs and prints."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from servekit.bench.offline import OfflineReport
    from servekit.bench.offline_roofline import Roofline

_MUCH_SPREAD = 0.2
_POINTS, _ENGINE = "What is run", "Engine"


def offline(
    model: Annotated[str, typer.Argument(help="A model as `servekit serve` takes it.", show_default=True)] = "demo",
    batches: Annotated[
        str, typer.Option(help="Batch sizes of the decode experiment.", rich_help_panel=_POINTS)
    ] = "1,4,16",
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of each prompt.", rich_help_panel=_POINTS)] = 110,
    output_tokens: Annotated[int, typer.Option(min=2, help="Tokens of each answer.", rich_help_panel=_POINTS)] = 64,
    prefill: Annotated[
        str, typer.Option(help="Prompt lengths of the prefill experiment.", rich_help_panel=_POINTS)
    ] = "128,512,1024,2048",
    repeats: Annotated[
        int, typer.Option(min=1, help="Runs of each point, after one that does not count.", rich_help_panel=_POINTS)
    ] = 3,
    dtype: Annotated[str, typer.Option(help="auto, float32 or bfloat16.", rich_help_panel=_ENGINE)] = "auto",
    quantize: Annotated[str, typer.Option(help="auto, none, int8 or int4.", rich_help_panel=_ENGINE)] = "auto",
    kv_dtype: Annotated[str, typer.Option(help="auto, float32, bfloat16 or q8_0.", rich_help_panel=_ENGINE)] = "auto",
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.", rich_help_panel=_ENGINE)] = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads. [physical cores]", rich_help_panel=_ENGINE)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON on standard output.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> int:
    """Decode by batch size and prefill by prompt length, against what this machine reaches at best."""
    import sys
    from json import dumps

    from servekit.config import resolve_config
    from servekit.store.resolve import find_model

    sizes, lengths = _whole_numbers(batches, "--batches"), _whole_numbers(prefill, "--prefill")
    flags: dict[str, Any] = {
        "model": model,
        "quantize": quantize,
        "dtype": dtype,
        "kv_dtype": kv_dtype,
        "device": device,
    }
    config, _ = resolve_config(flags if threads is None else {**flags, "threads": threads}, {})
    files = find_model(model)

    from servekit.bench.offline import Plan, run_offline

    plan = Plan(sizes, prompt_tokens, output_tokens, lengths, repeats)
    report = run_offline(files, config, plan, lambda what: None if quiet else print(what, file=sys.stderr))
    if json:
        typer.echo(dumps(_report(report, plan), indent=2))
    else:
        _show(report)
    return 0


def _whole_numbers(text: str, name: str) -> tuple[int, ...]:
    from servekit.errors import ConfigError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ConfigError(
            f"{name}: {text!r} is not a list of whole numbers", hint="write it like 1,4,16", param=name.strip("-")
        )
    return tuple(int(part) for part in parts)


def _report(report: "OfflineReport", plan: object) -> dict[str, Any]:
    from dataclasses import asdict, is_dataclass

    from servekit.bench.machine import describe_machine

    assert is_dataclass(plan)
    assert not isinstance(plan, type)
    fields = {**asdict(report), "plan": asdict(plan), "machine": describe_machine()}
    fields["ceilings"]["ridge"] = report.ceilings.ridge
    return {"version": 1, "command": "bench offline", **fields}


def _show(report: "OfflineReport") -> None:
    from servekit.cli.kv_view import make_console
    from servekit.units import format_bytes

    console = make_console()
    how = f", {report.threads} threads" if report.threads else ""
    weights = report.dtype if report.quantize == "none" else report.quantize
    console.print(
        f"{report.model} in {weights}, KV in {report.kv_dtype}, {format_bytes(report.weights_bytes)} of weights; "
        f"{report.device}{how}"
    )
    ceilings = report.ceilings
    console.print(
        f"measured ceilings: {ceilings.bytes_per_s / 1e9:,.1f} GB/s of memory, "
        f"{ceilings.flops_per_s / 1e9:,.0f} GFLOP/s in {ceilings.dtype}; "
        f"they meet at {ceilings.ridge:.1f} operations a byte",
        style="dim",
    )
    console.print()
    _show_decode(console, report)
    _show_prefill(console, report)
    spread = max([point.spread for point in report.decode] + [point.spread for point in report.prefill])
    if spread > _MUCH_SPREAD:
        console.print(f"the repeats of a point differ by up to {spread:.0%}: the machine was busy", style="yellow")
    console.print(
        "MBU and MFU are the shares of the two ceilings reached; the limit is the one that takes longer, with its "
        "share",
        style="dim",
    )


def _show_decode(console: "Console", report: "OfflineReport") -> None:
    from servekit.bench.words import number

    first = report.decode[0]
    table = _table(f"Decode: {first.prompt_tokens} prompt tokens, {first.output_tokens} answered, by batch size")
    for name in ("B", "TTFT ms", "TPOT ms", "tok/s", "each", "peak MiB", "KV MiB", "MBU", "MFU"):
        table.add_column(name, justify="right")
    table.add_column("limit", no_wrap=True)
    for point in report.decode:
        table.add_row(
            str(point.batch),
            number(point.ttft_s * 1e3),
            number(point.tpot_s * 1e3),
            number(point.tokens_per_s),
            number(point.per_request_tokens_per_s),
            "-" if point.peak_bytes is None else number(point.peak_bytes / 2**20),
            number(point.kv_bytes / 2**20),
            *_shares(point.roofline),
        )
    console.print(table)
    wrong = [point for point in report.decode if point.kv_bytes != point.kv_bytes_formula]
    for point in wrong:
        console.print(
            f"B = {point.batch}: KV is {point.kv_bytes:,} B, but the formula says {point.kv_bytes_formula:,} B",
            style="bold red",
        )
    if not wrong:
        console.print("KV bytes of the tensors equal the formula's in every row", style="dim")
    console.print()


def _show_prefill(console: "Console", report: "OfflineReport") -> None:
    from servekit.bench.words import number

    table = _table("Prefill: one prompt in one step, by length")
    for name in ("T", "ms", "tok/s", "GFLOP/s", "MBU", "MFU"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("limit", no_wrap=True)
    for point in report.prefill:
        table.add_row(
            f"{point.prompt_tokens:,}",
            number(point.seconds * 1e3),
            number(point.tokens_per_s),
            number(point.roofline.flops_per_s / 1e9),
            *_shares(point.roofline),
        )
    console.print(table)


def _shares(roofline: "Roofline") -> tuple[str, str, str]:
    return f"{roofline.mbu:.0%}", f"{roofline.mfu:.0%}", f"{roofline.limit} {roofline.share:.0%}"


def _table(title: str) -> Any:
    from rich import box
    from rich.table import Table

    return Table(title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False)
