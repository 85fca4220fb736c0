"""Rates of a server that is being used: its own counters, read twice. It sends no load."""

import time
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from servekit.bench.client import Client
from servekit.bench.connection import Address
from servekit.bench.load import run_on_loop
from servekit.bench.probe import identify, parse_metrics, take_sample
from servekit.bench.result import Target
from servekit.cli.cost_source import CostSource, MeasuredLoad
from servekit.config import is_loopback
from servekit.errors import NegativeResult, UnsupportedError
from servekit.kvcalc.cost import Rate, Split, estimate
from servekit.kvcalc.energy import EnergyReading, read_energy

# Counters of tokens by what they count, for the servers that show them on /metrics.
_SERIES = {
    "servekit": {"first_tokens": "servekit:time_to_first_token_seconds_count"},
    "vllm": {"input": "vllm:prompt_tokens_total", "output": "vllm:generation_tokens_total"},
    "llama.cpp": {
        "input": "llamacpp:prompt_tokens_total",
        "output": "llamacpp:tokens_predicted_total",
        "prefill_seconds": "llamacpp:prompt_seconds_total",
        "decode_seconds": "llamacpp:tokens_predicted_seconds_total",
    },
}


@dataclass(frozen=True, slots=True)
class Watched:
    """What was seen in `seconds`; `joules` None where no counter of this machine's energy could be read."""

    source: CostSource
    seconds: float
    busy_share: float | None
    joules: float | None


@dataclass(frozen=True, slots=True)
class _Reading:
    time: float
    counters: Mapping[str, float]
    energy: EnergyReading


def watch_server(url: str, seconds: float, *, api_key: str | None = None) -> Watched:
    """Read the counters, wait, read them again.

    Raises UnsupportedError for a server that counts no tokens, NegativeResult when it computed nothing meanwhile.
    """
    target, first, last = run_on_loop(_watch(url, seconds, api_key))
    elapsed = last.time - first.time
    change = {name: last.counters[name] - first.counters[name] for name in last.counters if name in first.counters}
    if not change:
        raise UnsupportedError(
            f"{target.url} shows no token counters ({target.kind})",
            hint="servekit, vLLM and llama.cpp --metrics do; or measure it with `servekit bench serve --json`",
            param="url",
        )
    load, busy, notes = _servekit(change, elapsed) if target.kind == "servekit" else _counted(change, elapsed)
    props = target.props or {}
    kv, config = props.get("kv") or {}, props.get("config") or {}
    source = CostSource(
        kind="server",
        name=f"{target.url}, watched for {elapsed:.0f} s",
        loads=(load,),
        kv_tokens=kv.get("num_tokens"),
        slots=config.get("parallel"),
        notes=tuple(notes),
    )
    here = is_loopback(urlsplit(target.url).hostname or "")
    return Watched(source, elapsed, busy, last.energy.since(first.energy) if here else None)


async def _watch(url: str, seconds: float, api_key: str | None) -> tuple[Target, _Reading, _Reading]:
    import asyncio

    client = Client(Address.parse(url), api_key=api_key)
    try:
        target = await identify(client, None)
        first = await _read(client, target.kind)
        await asyncio.sleep(seconds)
        return target, first, await _read(client, target.kind)
    finally:
        client.close()


async def _read(client: Client, kind: str) -> _Reading:
    own = dict((await take_sample(client, kind)).counters) if kind == "servekit" else {}
    status, body = await client.get("/metrics") if kind in _SERIES else (0, b"")
    series = parse_metrics(body.decode("utf-8", "replace")) if status == 200 else {}
    names = _SERIES.get(kind, {})
    counters = {name: series[key] for name, key in names.items() if key in series}
    return _Reading(time.perf_counter(), {**own, **counters}, read_energy())


def _servekit(change: Mapping[str, float], elapsed: float) -> tuple[MeasuredLoad, float | None, list[str]]:
    """servekit counts computed tokens and the prompts' share of them; what is left are tokens of answers.

    The first token of an answer comes out of its prompt's last step, so it is counted on its own.
    """
    batched, queried = change.get("batched_tokens", 0.0), change.get("prefix_query_tokens", 0.0)
    cached = change.get("prefix_hit_tokens", 0.0)
    computed = queried - cached
    output = batched - computed + change.get("first_tokens", 0.0)
    if output <= 0:
        raise NegativeResult(
            "the server decoded nothing meanwhile", hint="watch it under load, or longer: --seconds 60"
        )
    notes = (
        [] if "first_tokens" in change else ["the first token of each answer comes with its prompt and is not counted"]
    )
    if change.get("preemptions"):
        notes.append(f"{change['preemptions']:.0f} preemptions: prompts computed again count as output")
    if not queried:
        notes.append("no prompt was counted: without prefix caching all computed tokens count as output")
    rate = Rate(
        output=estimate([output / elapsed]),
        input=estimate([computed / elapsed]) if computed > 0 else None,
        cached=estimate([cached / elapsed]) if queried else None,
        total=estimate([(computed + output) / elapsed]),
    )
    busy = change.get("step_seconds")
    return MeasuredLoad(rate), None if busy is None else min(1.0, busy / elapsed), notes


def _counted(change: Mapping[str, float], elapsed: float) -> tuple[MeasuredLoad, float | None, list[str]]:
    output, inputs = change.get("output", 0.0), change.get("input")
    if output <= 0:
        raise NegativeResult(
            "the server decoded nothing meanwhile", hint="watch it under load, or longer: --seconds 60"
        )
    split, busy = None, None
    if "prefill_seconds" in change and "decode_seconds" in change:
        total = change["prefill_seconds"] + change["decode_seconds"]
        if total > 0:
            split = Split(change["prefill_seconds"] / total, "the server's own prefill and decode seconds")
    rate = Rate(
        output=estimate([output / elapsed]),
        input=None if inputs is None else estimate([inputs / elapsed]),
        total=None if inputs is None else estimate([(inputs + output) / elapsed]),
    )
    return MeasuredLoad(rate, split=split), busy, []
