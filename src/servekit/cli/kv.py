"""`servekit kv`: what fits, from a config.json alone. The body only parses, plans and prints."""

from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from rich.console import Console

    from servekit.cli.kv_source import ConfigSource
    from servekit.kvcalc.plan import Load, Model, Plan

_PLAN, _LOAD, _SHOW = "What is planned for", "The load", "What is shown"


def kv(
    configs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="CONFIG...",
            help="A config.json, model folder, .gguf, pulled name, hub id, or - for standard input.",
        ),
    ] = None,
    tokens: Annotated[
        int | None,
        typer.Option(min=1, help="Tokens of a request, prompt and output together.", rich_help_panel=_LOAD),
    ] = None,
    prompt_tokens: Annotated[int | None, typer.Option(min=1, help="Prompt tokens.", rich_help_panel=_LOAD)] = None,
    output_tokens: Annotated[int | None, typer.Option(min=1, help="Output tokens.", rich_help_panel=_LOAD)] = None,
    source_tokens: Annotated[
        int | None,
        typer.Option(min=0, help="Encoder or image tokens that cross-attention keeps.", rich_help_panel=_LOAD),
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, help="Requests at once that should fit.", rich_help_panel=_LOAD)
    ] = None,
    rate: Annotated[float | None, typer.Option(help="Arrivals a second.", rich_help_panel=_LOAD)] = None,
    ttft: Annotated[float | None, typer.Option(help="Seconds to the first token.", rich_help_panel=_LOAD)] = None,
    tpot: Annotated[float | None, typer.Option(help="Seconds for each further token.", rich_help_panel=_LOAD)] = None,
    memory: Annotated[
        str, typer.Option(help="Memory of one device, or auto for this machine's.", rich_help_panel=_PLAN)
    ] = "auto",
    kv_memory: Annotated[
        str | None,
        typer.Option(help="Memory for keys and values alone, instead of --memory.", rich_help_panel=_PLAN),
    ] = None,
    reserve: Annotated[
        str, typer.Option(help="Kept free for everything else: a share or a size.", rich_help_panel=_PLAN)
    ] = "10%",
    kv_dtype: Annotated[
        str | None, typer.Option(help="One or more, as a,b; K and V apart as a/b.", rich_help_panel=_PLAN)
    ] = None,
    weights_dtype: Annotated[
        str | None, typer.Option(help="Weights as if stored in this dtype.", rich_help_panel=_PLAN)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Round every request up to whole blocks.", rich_help_panel=_PLAN)
    ] = None,
    tp: Annotated[int, typer.Option(min=1, help="Devices that share the model.", rich_help_panel=_PLAN)] = 1,
    draft: Annotated[
        str | None, typer.Option(help="The CONFIG of a draft model beside it.", rich_help_panel=_PLAN)
    ] = None,
    bandwidth: Annotated[
        str | None, typer.Option(help="Memory bandwidth, as 3.35TB/s: bounds tokens/s.", rich_help_panel=_PLAN)
    ] = None,
    measure_bandwidth: Annotated[
        bool, typer.Option("--measure-bandwidth", help="Measure this machine's RAM instead.", rich_help_panel=_PLAN)
    ] = False,
    assume: Annotated[
        str | None, typer.Option(help="gqa: compute unknown models so, marked as assumed.", rich_help_panel=_PLAN)
    ] = None,
    explain: Annotated[bool, typer.Option("--explain", help="Every step.", rich_help_panel=_SHOW)] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Requests that fit, by length and dtype.", rich_help_panel=_SHOW)
    ] = False,
    compare: Annotated[
        bool, typer.Option("--compare", help="Several models side by side.", rich_help_panel=_SHOW)
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="JSON, as docs/kv.md says.", rich_help_panel=_SHOW)] = False,
    check: Annotated[
        str | None, typer.Option(metavar="URL", help="A running server: plan against reality.", rich_help_panel=_SHOW)
    ] = None,
) -> int:
    """Say what fits in a memory, from a model's config.json alone."""
    from servekit.cli import kv_options as options
    from servekit.cli.kv_source import read_source
    from servekit.errors import ConfigError, NegativeResult
    from servekit.kvcalc.model_shape import ASSUMPTIONS
    from servekit.kvcalc.plan import Load

    names = configs or []
    if assume is not None and assume not in ASSUMPTIONS:
        raise ConfigError(
            f"--assume: {assume!r} is not known", hint=f"known is {', '.join(ASSUMPTIONS)}", param="assume"
        )
    if check is not None:
        return _check(check, names, options.parse_kv_memory(kv_memory), as_json=json)
    if not names:
        raise ConfigError("no CONFIG given", hint="servekit kv path/to/config.json", param="configs")
    if tokens is not None and (prompt_tokens is not None or output_tokens is not None):
        raise ConfigError("--tokens is prompt and output together: give it, or the two", param="tokens")
    if bandwidth is not None and measure_bandwidth:
        raise ConfigError("--bandwidth and --measure-bandwidth exclude each other", param="bandwidth")
    load = Load(
        memory=options.parse_memory(memory),
        kv_memory=options.parse_kv_memory(kv_memory),
        reserve=options.parse_reserve(reserve),
        num_tokens=tokens,
        prompt_tokens=prompt_tokens,
        output_tokens=output_tokens,
        source_tokens=source_tokens,
        num_requests=requests,
        block_size=block_size,
        num_devices=tp,
        arrivals=options.parse_arrivals(rate, ttft, tpot),
        bandwidth=options.measured_bandwidth() if measure_bandwidth else options.parse_bandwidth(bandwidth),
    )
    dtypes = [name.strip() for name in kv_dtype.split(",")] if kv_dtype else []
    drafted = _model(read_source(draft), assume, None) if draft is not None else None
    planned = [_plans(_model(read_source(name), assume, weights_dtype), load, dtypes, drafted) for name in names]
    if json:
        _print_json(planned, dtypes, with_table=table)
    else:
        _print_text(planned, dtypes, compare=compare, explain=explain, table=table)
    was_asked = memory != "auto" or kv_memory is not None
    if was_asked and any(plans[0].fits is False for plans in planned):
        raise NegativeResult("it does not fit", hint="more --memory, a smaller --kv-dtype, or fewer --tokens")
    return 0


