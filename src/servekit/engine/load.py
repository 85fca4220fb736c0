"""From a config to a running engine: the one place where all parts of the engine meet.

In two halves, so that a server can refuse a broken model before its port opens: `open_model` reads headers only,
`load_engine` reads the weights. Parts that need torch are imported by those who use them.
"""

from __future__ import annotations

import hashlib
import logging
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from servekit.config import EngineConfig
from servekit.engine.auto import MemoryFacts, Reasons, resolve_memory
from servekit.engine.core.scheduler import Scheduler, SchedulerConfig
from servekit.engine.device.base import Device
from servekit.engine.device.select import select_device
from servekit.engine.engine import Engine
from servekit.engine.grammar import Grammars
from servekit.engine.language_model import BlockSizes, LoadedModel, RunnerNeeds, load_language_model
from servekit.engine.models.gguf import GgufSource
from servekit.engine.models.parameters import check_parameters, expected_parameters
from servekit.engine.models.weights import Progress, SafetensorsSource, WeightSource
from servekit.engine.native_runner import NativeRunner
from servekit.engine.open_embedder import OpenEmbedder
from servekit.engine.output import SamplingDefaults
from servekit.engine.resolve import resolve_on_device
from servekit.engine.spec.decoder import DecoderSpec
from servekit.engine.spec.families import read_decoder_spec
from servekit.engine.spec.json_files import read_json, read_json_if_there
from servekit.engine.text.tokenizer import Tokenizer
from servekit.errors import ConfigError, ModelError
from servekit.kvcalc.memory import PoolPlan, kv_block_bytes, plan_pool
from servekit.kvcalc.model_shape import ModelShape, read_model_shape
from servekit.store.resolve import LocalModel

if TYPE_CHECKING:
    from servekit.engine.embedding_model import BuiltEmbedder
    from servekit.engine.runner import ModelRunner

log = logging.getLogger("servekit.engine")


@dataclass(frozen=True, slots=True)
class OpenModel:
    """A model whose files have been checked against each other, with its weights still on disk."""

    files: LocalModel
    config: Mapping[str, Any]
    spec: DecoderSpec
    shape: ModelShape
    source: WeightSource
    warnings: list[str]


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """An engine that has not been started, and what was decided on the way. `kv_bytes` is measured, `plan` promised.

    `runner` and `limits` are what the engine was made of, for whoever drives steps without it.
    """

    engine: Engine
    runner: ModelRunner | NativeRunner
    limits: SchedulerConfig
    config: EngineConfig
    reasons: Reasons
    plan: PoolPlan
    device: Device
    kv_bytes: int
    weights_bytes: int
    num_parameters: int
    family: str
    model_config: Mapping[str, Any]
    kernels: Mapping[str, Any]
    embedding: BuiltEmbedder | None = None

    def props(self) -> dict[str, Any]:
        """What `GET /props` shows: the resolved config, why, and the KV pool."""
        # The bytes are those of the tensors: `servekit kv --check` compares them with a plan of its own.
        kv = {**asdict(self.plan), "kv_bytes": self.kv_bytes, "dtype": self.config.kv_dtype}
        return {
            "model": self.engine.model_name,
            "device": self.device.describe(),
            # The name, not the path that may stand in its place: clients need not know this machine's folders.
            "config": {**asdict(self.config), "model": self.engine.model_name},
            "reasons": dict(self.reasons),
            "kv": kv,
            "kernels": dict(self.kernels),
            "graphs": {**asdict(self.runner.graph_stats()), "failure": self.runner.graph_failure},
            "embedding": None if self.embedding is None else self.embedding.props(),
            "sampling_defaults": asdict(self.engine.defaults),
            "model_config": dict(self.model_config),
        }


def open_model(files: LocalModel) -> OpenModel:
    """Read config and weight headers. Raises ModelError for anything that would keep the model from loading."""
    config = read_json(files.directory / "config.json")
    spec = read_decoder_spec(config)
    if not spec.causal:
        raise ModelError(
            "config.json: this model attends both ways, so it embeds text and cannot write it",
            hint="serve it as --embedding-model",
        )
    shape = read_model_shape(config)
    source: WeightSource = SafetensorsSource(files.directory) if files.weights is None else GgufSource(files.weights)
    warnings = check_parameters(spec, source.shapes())
    return OpenModel(files, config, spec, shape, source, warnings)


