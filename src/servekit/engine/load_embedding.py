"""From a config to a running engine that only embeds: no KV pool, and a scheduler that never has work."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from servekit.config import EngineConfig
from servekit.engine.auto import Reasons
from servekit.engine.core.scheduler import Scheduler, SchedulerConfig
from servekit.engine.device.base import Device
from servekit.engine.device.select import select_device
from servekit.engine.embedding_model import BuiltEmbedder, build_embedder, runs_on_kernels
from servekit.engine.engine import Engine
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.library import load_library
from servekit.engine.open_embedder import OpenEmbedder
from servekit.engine.output import SamplingDefaults
from servekit.engine.resolve import resolve_on_device
from servekit.engine.step import NoRunner
from servekit.engine.text.tokenizer import Tokenizer
from servekit.errors import ConfigError

_TOKENS_A_CORE = 512
"""Matrix products of a core are at their full rate from 256 tokens on; twice that lets texts be dealt evenly."""
_TOKENS_ON_A_GPU = 16384


@dataclass(frozen=True, slots=True)
class LoadedEmbeddingEngine:
    """An engine without a model that writes, not started yet, and what was decided on the way."""

    engine: Engine
    config: EngineConfig
    reasons: Reasons
    device: Device
    embedding: BuiltEmbedder
    model_config: Mapping[str, Any]

    def props(self) -> dict[str, Any]:
        """What `GET /props` shows: the resolved config, why, and the embedding model."""
        return {
            "model": self.engine.model_name,
            "device": self.device.describe(),
            "config": {**asdict(self.config), "model": self.engine.model_name},
            "reasons": dict(self.reasons),
            "embedding": self.embedding.props(),
            "model_config": dict(self.model_config),
        }


def _kernels(opened: OpenEmbedder, config: EngineConfig) -> Kernels | None:
    """The CPU kernels, where they are the faster way to compute this model."""
    library, _ = load_library()
    if library is None or not runs_on_kernels(opened.spec, config, library.isas[0]):
        return None
    # One pool computes at a time; torch adds up embeddings and pools, with one thread.
    torch.set_num_threads(1)
    assert config.threads is not None
    return Kernels(library, config.threads)


def load_embedding_engine(opened: OpenEmbedder, config: EngineConfig) -> LoadedEmbeddingEngine:
    """Resolve every open choice and load the weights.

    Raises ConfigError for a choice that this machine or model cannot honour.
    """
    asked_for, budget = config.max_model_len, config.max_num_batched_tokens
    if config.quantize not in ("auto", "none"):
        raise ConfigError(
            f"--quantize {config.quantize}: models that only embed are computed in their own numbers",
            hint="leave --quantize out",
            param="quantize",
        )
    config = replace(config, quantize="none")
    device, device_reason = select_device(config.device)
    config, reasons = resolve_on_device(config, device, opened.spec.max_position_embeddings)
    reasons["device"] = f"{device.kind}: {device_reason}"
    if budget is None:
        config, reasons["max_num_batched_tokens"] = _with_budget(config, device)
    torch.set_num_threads(config.threads or 1)
    built = build_embedder(opened, config, device, asked_for, kernels=_kernels(opened, config))
    reasons["attention"] = built.attention
    if asked_for is None:
        reasons["max_model_len"] = f"{built.embedder.max_tokens}: the longest text that the model's files allow"
    if opened.embedding is not None:
        reasons["pooling"] = opened.embedding.reason
    config = replace(config, max_model_len=built.embedder.max_tokens)
    assert config.max_num_batched_tokens is not None
    idle = SchedulerConfig(
        max_num_seqs=1,
        max_num_batched_tokens=config.max_num_batched_tokens,
        max_model_len=16,
        num_blocks=2,
        block_size=16,
        eos_token_ids=frozenset(),
    )
    engine = Engine(
        model_name=opened.files.name,
        scheduler=Scheduler(idle),
        runner=NoRunner(),
        tokenizer=Tokenizer.from_directory(opened.files.directory),
        vocab_size=opened.spec.vocab_size,
        max_model_len=built.embedder.max_tokens,
        defaults=SamplingDefaults(),
        queue_limit=config.queue_limit,
        can_generate=False,
        embedder=built.embedder,
    )
    return LoadedEmbeddingEngine(engine, config, reasons, device, built, opened.config)


def _with_budget(config: EngineConfig, device: Device) -> tuple[EngineConfig, str]:
    """Nobody decodes beside these texts, so a step may be as long as keeps the device busy."""
    threads = config.threads or 1
    budget = max(device.default_batched_tokens, _TOKENS_A_CORE * threads) if device.kind == "cpu" else _TOKENS_ON_A_GPU
    return replace(
        config, max_num_batched_tokens=budget
    ), f"{budget}: keeps a {device.kind} busy; nobody decodes beside"