def _model(source: "ConfigSource", assume: str | None, weights_dtype: str | None) -> "Model":
    from servekit.kvcalc.model_shape import read_model_shape
    from servekit.kvcalc.plan import Model
    from servekit.kvcalc.weights import weigh

    shape = read_model_shape(source.config, assume=assume, quantization=source.quantization)
    return Model(source.name, shape, weigh(shape, stored=source.stored, weights_dtype=weights_dtype))


def _plans(model: "Model", load: "Load", dtypes: list[str], draft: "Model | None") -> list["Plan"]:
    from servekit.kvcalc.plan import default_kv_dtype, make_plan

    return [make_plan(model, load, name, draft=draft) for name in dtypes or [default_kv_dtype(model.shape)]]


def _print_json(planned: list[list["Plan"]], dtypes: list[str], *, with_table: bool) -> None:
    from json import dumps

    from servekit.cli.kv_report import VERSION, report
    from servekit.cli.kv_table import capacity_table

    reports = []
    for plans in planned:
        content = report(plans)
        if with_table:
            names, rows = capacity_table(plans[0], dtypes)
            content["table"] = [
                {"tokens": length, "requests": dict(zip(names, counts, strict=True))} for length, counts in rows
            ]
        reports.append(content)
    result = reports[0] if len(reports) == 1 else {"version": VERSION, "models": reports}
    typer.echo(dumps(result, indent=2))


def _print_text(planned: list[list["Plan"]], dtypes: list[str], *, compare: bool, explain: bool, table: bool) -> None:
    from servekit.cli import kv_view as view
    from servekit.cli.kv_table import capacity_table

    console = view.make_console()
    if compare:
        view.show_comparison(console, [plans[0] for plans in planned])
        return
    for index, plans in enumerate(planned):
        if index:
            console.print()
        view.show(console, plans[0], plans[1:])
        if explain:
            console.print()
            view.show_steps(console, plans[0])
        if table:
            console.print()
            view.show_table(console, plans[0], *capacity_table(plans[0], dtypes))


def _check(url: str, names: list[str], kv_memory: int | None, *, as_json: bool) -> int:
    from json import dumps

    from servekit.cli import kv_check
    from servekit.cli import kv_view as view
    from servekit.cli.kv_source import read_source
    from servekit.errors import ConfigError, NegativeResult

    if len(names) > 1:
        raise ConfigError("--check compares one model", param="configs")
    props = kv_check.fetch_props(url)
    config = read_source(names[0]).config if names else None
    rows = kv_check.compare(props, config, kv_memory=kv_memory)
    if as_json:
        found = [{"name": row.name, "planned": row.planned, "real": row.real, "equal": row.is_equal} for row in rows]
        typer.echo(
            dumps({"version": 1, "url": url, "equal": all(row.is_equal for row in rows), "pool": found}, indent=2)
        )
    else:
        console: Console = view.make_console()
        view.show_check(console, url, rows)
    different = [row.name for row in rows if not row.is_equal]
    if different:
        raise NegativeResult(f"plan and server differ in {', '.join(different)}")
    return 0
