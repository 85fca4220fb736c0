"""What a server says of itself: its kind, its model, and how full it is while the load runs.

servekit is read from /props, vLLM from /metrics, llama.cpp from /props, /metrics and /slots. A server that says nothing
is still measured, only its limit cannot be named. It must not judge what it reads.
"""

import asyncio
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from servekit.bench.answers import refusal_reason
from servekit.bench.client import Client
from servekit.bench.result import Target
from servekit.errors import ModelError, UnavailableError

SAMPLE_INTERVAL_S = 0.5

_SERIES = re.compile(r"^([a-zA-Z_:][\w:]*)(?:\{[^}]*\})?\s+([-+.\deEinfNa]+)", re.MULTILINE)
_PROPS_LEFT_OUT = ("state", "chat_template", "default_generation_settings")
# What each server calls it; of several names the first that is there counts.
_VLLM = {
    "running": ("vllm:num_requests_running",),
    "waiting": ("vllm:num_requests_waiting",),
    "kv_used": ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"),
    "preemptions": ("vllm:num_preemptions_total", "vllm:num_preemptions"),
    "prefix_query_tokens": ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"),
    "prefix_hit_tokens": ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"),
}
_LLAMA = {
    "running": ("llamacpp:requests_processing",),
    "waiting": ("llamacpp:requests_deferred",),
    "kv_used": ("llamacpp:kv_cache_usage_ratio",),
    "prefill_seconds": ("llamacpp:prompt_seconds_total",),
    "decode_seconds": ("llamacpp:tokens_predicted_seconds_total",),
}
_GAUGES = ("running", "waiting", "kv_used")


@dataclass(frozen=True, slots=True)
class Sample:
    """How full a server was at one moment (`time.perf_counter`); None for what it does not say.

    `kv_used` is a share. `counters` only grow.
    """

    time: float
    running: float | None = None
    waiting: float | None = None
    kv_used: float | None = None
    counters: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Bounds:
    """What a server is configured to; None for what it does not say."""

    slots: int | None = None
    max_num_batched_tokens: int | None = None


async def identify(client: Client, model: str | None) -> Target:
    """Who answers there. Raises UnavailableError when nobody does, ModelError when it names no model."""
    url = client.address.url
    try:
        status, body = await client.get("/v1/models")
    except OSError as error:
        raise UnavailableError(
            f"{url} does not answer: {error or type(error).__name__}", hint="is the server running? try --url"
        ) from error
    if status == 503:
        raise UnavailableError(f"{url} is not ready: {refusal_reason(body)}", hint="wait until its model is loaded")
    if model is None:
        model = _first_model(body)
    if model is None:
        raise ModelError(f"{url}/v1/models names no model (status {status})", hint="name it with --model")
    props, metrics = await _get_json(client, "/props"), await _get_text(client, "/metrics")
    kind = "unknown"
    if isinstance(props.get("state"), dict) and isinstance(props.get("kv"), dict):
        kind = "servekit"
    elif "vllm:" in metrics:
        kind = "vllm"
    elif "total_slots" in props or "llamacpp:" in metrics:
        kind = "llama.cpp"
    shown = {name: value for name, value in props.items() if name not in _PROPS_LEFT_OUT}
    return Target(url=url, model=model, kind=kind, props=shown or None)


def bounds(target: Target) -> Bounds:
    """The limits that the server's properties name."""
    props = target.props or {}
    if target.kind == "servekit":
        config = props.get("config")
        config = config if isinstance(config, dict) else {}
        return Bounds(_whole(config.get("parallel")), _whole(config.get("max_num_batched_tokens")))
    return Bounds(_whole(props.get("total_slots")))


async def take_sample(client: Client, kind: str) -> Sample:
    """How full the server is now; an empty sample when it does not say."""
    now = time.perf_counter()
    try:
        if kind == "servekit":
            state = (await _get_json(client, "/props")).get("state")
            return _servekit_sample(now, state if isinstance(state, dict) else {})
        if kind == "vllm":
            return _metrics_sample(now, await _get_text(client, "/metrics"), _VLLM)
        if kind == "llama.cpp":
            sample = _metrics_sample(now, await _get_text(client, "/metrics"), _LLAMA)
            return sample if sample.running is not None else await _llama_slots(client, now)
    except OSError:
        # A server too busy to answer is measured by the requests themselves.
        return Sample(now)
    return Sample(now)


