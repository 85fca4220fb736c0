"""`servekit bench replay`: a recorded arrival trace, sent again to a server or to the simulator."""

from typing import TYPE_CHECKING, Annotated

import typer

from servekit.cli.bench_target import DEFAULT_URL, ApiKey, ModelId, Url

if TYPE_CHECKING:
    from servekit.bench.replay import Trace
    from servekit.bench.result import RunFile

_OF_A_SERVER = ("url", "model", "api_key", "warmup", "seed", "timeout", "quiet")


def replay(
    context: typer.Context,
    trace: Annotated[
        str,
        typer.Argument(
            help="JSON lines or CSV of arrival_s, prompt_tokens, output_tokens, or a run file; - is standard input.",
            show_default=False,
        ),
    ],
    url: Url = DEFAULT_URL,
    model: ModelId = None,
    api_key: ApiKey = None,
    simulate: Annotated[
        str | None,
        typer.Option(
            metavar="RUN", help="To the simulator instead, with step times and limits of this run file's server."
        ),
    ] = None,
    speed: Annotated[float, typer.Option(help="2 replays twice as fast.")] = 1.0,
    slo: Annotated[str | None, typer.Option(metavar="BOUNDS", help="Such as ttft=2s,tpot=100ms,e2e=10s.")] = None,
    warmup: Annotated[int, typer.Option(min=0, help="Requests before the replay.")] = 2,
    seed: Annotated[int, typer.Option(help="Seed of the prompts' tokens.")] = 0,
    timeout: Annotated[str, typer.Option(help="A request fails after this.")] = "600s",
    json: Annotated[bool, typer.Option("--json", help="A run file on standard output.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", help="No progress.")] = False,
) -> int:
    """Send a recorded trace again: the arrival times and lengths of real requests, with prompts of random tokens.

    Exit status: 0 measured, 2 a wrong option or trace, 3 the run is not to be trusted.
    """
    import sys
    from math import isfinite

    from servekit.bench.replay import read_trace
    from servekit.bench.result import encode_run_file
    from servekit.bench.slo import parse_duration, parse_slo
    from servekit.cli.bench_given import refuse_given
    from servekit.cli.bench_view import show_run_file
    from servekit.errors import ConfigError, InvalidMeasurement

    if not isfinite(speed) or speed <= 0:
        raise ConfigError(f"--speed must be over 0, not {speed:g}", param="speed")
    bounds = parse_slo(slo) if slo is not None else {}
    seconds = parse_duration(timeout, name="--timeout")
    requests = read_trace(trace, sys.stdin.buffer).at_speed(speed)
    if simulate is not None:
        refuse_given(context, _OF_A_SERVER, "belongs to a server, not to --simulate")
        run_file = _simulated(requests, simulate, bounds)
    else:
        run_file = _measured(
            requests,
            url=url,
            model=model,
            api_key=api_key,
            timeout=seconds,
            slo=bounds,
            warmup=warmup,
            seed=seed,
            is_shown=not quiet and sys.stderr.isatty(),
        )
    run_file.load = {"trace": trace, "speed": speed, "slo": slo}
    if json:
        sys.stdout.buffer.write(encode_run_file(run_file))
    else:
        show_run_file(run_file)
    run = run_file.runs[0]
    if not run.valid:
        raise InvalidMeasurement(f"the run is not to be trusted: {'; '.join(run.invalid_reasons)}")
    return 0


def _simulated(trace: "Trace", run_path: str, slo: dict[str, float]) -> "RunFile":
    import sys

    from servekit.bench.fit import fit_run_file
    from servekit.bench.result import read_run_file
    from servekit.bench.sim import simulate as play
    from servekit.bench.sim_report import run_file, run_of

    fitted = fit_run_file(read_run_file(run_path, sys.stdin.buffer))
    limits = fitted.limits
    config = limits.scheduler_config(trace.requests)
    run = run_of(play(trace.requests, config, fitted.fit.times), limits.policy, rate=None, slo=slo)
    found = run_file([run], limits, load={}, seed=0, fitted=fitted)
    found.command = "bench replay"
    return found


def _measured(
    trace: "Trace",
    *,
    url: str,
    model: str | None,
    api_key: str | None,
    timeout: float,
    slo: dict[str, float],
    warmup: int,
    seed: int,
    is_shown: bool,
) -> "RunFile":
    from datetime import UTC, datetime

    from servekit.bench.client import Client
    from servekit.bench.connection import Address
    from servekit.bench.load import run_on_loop
    from servekit.bench.machine import describe_machine
    from servekit.bench.replay_server import replay_to_server
    from servekit.bench.result import Run, RunFile, Target
    from servekit.cli.bench_progress import shown_progress

    async def main() -> tuple[Target, Run]:
        client = Client(Address.parse(url), api_key=api_key, timeout=timeout)
        try:
            return await replay_to_server(client, trace, watcher, model=model, slo=slo, seed=seed, warmup=warmup)
        finally:
            client.close()

    with shown_progress(is_shown=is_shown) as watcher:
        target, run = run_on_loop(main())
    return RunFile(
        command="bench replay",
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        machine=dict(describe_machine()),
        target=target,
        seed=seed,
        runs=[run],
    )
