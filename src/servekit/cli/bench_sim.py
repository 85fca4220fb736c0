"""`servekit bench sim`: batching policies and limits without a model. The body only parses, simulates and prints."""

from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from servekit.bench.fit import FittedFile, ServerLimits
    from servekit.bench.result import Run
    from servekit.bench.sim import SimRequest, StepTimes

_LOAD, _SERVER, _SHOW = "The load", "The server", "What is shown"


def sim(
    context: typer.Context,
    mode: Annotated[
        str | None, typer.Argument(help="steps: count steps of a few requests instead of seconds.", show_default=False)
    ] = None,
    preset: Annotated[
        str | None, typer.Option(help="lesson: the textbook comparison, 400 requests at three rates.")
    ] = None,
    rate: Annotated[
        str | None, typer.Option(help="Arrivals a second. [0.5,0.8,1]", rich_help_panel=_LOAD, show_default=False)
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests at each rate.", rich_help_panel=_LOAD)] = 400,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Tokens of a prompt.", rich_help_panel=_LOAD)] = 110,
    outputs: Annotated[str, typer.Option(help="Tokens of an answer, in turn.", rich_help_panel=_LOAD)] = "32,64,128",
    trace: Annotated[
        str | None, typer.Option(help="A recorded trace instead of --rate.", rich_help_panel=_LOAD, show_default=False)
    ] = None,
    seed: Annotated[int, typer.Option(help="Seed of arrivals and lengths.", rich_help_panel=_LOAD)] = 0,
    lengths: Annotated[str, typer.Option(help="steps: tokens of each request.", rich_help_panel=_LOAD)] = "4,2,3,2,1",
    arrive: Annotated[
        str | None,
        typer.Option(help="steps: before which step each arrives. [all before 0]", rich_help_panel=_LOAD),
    ] = None,
    fit: Annotated[
        str | None,
        typer.Option(help="Step times from a measured run file, or - .", rich_help_panel=_SERVER, show_default=False),
    ] = None,
    step_times: Annotated[
        str | None,
        typer.Option(
            help="Step times in seconds: base, each sequence, each prompt token.",
            metavar="A,B,C",
            rich_help_panel=_SERVER,
        ),
    ] = None,
    policy: Annotated[
        str | None,
        typer.Option(help="Of static, dynamic, continuous, some. [all]", rich_help_panel=_SERVER, show_default=False),
    ] = None,
    slots: Annotated[
        int | None, typer.Option(min=1, help="Sequences that run at once. [4]", rich_help_panel=_SERVER)
    ] = None,
    max_num_batched_tokens: Annotated[
        int | None, typer.Option(min=1, help="Token budget of a step. [256]", rich_help_panel=_SERVER)
    ] = None,
    block_size: Annotated[
        int | None, typer.Option(min=1, help="Tokens of a KV block. [16]", rich_help_panel=_SERVER)
    ] = None,
    kv_blocks: Annotated[
        int | None, typer.Option(min=1, help="KV blocks of the pool. [enough for all slots]", rich_help_panel=_SERVER)
    ] = None,
    static_wait: Annotated[
        float | None,
        typer.Option(min=0, help="Seconds that static batching waits. [0.5]", rich_help_panel=_SERVER),
    ] = None,
    chart: Annotated[
        int, typer.Option(min=0, help="Draw who holds which slot in the first N steps.", rich_help_panel=_SHOW)
    ] = 0,
    json: Annotated[bool, typer.Option("--json", help="A run file on standard output.", rich_help_panel=_SHOW)] = False,
) -> int:
    """Simulate batching with the engine's own scheduler: what would another policy, slot count or KV pool do?"""
    from dataclasses import asdict

    from servekit.bench.fit import requests_of
    from servekit.bench.workload import parse_outputs
    from servekit.cli import bench_sim_view as view
    from servekit.cli.bench_given import refuse_all_but, refuse_given
    from servekit.errors import ConfigError

    given = {
        "slots": slots,
        "max_num_batched_tokens": max_num_batched_tokens,
        "block_size": block_size,
        "num_blocks": kv_blocks,
        "static_wait": static_wait,
    }
    policies = _policies(policy)
    if mode is not None:
        if mode != "steps":
            raise ConfigError(f"{mode!r} is not a mode of sim", hint="servekit bench sim steps", param="mode")
        refuse_all_but(
            context, ("mode", "lengths", "arrive", "slots", "policy", "json"), "does not belong to sim steps"
        )
        return _steps(lengths, arrive, slots or 3, policies if policy else ["static", "continuous"], as_json=json)
    if preset is not None:
        if preset != "lesson":
            raise ConfigError(f"--preset: {preset!r} is not known", hint="known is lesson", param="preset")
        refuse_all_but(context, ("preset", "json"), "is set by --preset lesson")
        return _lesson(as_json=json)
    refuse_given(context, ("lengths", "arrive"), "belongs to `sim steps`")
    if json:
        refuse_given(context, ("chart",), "draws, and --json does not")
    fitted = None
    if fit is not None:
        if step_times is not None:
            raise ConfigError("--fit and --step-times exclude each other", param="step_times")
        fitted = _fit(fit, slots)
    elif step_times is None:
        raise ConfigError(
            "nothing says how long a step takes",
            hint="--fit run.json, --step-times 0.01,0.005,0.003, or --preset lesson",
            param="step_times",
        )
    if trace is not None and rate is not None:
        raise ConfigError("--trace and --rate exclude each other", param="rate")
    times = fitted.fit.times if fitted else _step_times(step_times or "")
    limits = _limits(fitted, given)
    drawn = ("requests", "prompt_tokens", "outputs", "seed")
    if trace is not None:
        refuse_given(context, drawn, "is set by the trace")
        workloads = [_traced(trace)]
    elif fitted and rate is None:
        refuse_given(context, drawn, "needs --rate: without it the measured requests are played again")
        workloads = [(run.rate, requests_of(run)) for run in fitted.runs]
    else:
        answers = parse_outputs(outputs)
        workloads = [
            (at, _random_requests(at, requests, prompt_tokens, answers, seed)) for at in _rates(rate or "0.5,0.8,1")
        ]
    if fitted and policy is None:
        policies = [limits.policy]
    runs, charts = _simulate(workloads, limits, policies, times, chart)
    if json:
        load = {"step_times": asdict(times), "policies": [name for name, _ in runs]}
        _print_run_file([run for _, run in runs], limits, load, seed, fitted)
        return 0
    console = view.make_console()
    if fitted:
        view.show_fit(console, fitted)
    view.show_runs(console, runs, limits, times)
    for name, lines in charts:
        view.show_chart(console, name, lines)
    return 0


