"""Turns every open choice of an EngineConfig into a value, once, and says why. Pure: facts in, a new config out."""

from dataclasses import dataclass, replace

from servekit.config import DeviceChoice, EngineConfig, KvDTypeChoice, QuantizeChoice
from servekit.engine.native.library import HOW_TO_GET_THEM as HOW_TO_GET_KERNELS
from servekit.engine.native.structs import GROUP, KV_TILE
from servekit.errors import ConfigError
from servekit.units import format_bytes

_CLEARLY_FASTER = 0.8
"""bfloat16 rounds where float32 does not, so it is taken only for a gain that no noise explains."""


LARGEST_ROUNDING_ERROR = 0.01
"""What rounding may change a matrix by, as a root of mean squares relative to its own, to be chosen by itself."""
_FOUR_BITS = frozenset({"Q4_0", "Q4_1", "Q4_K"})


@dataclass(frozen=True, slots=True)
class QuantizeFacts:
    """What quantised weights depend on. `problem` is why there are no CPU kernels, None when there are.

    `stored` names what the projections of all layers are stored in: "float", or ggml's blocks. `bfloat16` says that the
    kernels are quick at that too.
    """

    device: DeviceChoice
    problem: str | None
    stored: frozenset[str]
    bfloat16: bool = False


@dataclass(frozen=True, slots=True)
class ComputeFacts:
    """What was measured about the device; the ratios are bfloat16's time over float32's (see engine/probe.py).

    They are not looked at for quantised weights, nor where kernels of our own are quick at bfloat16.
    """

    device: DeviceChoice
    threads: int
    batched_tokens: int
    linear_ratio: float
    attention_ratio: float
    bfloat16_kernels: bool = False
    head_dim: int | None = None
    """Of keys and values that are kept; None where there are none."""


@dataclass(frozen=True, slots=True)
class MemoryFacts:
    """What is free once the weights are loaded, the share of it that a cache may have, and what a token costs."""

    free: int
    share: float
    bytes_per_token: int
    block_size: int


Reasons = dict[str, str]
"""For each choice that was open: the value and why."""


def resolve_quantize(config: EngineConfig, facts: QuantizeFacts) -> tuple[QuantizeChoice, str]:
    """What the weights are kept in, and why.

    Raises ConfigError for weights or attention that this machine or the other choices rule out.
    """
    asked = config.quantize
    if facts.device != "cpu":
        return _resolve_on_gpu(config, facts)
    if asked == "fp8":
        raise ConfigError("--quantize fp8 is for GPUs", hint="--quantize int8, or auto", param="quantize")
    hindrance = facts.problem
    if hindrance is None and asked == "none":
        hindrance = "--quantize none was asked for"
    if hindrance is None and asked == "auto" and config.dtype != "auto":
        hindrance = f"--dtype {config.dtype} was asked for"
    if hindrance is None and config.dtype == "bfloat16":
        hindrance = "what surrounds its products is computed in float32, and --dtype bfloat16 was asked for"
    computes_bfloat16 = facts.bfloat16 and config.dtype == "bfloat16" and asked in ("auto", "none")
    if hindrance is not None and config.attention == "native" and not computes_bfloat16:
        raise ConfigError(f"--attention native computes with quantised weights: {hindrance}", param="attention")
    if asked in ("int8", "int4"):
        if hindrance is not None:
            hint = HOW_TO_GET_KERNELS if facts.problem and facts.device == "cpu" else "leave --quantize out"
            raise ConfigError(f"--quantize {asked}: {hindrance}", hint=hint, param="quantize")
        return asked, f"{asked}: asked for"
    if asked == "none":
        return "none", "none: asked for"
    if hindrance is None and config.attention not in ("auto", "native"):
        hindrance = f"--attention {config.attention} was asked for"
    if hindrance is not None:
        hint = f"; for int8 and int4, {HOW_TO_GET_KERNELS}" if hindrance == facts.problem else ""
        return "none", f"none: {hindrance}{hint}"
    if "float" in facts.stored:
        return "int8", "int8: half the bytes of bfloat16"
    if facts.stored & _FOUR_BITS:
        others = "" if facts.stored <= _FOUR_BITS else ", and what has more bits as int8"
        return "int4", f"int4: the four-bit blocks of the file as they are{others}"
    return "int8", "int8: the file's own blocks have more than four bits"


