"""Asks the device for what the open choices depend on, and resolves them."""

from servekit.config import EngineConfig
from servekit.engine.auto import ComputeFacts, Reasons, resolve_compute
from servekit.engine.device.base import Device
from servekit.errors import ConfigError


def resolve_on_device(
    config: EngineConfig,
    device: Device,
    context: int,
    *,
    head_dim: int | None = None,
    bfloat16_kernels: bool = False,
) -> tuple[EngineConfig, Reasons]:
    """Threads, dtypes, token budget and context limit; --quantize is resolved. `context` is the model's own.

    `head_dim` is that of the keys and values that the model keeps; None where it keeps none. `bfloat16_kernels`: those
    of engine/native know the model, and are quick at bfloat16.

    Raises ConfigError for a context beyond the model's.
    """
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the model's context of {context}",
            param="max_model_len",
        )
    on_kernels = bfloat16_kernels and config.dtype == "auto" and config.attention in ("auto", "native")
    is_open = config.quantize == "none" and "auto" in (config.dtype, config.kv_dtype) and not on_kernels
    linear_ratio = attention_ratio = 0.5
    # A GPU of the supported kinds computes bfloat16 at least as fast; only a CPU has to be asked.
    if is_open and device.kind == "cpu":
        from servekit.engine.probe import probe_dtypes

        probe = probe_dtypes(device.torch_device)
        linear_ratio, attention_ratio = probe.linear_ratio, probe.attention_ratio
    facts = ComputeFacts(
        device=device.kind,
        threads=device.default_threads(),
        batched_tokens=device.default_batched_tokens,
        linear_ratio=linear_ratio,
        attention_ratio=attention_ratio,
        head_dim=head_dim,
        bfloat16_kernels=bfloat16_kernels,
    )
    return resolve_compute(config, facts, context)