def _fit(path: str, slots: int | None) -> "FittedFile":
    import sys

    from servekit.bench.fit import fit_run_file
    from servekit.bench.result import read_run_file

    return fit_run_file(read_run_file(path, sys.stdin.buffer), slots=slots)


def _limits(fitted: "FittedFile | None", given: dict[str, Any]) -> "ServerLimits":
    from dataclasses import replace

    from servekit.bench.fit import ServerLimits

    changes = {name: value for name, value in given.items() if value is not None}
    if fitted is None:
        return ServerLimits(**{"slots": 4, **changes})
    if "slots" in changes and "num_blocks" not in changes:
        changes["num_blocks"] = None  # the pool was made for the slots there were
    return replace(fitted.limits, **changes)


def _simulate(
    workloads: "list[tuple[float | None, list[SimRequest]]]",
    limits: "ServerLimits",
    policies: list[str],
    times: "StepTimes",
    chart: int,
) -> "tuple[list[tuple[str, Run]], list[tuple[str, list[str]]]]":
    from servekit.bench.sim import simulate
    from servekit.bench.sim_report import run_of
    from servekit.bench.sim_steps import slot_chart

    runs, charts = [], []
    for at, workload in workloads:
        for name in policies:
            simulated = simulate(workload, limits.scheduler_config(workload, policy=name), times)
            runs.append((name, run_of(simulated, name, rate=at)))
            if chart:
                title = name if at is None else f"{name} at {at:g} requests/s"
                charts.append((title, slot_chart(simulated.steps[:chart], limits.slots)))
    return runs, charts


def _print_run_file(
    runs: "list[Run]", limits: "ServerLimits", load: dict[str, Any], seed: int, fitted: "FittedFile | None" = None
) -> None:
    import sys

    from servekit.bench.result import encode_run_file
    from servekit.bench.sim_report import run_file

    sys.stdout.buffer.write(encode_run_file(run_file(runs, limits, load=load, seed=seed, fitted=fitted)))


