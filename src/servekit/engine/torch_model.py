"""A language model that torch computes, on any device, and the runner that drives it."""

from dataclasses import dataclass, replace

import torch

from servekit.config import EngineConfig
from servekit.engine.attention.select import select_attention
from servekit.engine.auto import Reasons
from servekit.engine.device.base import Device
from servekit.engine.graphs import GraphCache, plan_graphs
from servekit.engine.kv_cache import KvCache
from servekit.engine.language_model import BlockSizes, LoadedModel, RunnerNeeds
from servekit.engine.layers.linear import LinearFormat
from servekit.engine.layers.packed import unquantised_format
from servekit.engine.layers.quantised import Quantised
from servekit.engine.layers.scaled import scaled_format
from servekit.engine.memory_profile import full_step_memory
from servekit.engine.models.build import build_decoder
from servekit.engine.models.weights import Progress, WeightSource
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.library import Library
from servekit.engine.runner import ModelRunner
from servekit.engine.spec.attention import attention_shapes
from servekit.engine.spec.decoder import DecoderSpec

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class TorchParts:
    """What a model is made of. `kernels` are for its matrix products, where those are quantised on a CPU."""

    spec: DecoderSpec
    source: WeightSource
    device: Device
    library: Library | None
    library_path: str
    kernels: Kernels | None
    progress: Progress | None = None


def load_in_torch(parts: TorchParts, config: EngineConfig, reasons: Reasons) -> LoadedModel:
    """`config` is resolved but for attention and memory. Raises ConfigError for what cannot be honoured here."""
    spec, device, kernels = parts.spec, parts.device, parts.kernels
    assert config.max_model_len is not None
    assert config.threads is not None
    # Two pools of threads on the same cores would take turns at waiting for each other.
    torch.set_num_threads(config.threads if kernels is None else 1)
    linear = _linear_format(config, device, kernels, reasons)
    dtype = _DTYPES[config.dtype]
    backend, reasons["attention"] = select_attention(
        config.attention, attention_shapes(spec), dtype, device.torch_device
    )
    with torch.inference_mode():
        model = build_decoder(
            spec,
            parts.source,
            linear=linear,
            backend=backend,
            dtype=dtype,
            device=device.torch_device,
            max_positions=config.max_model_len,
            progress=parts.progress,
        )
    config = replace(config, attention=backend.name)  # type: ignore[arg-type]  # all names are choices
    step_memory = full_step_memory(model, device, num_tokens=config.max_num_batched_tokens or 1, config=config)
    graph_memory, reasons["graphs"] = plan_graphs(device, backend, config)

    def make_runner(needs: RunnerNeeds) -> ModelRunner:
        plan = needs.plan
        cache = KvCache(
            num_layers=spec.num_layers,
            num_blocks=plan.num_blocks,
            block_size=plan.block_size,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            dtype=_DTYPES[config.kv_dtype],
            device=device.torch_device,
        )
        graphs = None
        if graph_memory:
            graphs = GraphCache(
                device,
                memory=graph_memory,
                max_num_seqs=needs.max_num_seqs,
                max_context_len=plan.max_model_len,
                max_blocks=-(-plan.max_model_len // plan.block_size),
            )
        runner = ModelRunner(
            model,
            cache,
            device,
            max_num_seqs=needs.max_num_seqs,
            eos_token_ids=needs.eos_token_ids,
            grammars=needs.grammars,
            graphs=graphs,
            kernels=kernels,
        )
        if config.graph_warmup:
            runner.warm_up()
        return runner

    return LoadedModel(
        model=model,
        config=config,
        reasons=reasons,
        blocks=BlockSizes(backend.block_size_multiple, backend.default_block_size),
        kernels=kernels,
        library=parts.library,
        library_path=parts.library_path,
        reserved=step_memory + graph_memory,
        make_runner=make_runner,
    )


def _linear_format(config: EngineConfig, device: Device, kernels: Kernels | None, reasons: Reasons) -> LinearFormat:
    """How matrices are kept; the reason is noted where torch had a choice."""
    if kernels is not None:
        assert config.quantize in ("int8", "int4")
        return Quantised(kernels, config.quantize)
    dtype = _DTYPES[config.dtype]
    if config.quantize in ("int8", "fp8"):
        linear, reasons["linear"] = scaled_format(config.quantize, dtype, device.torch_device)
    else:
        linear, reasons["linear"] = unquantised_format(dtype, device.torch_device)
    return linear