class Sampler:
    """Takes a sample twice a second while its block runs, and one before and after it."""

    def __init__(self, client: Client, kind: str) -> None:
        self._client = client
        self._kind = kind
        self._task: asyncio.Task[None] | None = None
        self.samples: list[Sample] = []

    async def __aenter__(self) -> "Sampler":
        self.samples.append(await take_sample(self._client, self._kind))
        self._task = asyncio.create_task(self._keep_sampling())
        return self

    async def __aexit__(self, *exception: object) -> None:
        assert self._task is not None
        self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)
        self.samples.append(await take_sample(self._client, self._kind))

    def changes(self) -> dict[str, float]:
        """How much each counter grew, from the first sample to the last; a counter that restarted is left out."""
        first, last = self.samples[0].counters, self.samples[-1].counters
        return {name: last[name] - first[name] for name in last if name in first and last[name] >= first[name]}

    async def _keep_sampling(self) -> None:
        while self._kind != "unknown":
            await asyncio.sleep(SAMPLE_INTERVAL_S)
            self.samples.append(await take_sample(self._client, self._kind))


def parse_metrics(text: str) -> dict[str, float]:
    """The series of a Prometheus text by name, summed over their labels."""
    totals: dict[str, float] = {}
    for name, value in _SERIES.findall(text):
        try:
            totals[name] = totals.get(name, 0.0) + float(value)
        except ValueError:
            continue
    return totals


def _servekit_sample(now: float, state: Mapping[str, Any]) -> Sample:
    numbers = {name: float(value) for name, value in state.items() if type(value) in (int, float)}
    usable, live = numbers.get("usable_blocks"), numbers.get("live_blocks")
    gauges = ("open", "running", "waiting", "live_blocks", "cached_blocks", "free_blocks", "usable_blocks")
    return Sample(
        now,
        running=numbers.get("running"),
        waiting=numbers.get("waiting"),
        kv_used=live / usable if usable and live is not None else None,
        counters={name: value for name, value in numbers.items() if name not in gauges},
    )


def _metrics_sample(now: float, text: str, names: Mapping[str, tuple[str, ...]]) -> Sample:
    series = parse_metrics(text)
    found = {
        name: series[known]
        for name, aliases in names.items()
        if (known := next((alias for alias in aliases if alias in series), None)) is not None
    }
    counters = {name: value for name, value in found.items() if name not in _GAUGES}
    if "prefill_seconds" in counters and "decode_seconds" in counters:
        counters["model_seconds"] = counters["prefill_seconds"] + counters["decode_seconds"]
    return Sample(now, found.get("running"), found.get("waiting"), found.get("kv_used"), counters)


async def _llama_slots(client: Client, now: float) -> Sample:
    slots = await _get(client, "/slots", list)
    return Sample(now, running=float(sum(bool(slot.get("is_processing")) for slot in slots))) if slots else Sample(now)


async def _get_json(client: Client, path: str) -> dict[str, Any]:
    found: dict[str, Any] = await _get(client, path, dict)
    return found


async def _get(client: Client, path: str, kind: Callable[[], Any]) -> Any:
    """The JSON at `path` if it is of that kind, else an empty one."""
    status, body = await client.get(path)
    try:
        found = msgspec.json.decode(body) if status == 200 else None
    except msgspec.DecodeError:
        found = None
    return found if type(found) is kind else kind()


async def _get_text(client: Client, path: str) -> str:
    status, body = await client.get(path)
    return body.decode("utf-8", "replace") if status == 200 else ""


def _first_model(body: bytes) -> str | None:
    try:
        found = msgspec.json.decode(body)
        name = found["data"][0]["id"]
    except (msgspec.DecodeError, LookupError, TypeError):
        return None
    return name if isinstance(name, str) else None


def _whole(value: Any) -> int | None:
    return value if type(value) is int and value > 0 else None