def _lesson(*, as_json: bool) -> int:
    from servekit.bench import sim_lesson as lesson
    from servekit.bench.fit import ServerLimits
    from servekit.bench.measure import measure
    from servekit.cli import bench_sim_view as view

    runs = [
        (policy, measure(lesson.lesson_records(policy, rate), rate=rate))
        for rate in lesson.RATES
        for policy in lesson.POLICIES
    ]
    limits = ServerLimits(lesson.SLOTS, lesson.SLOTS * lesson.PROMPT_TOKENS, static_wait=lesson.STATIC_WAIT_S)
    if as_json:
        load = {"preset": "lesson", "policies": [policy for policy, _ in runs]}
        _print_run_file([run for _, run in runs], limits, load, lesson.SEED)
        return 0
    view.show_runs(view.make_console(), runs, limits)
    return 0


def _steps(lengths: str, arrive: str | None, slots: int, policies: list[str], *, as_json: bool) -> int:
    from dataclasses import asdict
    from json import dumps

    from servekit.bench.sim_steps import count_steps
    from servekit.cli import bench_sim_view as view
    from servekit.errors import ConfigError

    sizes = _whole_numbers(lengths, "--lengths", least=1)
    arrivals = _whole_numbers(arrive, "--arrive", least=0) if arrive is not None else [0] * len(sizes)
    if len(arrivals) != len(sizes):
        raise ConfigError(f"--arrive has {len(arrivals)} numbers, but --lengths has {len(sizes)}", param="arrive")
    counts = [count_steps(name, sizes, arrivals, slots=slots) for name in policies]
    if as_json:
        typer.echo(dumps([asdict(count) for count in counts], indent=2))
    else:
        view.show_steps(view.make_console(), counts)
    return 0


def _traced(path: str) -> "tuple[float | None, list[SimRequest]]":
    import sys

    from servekit.bench.replay import read_trace

    trace = read_trace(path, sys.stdin.buffer)
    return trace.rate, list(trace.requests)


def _random_requests(rate: float, count: int, prompt_tokens: int, outputs: list[int], seed: int) -> "list[SimRequest]":
    from itertools import islice

    from servekit.bench.arrivals import arrival_times
    from servekit.bench.sim import SimRequest
    from servekit.bench.workload import output_lengths

    times = islice(arrival_times("poisson", rate, seed=seed), count)
    return [
        SimRequest(at, prompt_tokens, tokens) for at, tokens in zip(times, output_lengths(outputs, seed), strict=False)
    ]


def _policies(text: str | None) -> list[str]:
    from typing import get_args

    from servekit.engine.core.policy import Policy
    from servekit.errors import ConfigError

    known = get_args(Policy)
    if text is None:
        return ["static", "dynamic", "continuous"]
    names = [name.strip() for name in text.split(",")]
    wrong = next((name for name in names if name not in known), None)
    if wrong is not None:
        raise ConfigError(f"--policy: {wrong!r} is not one of {', '.join(known)}", param="policy")
    return names


def _rates(text: str) -> list[float]:
    return _numbers(text, "--rate", least=0.0, is_open=True)


def _step_times(text: str) -> "StepTimes":
    from servekit.bench.sim import StepTimes
    from servekit.errors import ConfigError

    values = _numbers(text, "--step-times", least=0.0)
    if len(values) != 3 or not sum(values) > 0:
        raise ConfigError(
            f"--step-times: {text!r} is not three times, one of them over 0",
            hint="seconds for the step, for each sequence and for each prompt token: 0.01,0.005,0.003",
            param="step_times",
        )
    return StepTimes(*values)


def _numbers(text: str, name: str, *, least: float, is_open: bool = False) -> list[float]:
    from math import isfinite

    from servekit.errors import ConfigError

    try:
        values = [float(part) for part in text.split(",")]
    except ValueError:
        values = []
    if not values or not all(
        isfinite(value) and value >= least and not (is_open and value == least) for value in values
    ):
        bound = f"over {least:g}" if is_open else f"of {least:g} or more"
        raise ConfigError(f"{name}: {text!r} is not a list of numbers {bound}", param=name.strip("-").replace("-", "_"))
    return values


def _whole_numbers(text: str, name: str, *, least: int) -> list[int]:
    from servekit.errors import ConfigError

    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and int(part) >= least for part in parts):
        raise ConfigError(
            f"{name}: {text!r} is not a list of whole numbers from {least}", param=name.strip("-").replace("-", "_")
        )
    return [int(part) for part in parts]
