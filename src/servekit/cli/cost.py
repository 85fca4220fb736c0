"""`servekit cost`: machine-seconds for a million tokens, and money, energy and machines if asked. Only parses."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from servekit.cli.cost_report import CostOptions, Energy
    from servekit.cli.cost_source import CostSource
    from servekit.kvcalc.cost import Demand

_SOURCE, _PRICE, _PLAN = "What was measured", "Money and energy", "How many machines"


def cost(
    tokens_per_second: Annotated[
        str | None,
        typer.Option(metavar="R,R...", help="Output tokens a second; several are repeats.", rich_help_panel=_SOURCE),
    ] = None,
    from_: Annotated[
        str | None,
        typer.Option("--from", metavar="FILE", help="A run file; - is standard input.", rich_help_panel=_SOURCE),
    ] = None,
    url: Annotated[
        str | None,
        typer.Option(help="A server in use: its counters are read twice, nothing is sent.", rich_help_panel=_SOURCE),
    ] = None,
    seconds: Annotated[
        str | None, typer.Option(help="How long --url watches. [10]", rich_help_panel=_SOURCE, show_default=False)
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="SERVEKIT_API_KEY", help="For --url, as a bearer token.", rich_help_panel=_SOURCE),
    ] = None,
    machines: Annotated[str, typer.Option(help="Machines that made these tokens.", rich_help_panel=_SOURCE)] = "1",
    slo: Annotated[
        str | None,
        typer.Option(metavar="BOUNDS", help="Such as ttft=2s,tpot=100ms; else the file's.", rich_help_panel=_SOURCE),
    ] = None,
    min_attainment: Annotated[
        str | None, typer.Option(help="Share of the requests that must keep it. [0.9]", rich_help_panel=_SOURCE)
    ] = None,
    load: Annotated[
        str | None,
        typer.Option(metavar="P,P...", help="Loads of the curve, in percent. [10,30,50,100]", rich_help_panel=_SOURCE),
    ] = None,
    price_per_hour: Annotated[
        str | None, typer.Option(help="Of one machine, in any currency.", rich_help_panel=_PRICE)
    ] = None,
    watts: Annotated[
        str | None, typer.Option(help="Of one machine: its name plate, a bound.", rich_help_panel=_PRICE)
    ] = None,
    requests_per_day: Annotated[str | None, typer.Option(help="To be served.", rich_help_panel=_PLAN)] = None,
    prompt_tokens: Annotated[str | None, typer.Option(help="Of each of them.", rich_help_panel=_PLAN)] = None,
    output_tokens: Annotated[str | None, typer.Option(help="Of each of them.", rich_help_panel=_PLAN)] = None,
    peak_factor: Annotated[
        str | None, typer.Option(help="Rate at the peak over the day's mean. [1]", rich_help_panel=_PLAN)
    ] = None,
    spare: Annotated[
        int | None, typer.Option(min=0, help="Machines beside those needed. [1]", rich_help_panel=_PLAN)
    ] = None,
    kv_tokens: Annotated[
        str | None, typer.Option(help="Tokens a machine's KV pool holds. [the server's]", rich_help_panel=_PLAN)
    ] = None,
    slots: Annotated[
        str | None, typer.Option(help="Requests a machine runs at once. [the server's]", rich_help_panel=_PLAN)
    ] = None,
    api_price_in: Annotated[
        str | None, typer.Option(help="An API's price of a million prompt tokens.", rich_help_panel=_PLAN)
    ] = None,
    api_price_out: Annotated[
        str | None, typer.Option(help="And of a million output tokens.", rich_help_panel=_PLAN)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="JSON, as docs/cost.md says.")] = False,
) -> int:
    """Say how many machine-seconds a million tokens take, from a number, a run file or a server in use.

    Exit status: 0 priced, 1 no load keeps the SLO or nothing was computed, 2 a wrong value, 3 no valid run.
    """
    from json import dumps

    from servekit.cli import cost_options as parse
    from servekit.cli import cost_view
    from servekit.cli.cost_report import CostOptions, make_report, report_fields
    from servekit.errors import ConfigError

    inputs = {
        "tokens_per_second": tokens_per_second,
        "from": from_,
        "url": url,
        "seconds": seconds,
        "machines": machines,
        "slo": slo,
        "min_attainment": min_attainment,
        "load": load,
        "price_per_hour": price_per_hour,
        "watts": watts,
        "requests_per_day": requests_per_day,
        "prompt_tokens": prompt_tokens,
        "output_tokens": output_tokens,
        "peak_factor": peak_factor,
        "spare": spare,
        "kv_tokens": kv_tokens,
        "slots": slots,
        "api_price_in": api_price_in,
        "api_price_out": api_price_out,
    }
    share = parse.parse_positive(min_attainment or "0.9", "--min-attainment") or 0.0
    if share > 1:
        raise ConfigError(f"--min-attainment is a share up to 1, not {min_attainment}", param="min_attainment")
    options = CostOptions(
        machines=parse.parse_whole(machines, "--machines") or 1,
        min_attainment=share,
        loads=tuple(parse.parse_loads(load or "10,30,50,100")),
        price_per_hour=parse.parse_positive(price_per_hour, "--price-per-hour"),
        watts=parse.parse_positive(watts, "--watts"),
        demand=_demand(requests_per_day, prompt_tokens, output_tokens, peak_factor),
        spare=1 if spare is None else spare,
        kv_tokens=parse.parse_whole(kv_tokens, "--kv-tokens"),
        slots=parse.parse_whole(slots, "--slots"),
        api_price_in=parse.parse_price(api_price_in, "--api-price-in"),
        api_price_out=parse.parse_price(api_price_out, "--api-price-out"),
    )
    _refuse_unused(options, inputs)
    source, energy = _source(tokens_per_second, from_, url, seconds, api_key, slo, options)
    report = make_report(source, options, energy)
    if json:
        typer.echo(dumps(report_fields(report, inputs), indent=2))
    else:
        cost_view.show(report)
    return 0


def _demand(
    requests_per_day: str | None, prompt_tokens: str | None, output_tokens: str | None, peak_factor: str | None
) -> "Demand | None":
    from servekit.cli import cost_options as parse
    from servekit.errors import ConfigError
    from servekit.kvcalc.cost import Demand

    requests = parse.parse_positive(requests_per_day, "--requests-per-day")
    prompt = parse.parse_whole(prompt_tokens, "--prompt-tokens")
    output = parse.parse_whole(output_tokens, "--output-tokens")
    peak = parse.parse_positive(peak_factor, "--peak-factor")
    given = {"--requests-per-day": requests, "--prompt-tokens": prompt, "--output-tokens": output}
    if requests is None and prompt is None and output is None and peak is None:
        return None
    missing = next((name for name, value in given.items() if value is None), None)
    if missing is not None:
        raise ConfigError(
            f"{missing} is missing: a plan needs {', '.join(given)}", param=missing.strip("-").replace("-", "_")
        )
    if peak is not None and peak < 1:
        raise ConfigError(f"--peak-factor must be at least 1, not {peak:g}", param="peak_factor")
    assert requests is not None
    assert prompt is not None
    assert output is not None
    return Demand(requests, prompt, output, peak or 1.0)


def _refuse_unused(options: "CostOptions", inputs: dict[str, Any]) -> None:
    """Nothing is parsed and then ignored."""
    from servekit.errors import ConfigError

    sources = [name for name in ("tokens_per_second", "from", "url") if inputs[name] is not None]
    if len(sources) != 1:
        named = "exclude each other" if sources else "are missing"
        raise ConfigError(
            f"--tokens-per-second, --from and --url {named}: one of them is the source",
            hint="servekit cost --tokens-per-second 709.7, or servekit bench serve --json | servekit cost --from -",
            param="from",
        )
    if inputs["from"] is None:
        for name in ("slo", "min_attainment", "load"):
            if inputs[name] is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} needs --from: only a run file has requests and several loads",
                    param=name,
                )
    if inputs["seconds"] is not None and inputs["url"] is None:
        raise ConfigError("--seconds needs --url", param="seconds")
    if options.demand is None:
        for name in ("spare", "kv_tokens", "slots", "api_price_in", "api_price_out"):
            if inputs[name] is not None:
                raise ConfigError(
                    f"--{name.replace('_', '-')} belongs to a plan",
                    hint="add --requests-per-day, --prompt-tokens and --output-tokens",
                    param=name,
                )


def _source(
    tokens_per_second: str | None,
    from_: str | None,
    url: str | None,
    seconds: str | None,
    api_key: str | None,
    slo: str | None,
    options: "CostOptions",
) -> "tuple[CostSource, Energy]":
    import sys

    from servekit.bench.slo import parse_slo
    from servekit.cli import cost_options as parse
    from servekit.cli.cost_report import Energy
    from servekit.cli.cost_source import from_number, from_run_file

    plate = Energy(options.watts, "--watts, a name plate", is_bound=True) if options.watts is not None else None
    if url is not None:
        from servekit.cli.cost_live import watch_server

        watched = watch_server(url, parse.parse_positive(seconds or "10", "--seconds") or 10.0, api_key=api_key)
        measured = Energy(None, "not measured: no energy counter of this machine can be read for that server")
        if watched.joules is not None:
            measured = Energy(watched.joules / watched.seconds, "energy counters (RAPL, NVML) of this machine")
        return watched.source, plate or measured
    nothing = plate or Energy(None, "not measured")
    if tokens_per_second is not None:
        return from_number(parse.parse_repeats(tokens_per_second, "--tokens-per-second")), nothing
    return from_run_file(from_ or "-", sys.stdin.buffer, parse_slo(slo) if slo is not None else {}), nothing
