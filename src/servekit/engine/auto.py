"""Turns every open choice of an EngineConfig into a value, once, and says why. Pure: facts in, a new config out."""

from dataclasses import dataclass, replace

from servekit.config import DeviceChoice, EngineConfig
from servekit.units import format_bytes

_CLEARLY_FASTER = 0.8
"""bfloat16 rounds where float32 does not, so it is taken only for a gain that no noise explains."""


@dataclass(frozen=True, slots=True)
class ComputeFacts:
    """What was measured about the device; the ratios are bfloat16's time over float32's (see engine/probe.py)."""

    device: DeviceChoice
    threads: int
    batched_tokens: int
    linear_ratio: float
    attention_ratio: float


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What is free once the weights are loaded, the share of it that a cache may have, and what a token costs."""

    free: int
    share: float
    bytes_per_token: int
    block_size: int


Reasons = dict[str, str]
"""For each choice that was open: the value and why."""


def resolve_compute(config: EngineConfig, facts: ComputeFacts, context: int) -> tuple[EngineConfig, Reasons]:
    """Threads, dtypes, token budget and context limit. `context` is the model's own."""
    reasons: Reasons = {}
    dtype, kv_dtype = config.dtype, config.kv_dtype
    if kv_dtype == "auto":
        faster = facts.attention_ratio < _CLEARLY_FASTER
        if dtype == "float32":
            kv_dtype = "float32"
            reasons["kv_dtype"] = "float32: the same as --dtype"
        elif dtype == "auto" and facts.linear_ratio >= _CLEARLY_FASTER:
            kv_dtype = "bfloat16" if faster else "float32"
            reasons["kv_dtype"] = f"{kv_dtype}: attention over bfloat16 took {facts.attention_ratio:.2f} of its time"
        else:
            kv_dtype = "bfloat16"
            reasons["kv_dtype"] = "bfloat16: the same as the compute dtype"
    if dtype == "auto":
        dtype = "bfloat16" if facts.linear_ratio < _CLEARLY_FASTER else "float32"
        reasons["dtype"] = f"{dtype}: a bfloat16 matrix product took {facts.linear_ratio:.2f} of float32's time here"
    threads = config.threads
    if threads is None:
        threads = facts.threads
        reasons["threads"] = f"{threads}: physical cores that this process may use"
    budget = config.max_num_batched_tokens
    if budget is None:
        budget = max(facts.batched_tokens, config.parallel)
        reasons["max_num_batched_tokens"] = f"{budget}: the default on a {facts.device}, bounds a step's length"
    max_model_len = config.max_model_len
    if max_model_len is None:
        max_model_len = context
        reasons["max_model_len"] = f"{context}: the model's own context"
    resolved = replace(
        config,
        device=facts.device,
        dtype=dtype,
        kv_dtype=kv_dtype,
        threads=threads,
        max_num_batched_tokens=budget,
        max_model_len=max_model_len,
    )
    return resolved, reasons


def resolve_memory(config: EngineConfig, facts: MemoryFacts) -> tuple[EngineConfig, Reasons]:
    """Block size and KV memory: no more than --parallel sequences of the full context can use."""
    reasons: Reasons = {}
    block_size = config.block_size
    if block_size is None:
        block_size = facts.block_size
        reasons["block_size"] = f"{block_size}: the attention backend's own"
    kv_memory = config.kv_memory
    if kv_memory is None:
        assert config.max_model_len is not None, "resolve_compute comes first"
        # One block more than the sequences need: the null block.
        blocks = config.parallel * -(-config.max_model_len // block_size) + 1
        wanted = blocks * block_size * facts.bytes_per_token
        allowed = int(facts.free * facts.share)
        kv_memory = min(wanted, allowed)
        reasons["kv_memory"] = (
            f"{format_bytes(kv_memory)}: all that {config.parallel} sequences of {config.max_model_len} tokens can use"
            if wanted <= allowed
            else f"{format_bytes(kv_memory)}: {facts.share:.0%} of the {format_bytes(facts.free)} that are free"
        )
    return replace(config, block_size=block_size, kv_memory=kv_memory), reasons