def load_engine(
    model: OpenModel,
    config: EngineConfig,
    progress: Progress | None = None,
    embedder: OpenEmbedder | None = None,
) -> LoadedEngine:
    """Resolve every open choice, load the weights, size and allocate the KV pool. `embedder` is served beside it.

    Raises ConfigError for a choice that this machine or model cannot honour.
    """
    spec, asked = model.spec, config
    device, device_reason = select_device(config.device)
    tokenizer = Tokenizer.from_directory(model.files.directory)
    if tokenizer.vocab_size > spec.vocab_size:
        raise ModelError(f"the tokenizer has {tokenizer.vocab_size} tokens, but the model only {spec.vocab_size}")
    loaded = load_language_model(model.files, spec, model.source, config, device, progress)
    model.source.close()
    config, reasons = loaded.config, loaded.reasons
    reasons["device"] = f"{device.kind}: {device_reason}"
    built = None if embedder is None else _build_embedder_beside(loaded, embedder, asked, device)

    reserved = loaded.reserved + (0 if built is None else built.graph_memory)
    config, memory_reasons = _resolve_memory(config, device, loaded.blocks, model.shape, reserved)
    reasons |= memory_reasons
    plan = _plan(config, model.shape)
    limits = _scheduler_config(config, plan, tokenizer, model.files)
    grammars = Grammars(tokenizer.to_json, spec.vocab_size, tokenizer.eos_token_ids)
    runner = loaded.make_runner(RunnerNeeds(plan, limits.max_num_seqs, tokenizer.eos_token_ids, grammars))
    engine = Engine(
        model_name=model.files.name,
        scheduler=Scheduler(limits),
        runner=runner,
        tokenizer=tokenizer,
        grammars=grammars,
        vocab_size=spec.vocab_size,
        max_model_len=plan.max_model_len,
        defaults=read_sampling_defaults(model.files.directory),
        queue_limit=config.queue_limit,
        embedder=None if built is None else built.embedder,
    )
    return LoadedEngine(
        engine=engine,
        runner=runner,
        limits=limits,
        config=config,
        reasons=reasons,
        plan=plan,
        device=device,
        kv_bytes=runner.kv_cache.nbytes,
        weights_bytes=loaded.model.nbytes,
        num_parameters=sum(math.prod(shape) for shape in expected_parameters(spec).values()),
        family=spec.family,
        model_config=model.config,
        kernels=loaded.describe(),
        embedding=built,
    )


def read_sampling_defaults(directory: Path) -> SamplingDefaults:
    """The model's advice in generation_config.json, if it has any. `do_sample: false` means greedy."""
    advice = read_json_if_there(directory / "generation_config.json")
    found = {name: advice[name] for name in SamplingDefaults.__slots__ if advice.get(name) is not None}
    wrong = [name for name, value in found.items() if isinstance(value, bool) or not isinstance(value, int | float)]
    if wrong:
        raise ModelError(f"generation_config.json: {wrong[0]} must be a number, not {found[wrong[0]]!r}")
    return SamplingDefaults(**found)


def _build_embedder_beside(
    loaded: LoadedModel, embedder: OpenEmbedder, asked: EngineConfig, device: Device
) -> BuiltEmbedder:
    """The embedding model next to one that writes, in numbers of its own where that one is quantised."""
    import torch

    from servekit.engine.embedding_model import build_embedder, runs_on_kernels

    if loaded.kernels is None:
        return build_embedder(embedder, loaded.config, device, None)
    attention = "auto" if asked.attention == "native" else asked.attention
    open_choices = replace(asked, quantize="none", attention=attention)
    config, _ = resolve_on_device(open_choices, device, embedder.spec.max_position_embeddings)
    torch.set_num_threads(1)
    kernels = loaded.kernels if runs_on_kernels(embedder.spec, config, loaded.kernels.isa) else None
    return build_embedder(embedder, config, device, None, kernels=kernels)


def _resolve_memory(
    config: EngineConfig, device: Device, blocks: BlockSizes, shape: ModelShape, reserved: int
) -> tuple[EngineConfig, Reasons]:
    block_size = config.block_size
    if block_size is not None and block_size % blocks.multiple:
        raise ConfigError(
            f"--block-size {block_size} is not a multiple of {blocks.multiple}, "
            f"which {config.attention} attention needs",
            param="block_size",
        )
    facts = MemoryFacts(
        free=max(0, device.free_memory() - reserved),
        share=config.memory_utilization or device.kv_share,
        bytes_per_token=kv_block_bytes(shape, block_size=1, kv_dtype=config.kv_dtype),
        block_size=blocks.default,
    )
    return resolve_memory(config, facts)


def _plan(config: EngineConfig, shape: ModelShape) -> PoolPlan:
    assert config.kv_memory is not None
    assert config.block_size is not None
    assert config.max_model_len is not None
    return plan_pool(
        shape,
        kv_memory=config.kv_memory,
        block_size=config.block_size,
        kv_dtype=config.kv_dtype,
        max_model_len=config.max_model_len,
    )


def _scheduler_config(config: EngineConfig, plan: PoolPlan, tokenizer: Tokenizer, files: LocalModel) -> SchedulerConfig:
    assert config.max_num_batched_tokens is not None
    return SchedulerConfig(
        max_num_seqs=config.parallel,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=plan.max_model_len,
        num_blocks=plan.num_blocks,
        block_size=plan.block_size,
        policy=config.scheduling,
        static_wait=config.static_wait,
        enable_prefix_caching=config.prefix_cache,
        eos_token_ids=tokenizer.eos_token_ids,
        cache_seed=hashlib.sha256(
            f"{files.source}|{config.dtype}|{config.quantize}|{config.kv_dtype}".encode()
        ).digest(),
    )
