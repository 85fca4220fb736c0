"""`servekit bench`: the laboratory. One sub-command a file; `serve` is the one that is meant when none is named."""

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from servekit.cli import bench_analyze, bench_embed, bench_offline, bench_replay, bench_sim, bench_speculative
from servekit.cli.bench_target import DEFAULT_URL, ApiKey, ModelId, Url

_LOAD, _ASKED, _JUDGED, _SHOWN = "The load", "What is asked", "How it is judged", "What is written"


class _ServeByDefault(TyperGroup):
    """`servekit bench --rate 2` is `servekit bench serve --rate 2`."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        if not args or (args[0].startswith("-") and args[0] not in ("-h", "--help")):
            args = ["serve", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    cls=_ServeByDefault,
    help="Measure a server: load tests, offline runs, simulations. Without a command: serve.",
    no_args_is_help=False,
)


@app.command("serve")
def serve(
    context: typer.Context,
    url: Url = DEFAULT_URL,
    model: ModelId = None,
    api_key: ApiKey = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="R,R...", help="Arrivals a second, open loop. [1]", rich_help_panel=_LOAD),
    ] = None,
    concurrency: Annotated[
        str | None,
        typer.Option(metavar="N,N...", help="Closed loop instead: so many clients.", rich_help_panel=_LOAD),
    ] = None,
    arrival: Annotated[str, typer.Option(help="poisson, gamma, constant or trace.", rich_help_panel=_LOAD)] = "poisson",
    burstiness: Annotated[
        float | None,
        typer.Option(help="Shape of gamma gaps: below 1 in bursts, above 1 more even.", rich_help_panel=_LOAD),
    ] = None,
    trace: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="Arrival times in seconds, for --arrival trace.", rich_help_panel=_LOAD),
    ] = None,
    requests: Annotated[int | None, typer.Option(min=1, help="Requests a run.", rich_help_panel=_LOAD)] = None,
    duration: Annotated[
        str | None, typer.Option(help="Length of a run's schedule. [30s]", rich_help_panel=_LOAD)
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Runs of each rate.", rich_help_panel=_LOAD)] = 1,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the first run.", rich_help_panel=_LOAD)] = 2,
    max_in_flight: Annotated[
        int | None,
        typer.Option(min=1, help="Most requests open at once; the wait counts.", rich_help_panel=_LOAD),
    ] = None,
    seed: Annotated[
        int, typer.Option(help="Of arrivals, prompts and lengths, each its own stream.", rich_help_panel=_LOAD)
    ] = 0,
    endpoint: Annotated[
        str, typer.Option(help="chat, completions, embeddings or rerank.", rich_help_panel=_ASKED)
    ] = "chat",
    prompts: Annotated[
        str,
        typer.Option(help="A file, builtin:en, builtin:bn or random:TOKENS.", rich_help_panel=_ASKED),
    ] = "builtin:en",
    outputs: Annotated[
        str, typer.Option(metavar="N,N...", help="Output lengths, in random order.", rich_help_panel=_ASKED)
    ] = "32,64,128",
    temperature: Annotated[float, typer.Option(min=0.0, help="0 is greedy.", rich_help_panel=_ASKED)] = 0.0,
    body: Annotated[
        str | None, typer.Option(metavar="JSON", help="More fields for every request.", rich_help_panel=_ASKED)
    ] = None,
    no_cache: Annotated[
        bool,
        typer.Option("--no-cache", help="Make every prompt unknown to prefix caches.", rich_help_panel=_ASKED),
    ] = False,
    timeout: Annotated[str, typer.Option(help="A request fails after this.", rich_help_panel=_ASKED)] = "600s",
    tokenizer: Annotated[
        str | None,
        typer.Option(help="Pulled model or folder that counts tokens without usage.", rich_help_panel=_ASKED),
    ] = None,
    slo: Annotated[
        str | None,
        typer.Option(metavar="BOUNDS", help="Such as ttft=2s,tpot=100ms,e2e=10s.", rich_help_panel=_JUDGED),
    ] = None,
    min_attainment: Annotated[
        float | None,
        typer.Option(help="Share that must keep the SLO; else exit status 1.", rich_help_panel=_JUDGED),
    ] = None,
    find_knee: Annotated[
        bool, typer.Option("--find-knee", help="Search the highest rate that keeps it.", rich_help_panel=_JUDGED)
    ] = False,
    compare: Annotated[
        tuple[str, str] | None,
        typer.Option(metavar="A B", help="Two run files instead of a load.", rich_help_panel=_JUDGED),
    ] = None,
    max_regression: Annotated[
        str | None, typer.Option(help="With --compare: worse than this is exit status 1.", rich_help_panel=_JUDGED)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="The run file on stdout.", rich_help_panel=_SHOWN)] = False,
    save: Annotated[str | None, typer.Option(metavar="FILE", help="The run file.", rich_help_panel=_SHOWN)] = None,
    csv: Annotated[str | None, typer.Option(metavar="FILE", help="A row a run.", rich_help_panel=_SHOWN)] = None,
    jsonl: Annotated[str | None, typer.Option(metavar="FILE", help="A line a request.", rich_help_panel=_SHOWN)] = None,
    html: Annotated[
        str | None, typer.Option(metavar="FILE", help="A report in one file.", rich_help_panel=_SHOWN)
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.", rich_help_panel=_SHOWN)] = False,
) -> int:
    """Load a server on schedule and say how it fared and what limited it.

    Exit status: 0 measured, 1 the SLO was missed or a comparison regressed, 2 a wrong option, 3 not to be trusted.
    """
    from servekit.cli import bench_serve
    from servekit.cli.bench_options import ServeOptions, refuse_beside_compare

    if compare is not None:
        refuse_beside_compare(context)
        return bench_serve.compare_files(*compare, max_regression=max_regression, as_json=json)
    options = ServeOptions(
        url=url,
        model=model,
        api_key=api_key,
        rate=rate,
        concurrency=concurrency,
        arrival=arrival,
        burstiness=burstiness,
        trace=trace,
        requests=requests,
        duration=duration,
        repeats=repeats,
        warmup=warmup,
        max_in_flight=max_in_flight,
        seed=seed,
        endpoint=endpoint,
        prompts=prompts,
        outputs=outputs,
        temperature=temperature,
        body=body,
        no_cache=no_cache,
        timeout=timeout,
        tokenizer=tokenizer,
        slo=slo,
        min_attainment=min_attainment,
        find_knee=find_knee,
        max_regression=max_regression,
    )
    files = bench_serve.Files(save=save, csv=csv, jsonl=jsonl, html=html)
    return bench_serve.measure_server(options, files, as_json=json, quiet=quiet)


app.command("offline")(bench_offline.offline)
app.command("sim")(bench_sim.sim)
app.command("replay")(bench_replay.replay)
app.command("embed")(bench_embed.embed)
app.command("speculative")(bench_speculative.speculative)
app.command("analyze")(bench_analyze.analyze)
