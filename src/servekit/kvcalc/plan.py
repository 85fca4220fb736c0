"""Puts a model, a memory and a load together into one plan. It must not know how plans are asked for or shown."""

from dataclasses import dataclass, replace
from fractions import Fraction

from servekit.errors import ConfigError
from servekit.kvcalc.caches import AttentionCache, Growth
from servekit.kvcalc.capacity import (
    Budget,
    Capacity,
    concurrency_needed,
    end_to_end_seconds,
    make_budget,
    requests_that_fit,
)
from servekit.kvcalc.explain import Step, explain
from servekit.kvcalc.kv_formats import KvDtype, parse_kv_dtype
from servekit.kvcalc.machine import MachineMemory
from servekit.kvcalc.memory import KvTerms, PoolPlan, kv_terms, plan_pool, request_bytes
from servekit.kvcalc.model_shape import ModelShape
from servekit.kvcalc.roofline import DecodeBound, decode_bound
from servekit.kvcalc.weights import Weights

DEFAULT_TOKENS = 2048
DEFAULT_BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class Model:
    """A model by name, with its layers and weights."""

    name: str
    shape: ModelShape
    weights: Weights


@dataclass(frozen=True, slots=True)
class Arrivals:
    """`rate` requests a second, which each wait `ttft` seconds and then `tpot` seconds a token."""

    rate: float
    ttft: float
    tpot: float


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of the model. `num_tokens` is prompt and output together; None leaves a default to the plan.

    `kv_memory` is memory for keys and values alone, else `memory` is divided into reserve, weights and KV.
    `num_devices` share the model by tensor parallelism, and memory is that of one.
    """

    memory: MachineMemory
    kv_memory: int | None = None
    reserve: Fraction | int = Fraction(1, 10)
    num_tokens: int | None = None
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    source_tokens: int | None = None
    num_requests: int | None = None
    block_size: int | None = None
    num_devices: int = 1
    arrivals: Arrivals | None = None
    bandwidth: float | None = None


@dataclass(frozen=True, slots=True)
class Needed:
    """Little's law: `concurrency` requests at once, each staying for `seconds`; `fits` None when it cannot be said."""

    seconds: float
    concurrency: float
    fits: bool | None


@dataclass(frozen=True, slots=True)
class Plan:
    """The answer for one model in one KV dtype.

    `terms`, `steps` and `request_bytes` are the whole model's; `device_request_bytes`, `budget` and `pool` those of one
    device, draft model included. `pool` is the engine's own paged pool, None where it does not apply.
    """

    model: Model
    load: Load
    kv_dtype: KvDtype
    num_tokens: int
    source_tokens: int
    terms: KvTerms
    steps: tuple[Step, ...]
    request_bytes: int
    device_request_bytes: int
    device_terms: KvTerms
    budget: Budget
    capacity: Capacity
    draft: Model | None = None
    needed: Needed | None = None
    pool: PoolPlan | None = None
    bounds: tuple[DecodeBound, ...] = ()
    mtp_bytes_per_token: Fraction = Fraction(0)
    warnings: tuple[str, ...] = ()

    @property
    def fits(self) -> bool | None:
        """Whether the asked number of requests and arrivals fit; None when nothing was asked or it cannot be said."""
        answers = [] if self.needed is None else [self.needed.fits]
        if self.load.num_requests is not None:
            fit = self.capacity.requests
            answers.append(None if fit is None else fit >= self.load.num_requests)
        if False in answers:
            return False
        return True if answers and None not in answers else None


def default_kv_dtype(shape: ModelShape) -> str:
    """The KV dtype that a checkpoint declares, else its own dtype."""
    return shape.declared_kv_dtype or shape.dtype


def make_plan(model: Model, load: Load, kv_dtype: str, *, draft: Model | None = None) -> Plan:
    """Computes the plan. Raises ConfigError for a load, dtype or number of devices that the model cannot have."""
    shape = model.shape
    dtype = parse_kv_dtype(kv_dtype)
    num_tokens, source_tokens = _tokens(shape, load)
    block_size = load.block_size or 1
    on_device = shape.per_device(load.num_devices)
    whole = request_bytes(shape, dtype, num_tokens=num_tokens, source_tokens=source_tokens, block_size=block_size)
    on_one = request_bytes(on_device, dtype, num_tokens=num_tokens, source_tokens=source_tokens, block_size=block_size)
    device_terms = kv_terms(on_device, dtype)
    weights = _per_device(model.weights.num_bytes, load.num_devices)
    if draft is not None:
        draft_shape = draft.shape.per_device(load.num_devices)
        on_one += request_bytes(draft_shape, dtype, num_tokens=num_tokens, block_size=block_size)
        draft_weights = _per_device(draft.weights.num_bytes, load.num_devices)
        weights = None if weights is None or draft_weights is None else weights + draft_weights
    budget = _budget(load, weights)
    null_block = int(device_terms.bytes_per_token * load.block_size) if load.block_size else 0
    capacity = requests_that_fit(budget, on_one, reserved_bytes=null_block)
    return Plan(
        model=model,
        load=load,
        kv_dtype=dtype,
        num_tokens=num_tokens,
        source_tokens=source_tokens,
        terms=kv_terms(shape, dtype),
        steps=tuple(explain(shape, dtype)),
        request_bytes=whole,
        device_request_bytes=on_one,
        device_terms=device_terms,
        budget=budget,
        capacity=capacity,
        draft=draft,
        needed=_needed(load, capacity),
        pool=_pool(on_device, budget, load, dtype, num_tokens),
        bounds=_bounds(model.weights, load, capacity, whole),
        mtp_bytes_per_token=_mtp_bytes(shape, dtype),
        warnings=_warnings(shape, load, num_tokens),
    )


