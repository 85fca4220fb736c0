"""Asks the device for what the open choices depend on, and resolves them."""

import torch

from servekit.config import EngineConfig
from servekit.engine.auto import ComputeFacts, Reasons, resolve_compute
from servekit.engine.device.base import Device
from servekit.engine.probe import DTypeProbe, probe_dtypes
from servekit.errors import ConfigError


def resolve_on_device(config: EngineConfig, device: Device, context: int) -> tuple[EngineConfig, Reasons]:
    """Threads, dtypes, token budget and context limit; --quantize is resolved. `context` is the model's own.

    Raises ConfigError for a context beyond the model's. torch computes with the threads that are chosen.
    """
    if config.max_model_len is not None and config.max_model_len > context:
        raise ConfigError(
            f"--max-model-len {config.max_model_len} is more than the model's context of {context}",
            param="max_model_len",
        )
    torch.set_num_threads(config.threads or device.default_threads())
    is_open = config.quantize == "none" and "auto" in (config.dtype, config.kv_dtype)
    # A GPU of the supported kinds computes bfloat16 at least as fast; only a CPU has to be asked.
    probe = probe_dtypes(device.torch_device) if is_open and device.kind == "cpu" else DTypeProbe(0.5, 0.5)
    facts = ComputeFacts(
        device=device.kind,
        threads=device.default_threads(),
        batched_tokens=device.default_batched_tokens,
        linear_ratio=probe.linear_ratio,
        attention_ratio=probe.attention_ratio,
    )
    return resolve_compute(config, facts, context)
