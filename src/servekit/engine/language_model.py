"""Which weights and which kernels compute a language model, and the model made of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeGuard

from servekit.config import EngineConfig, QuantizeChoice
from servekit.engine.auto import (
    QuantizeFacts,
    Reasons,
    check_rounding,
    q8_0_problem,
    resolve_quantize,
    without_graphs,
)
from servekit.engine.device.base import Device
from servekit.engine.models.native_decoder import NativeDecoder
from servekit.engine.models.parameters import canonical_name
from servekit.engine.models.weights import Progress, WeightSource
from servekit.engine.native.kernels import BFLOAT16_ISAS, Kernels
from servekit.engine.native.kv_cache import NativeKvCache
from servekit.engine.native.library import Library, load_library
from servekit.engine.native.quantiser import IntBits
from servekit.engine.native.structs import KV_TILE
from servekit.engine.native.weights import PackedWeights
from servekit.engine.native_runner import NativeRunner
from servekit.engine.packed_weights import packed_weights
from servekit.engine.resolve import resolve_on_device
from servekit.engine.spec.decoder import DecoderSpec
from servekit.engine.step import AllowedTokens
from servekit.errors import ConfigError
from servekit.kvcalc.memory import PoolPlan
from servekit.store.resolve import LocalModel

if TYPE_CHECKING:
    from servekit.engine.models.decoder import Decoder
    from servekit.engine.runner import ModelRunner


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """What attention asks of KV blocks: a divisor of their size, and the size it does best with."""

    multiple: int
    default: int


@dataclass(frozen=True, slots=True)
class RunnerNeeds:
    """What a runner is made of beside the model: the pool, how many may run, and what the sampler has to know."""

    plan: PoolPlan
    max_num_seqs: int
    eos_token_ids: frozenset[int]
    grammars: AllowedTokens | None = None


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights. `kernels` are those of engine/native if it computes with them, to be closed once.

    `library_path` is the file of the library, or why there is none. `reserved` are the bytes of the device that steps
    take beside weights and KV pool. `make_runner` allocates the pool.
    """

    model: Decoder | NativeDecoder
    config: EngineConfig
    reasons: Reasons
    blocks: BlockSizes
    kernels: Kernels | None
    library: Library | None
    library_path: str
    reserved: int
    make_runner: Callable[[RunnerNeeds], ModelRunner | NativeRunner]

    def describe(self) -> dict[str, Any]:
        """What `GET /props` shows of the kernels: those that run, those that could, and why."""
        return {
            "running": "torch" if self.kernels is None else self.kernels.isa,
            "available": [] if self.library is None else list(self.library.isas),
            "library": self.library_path,
            "why": self.reasons["quantize"],
        }


def load_language_model(
    files: LocalModel,
    spec: DecoderSpec,
    source: WeightSource,
    config: EngineConfig,
    device: Device,
    progress: Progress | None = None,
) -> LoadedModel:
    """Resolve how to compute, and load the weights. Raises ConfigError for what cannot be honoured here.

    torch is imported only for a model that it computes.
    """
    library, where = load_library() if device.kind == "cpu" else (None, "the kernels are for CPUs")
    isa = library.isas[0] if library else None
    facts = QuantizeFacts(device.kind, None if library else where, _stored(source), isa in BFLOAT16_ISAS)
    quantize, why = resolve_quantize(config, facts)
    packed = None
    if library is not None and _is_packed(quantize) and config.attention in ("auto", "native"):
        threads = config.threads or device.default_threads()
        packed = packed_weights(files, spec, source, library, quantize, threads, progress)
        if config.quantize == "auto":
            quantize, why = check_rounding(config, quantize, why, packed.worst())
            packed = packed if _is_packed(quantize) else None
    config = replace(config, quantize=quantize)
    config, reasons = resolve_on_device(
        config,
        device,
        spec.max_position_embeddings,
        head_dim=spec.head_dim,
        bfloat16_kernels=facts.bfloat16,
    )
    reasons["quantize"] = why
    assert config.threads is not None
    if library is not None and _is_native_bfloat16(config, facts):
        packed = packed_weights(files, spec, source, library, "bfloat16", config.threads, progress)
    if library is not None and packed is not None:
        return _on_kernels(spec, packed, library, where, config, reasons)
    if config.kv_dtype == "q8_0":
        raise ConfigError(
            f"--kv-dtype q8_0 is for attention by the CPU kernels, and torch computes here (weights: {why}; "
            f"--attention {config.attention})",
            hint="leave --kv-dtype out",
            param="kv_dtype",
        )
    from servekit.engine.torch_model import TorchParts, load_in_torch

    kernels = Kernels(library, config.threads) if library is not None and _is_packed(quantize) else None
    parts = TorchParts(spec, source, device, library, where, kernels, progress)
    return load_in_torch(parts, config, reasons)


def _on_kernels(
    spec: DecoderSpec, packed: PackedWeights, library: Library, where: str, config: EngineConfig, reasons: Reasons
) -> LoadedModel:
    """All of it on the kernels."""
    assert config.max_model_len is not None
    assert config.threads is not None
    is_q8 = config.kv_dtype == "q8_0"
    if is_q8 and (problem := q8_0_problem(config.block_size, spec.head_dim)):
        raise ConfigError(f"--kv-dtype q8_0: {problem}", hint="--kv-dtype bfloat16", param="kv_dtype")
    reasons["graphs"] = without_graphs(config, "a cpu computes each step as it is launched")
    kernels = Kernels(library, config.threads)
    model = NativeDecoder(spec, packed, kernels, config.max_model_len)
    reasons["attention"] = f"native: the {kernels.isa} kernels read the pages as they lie"

    def make_runner(needs: RunnerNeeds) -> NativeRunner:
        cache = NativeKvCache(
            num_layers=spec.num_layers,
            num_blocks=needs.plan.num_blocks,
            block_size=needs.plan.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=config.kv_dtype,
        )
        return NativeRunner(model, cache, eos_token_ids=needs.eos_token_ids, grammars=needs.grammars)

    return LoadedModel(
        model=model,
        config=replace(config, attention="native"),
        reasons=reasons,
        blocks=BlockSizes(multiple=KV_TILE if is_q8 else 1, default=16),
        kernels=kernels,
        library=library,
        library_path=where,
        reserved=0,
        make_runner=make_runner,
    )


def _is_packed(quantize: QuantizeChoice) -> TypeGuard[IntBits]:
    return quantize in ("int8", "int4")


def _is_native_bfloat16(config: EngineConfig, facts: QuantizeFacts) -> bool:
    """Whether weights that are not quantised are for the kernels all the same."""
    is_open = config.attention in ("auto", "native") and config.quantize == "none"
    return is_open and config.dtype == "bfloat16" and config.device == "cpu" and facts.bfloat16


def _stored(source: WeightSource) -> frozenset[str]:
    """What the projections of all layers are stored in."""
    return frozenset(
        source.stored(name)
        for name, shape in source.shapes().items()
        if len(shape) == 2 and (canonical_name(name) or "").startswith("model.layers.")
    )