def _resolve_on_gpu(config: EngineConfig, facts: QuantizeFacts) -> tuple[QuantizeChoice, str]:
    """There torch's own operators are the only ones, and nothing is quantised that nobody asked for."""
    if config.attention == "native":
        raise ConfigError(f"--attention native is for CPUs, not for {facts.device}", param="attention")
    if config.quantize == "int4":
        raise ConfigError(
            f"--quantize int4 is for CPUs, not for {facts.device}", hint="--quantize int8 or fp8", param="quantize"
        )
    if config.quantize == "auto":
        return "none", f"none: a {facts.device} computes with the weights as they are unless told otherwise"
    return config.quantize, f"{config.quantize}: asked for"


def check_rounding(
    config: EngineConfig, choice: QuantizeChoice, why: str, worst: tuple[str, float]
) -> tuple[QuantizeChoice, str]:
    """Hold what `auto` chose against what packing measured: (name, relative error) of the matrix that lost most.

    Raises ConfigError when it fails though --attention native needs it.
    """
    name, error = worst
    if not error:
        return choice, f"{why}; nothing is rounded"
    if error < LARGEST_ROUNDING_ERROR:
        return choice, f"{why}; rounding changes no matrix by more than {error:.2%}"
    problem = f"{choice} would change matrix {name} by {error:.2%}, and auto allows {LARGEST_ROUNDING_ERROR:.0%}"
    if config.attention == "native":
        raise ConfigError(
            f"--attention native computes with quantised weights: {problem}",
            hint=f"ask for --quantize {choice}",
            param="attention",
        )
    return "none", f"none: {problem}"


def q8_0_problem(block_size: int | None, head_dim: int | None) -> str | None:
    """Why the kernels cannot keep keys and values in q8_0 here; None where they can."""
    if head_dim is None or head_dim % GROUP:
        return f"q8_0 has a scale for every {GROUP} numbers of a head, and a head has {head_dim} here"
    if block_size is not None and block_size % KV_TILE:
        return f"q8_0 keeps tiles of {KV_TILE} tokens, and --block-size {block_size} was asked for"
    return None


def _native_kv_dtype(config: EngineConfig, head_dim: int | None) -> tuple[KvDTypeChoice, str]:
    """Over four bits what eight lose does not show; eight bits promise to stay within half a percent of float32."""
    if config.quantize == "int8":
        return "bfloat16", "bfloat16: with int8 weights little else is rounded; q8_0 has half the bytes"
    if problem := q8_0_problem(config.block_size, head_dim):
        return "bfloat16", f"bfloat16: half the bytes of float32 to read; {problem}"
    return "q8_0", "q8_0: half the bytes of bfloat16 to read, and the kernels multiply eight bits as they are"


def resolve_compute(config: EngineConfig, facts: ComputeFacts, context: int) -> tuple[EngineConfig, Reasons]:
    """Threads, dtypes, token budget and context limit. `context` is the model's own."""
    reasons: Reasons = {}
    dtype, kv_dtype = config.dtype, config.kv_dtype
    if config.quantize in ("int8", "int4") and facts.device == "cpu":
        native = config.attention in ("auto", "native")
        if dtype == "auto":
            dtype = "float32"
            reasons["dtype"] = f"float32: what surrounds {config.quantize} products is computed in it"
        if kv_dtype == "auto":
            kv_dtype, reasons["kv_dtype"] = "float32", "float32: the same as the compute dtype"
            if native:
                kv_dtype, reasons["kv_dtype"] = _native_kv_dtype(config, facts.head_dim)
    elif dtype == "auto" and facts.bfloat16_kernels and config.attention in ("auto", "native"):
        dtype = "bfloat16"
        reasons["dtype"] = "bfloat16: the CPU kernels multiply it in one instruction"
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


def without_graphs(config: EngineConfig, why_not: str) -> str:
    """The reason to note where no steps are recorded. Raises ConfigError where they were asked for."""
    if config.graph_warmup:
        raise ConfigError(f"--graph-warmup: there are no graphs here: {why_not}", param="graph_warmup")
    return f"off: {why_not}"


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