def requests_at(plan: Plan, num_tokens: int, kv_dtype: str) -> Capacity:
    """How many requests of another length or in another KV dtype fit in the same memory."""
    load = replace(plan.load, num_tokens=num_tokens, num_requests=None, arrivals=None, bandwidth=None)
    return make_plan(plan.model, load, kv_dtype, draft=plan.draft).capacity


def _tokens(shape: ModelShape, load: Load) -> tuple[int, int]:
    crosses = any(cache.growth is Growth.SOURCE for layer in shape.layers for cache in layer.token_caches)
    decodes_alone = crosses and shape.source_tokens is None
    if load.num_tokens is not None:
        num_tokens = load.num_tokens
    elif load.prompt_tokens is not None or load.output_tokens is not None:
        prompt = 0 if decodes_alone else load.prompt_tokens or 0
        num_tokens = prompt + (load.output_tokens or 0)
    else:
        num_tokens = min(DEFAULT_TOKENS, shape.max_model_len or DEFAULT_TOKENS)
    if not crosses:
        return num_tokens, 0
    source = load.source_tokens if load.source_tokens is not None else shape.source_tokens
    if source is None:
        source = load.prompt_tokens if load.prompt_tokens is not None else num_tokens
    return num_tokens, source


def _per_device(num_bytes: int | None, num_devices: int) -> int | None:
    return None if num_bytes is None else -(-num_bytes // num_devices)


def _budget(load: Load, weights: int | None) -> Budget:
    if load.kv_memory is not None:
        return Budget(load.kv_memory, 0, 0, load.kv_memory)
    return make_budget(load.memory.num_bytes, reserve=load.reserve, weights=weights)


def _needed(load: Load, capacity: Capacity) -> Needed | None:
    if load.arrivals is None:
        return None
    if load.output_tokens is None:
        raise ConfigError("--rate needs --output-tokens: they say how long a request stays", param="output_tokens")
    seconds = end_to_end_seconds(ttft=load.arrivals.ttft, tpot=load.arrivals.tpot, output_tokens=load.output_tokens)
    concurrency = concurrency_needed(rate=load.arrivals.rate, seconds=seconds)
    return Needed(seconds, concurrency, None if capacity.requests is None else capacity.requests >= concurrency)


def _pool(shape: ModelShape, budget: Budget, load: Load, dtype: KvDtype, num_tokens: int) -> PoolPlan | None:
    """The engine's pool holds keys and values of every layer alike; other kinds of cache are not its business."""
    for layer in shape.layers:
        if layer.state is not None:
            return None
        for cache in layer.token_caches:
            if not isinstance(cache, AttentionCache) or cache.over_source or cache.compress_ratio > 1:
                return None
    if budget.kv is None or budget.kv <= 0 or load.num_devices > 1:
        return None
    try:
        return plan_pool(
            shape,
            kv_memory=budget.kv,
            block_size=load.block_size or DEFAULT_BLOCK_SIZE,
            kv_dtype=dtype.name,
            max_model_len=shape.max_model_len or num_tokens,
        )
    except ConfigError:
        return None


def _bounds(weights: Weights, load: Load, capacity: Capacity, per_request: int) -> tuple[DecodeBound, ...]:
    if load.bandwidth is None:
        return ()
    batches = sorted({1, load.num_requests or 1, capacity.requests or 1})
    found = [
        decode_bound(weights, batch=batch, request_bytes=per_request, bandwidth=load.bandwidth * load.num_devices)
        for batch in batches
    ]
    return tuple(bound for bound in found if bound is not None)


def _mtp_bytes(shape: ModelShape, dtype: KvDtype) -> Fraction:
    caches = [cache for layer in shape.mtp_layers for cache in layer.token_caches]
    return sum((Fraction(dtype.entry_bytes(cache), cache.compress_ratio) for cache in caches), Fraction(0))


def _warnings(shape: ModelShape, load: Load, num_tokens: int) -> tuple[str, ...]:
    found = []
    if shape.max_model_len is not None and num_tokens > shape.max_model_len:
        found.append(f"{num_tokens:,} tokens are more than the model's context of {shape.max_model_len:,}")
    if load.num_devices > 1:
        found.append("weights are taken to divide evenly over the devices")
    return tuple(found)
