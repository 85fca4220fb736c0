"""Which attention backend serves a model, and why the others do not."""

from collections.abc import Iterable
from typing import Any

import torch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.attention.flash import FlashAttention
from servekit.engine.attention.reference import ReferenceAttention
from servekit.engine.attention.sdpa import SdpaAttention
from servekit.engine.attention.triton_paged import TritonAttention
from servekit.engine.attention.varlen import VarlenAttention
from servekit.engine.spec.attention import AttentionShape
from servekit.errors import ConfigError


def attention_backends() -> dict[str, type[AttentionBackend[Any]]]:
    """By name, best first; the reference is never chosen by itself.

    The order among those for a GPU is the published experience with such kernels, not a measurement of ours yet.
    """
    return {
        backend.name: backend
        for backend in (FlashAttention, VarlenAttention, TritonAttention, SdpaAttention, ReferenceAttention)
    }


def select_attention(
    choice: str, shapes: Iterable[AttentionShape], dtype: torch.dtype, device: torch.device
) -> tuple[AttentionBackend[Any], str]:
    """The backend and the reason for it. Raises ConfigError when the one asked for cannot serve some layer."""
    layers = set(shapes)
    refusals: list[str] = []
    for name, backend in attention_backends().items():
        if choice not in ("auto", name):
            continue
        reasons = sorted({reason for shape in layers for reason in backend.unsupported(shape, dtype, device)})
        if not reasons:
            why = "asked for" if choice == name else "the first that serves every layer on this device"
            return backend(), "; ".join([f"{name}: {why}", *refusals])
        refusals.append(f"{name} cannot: {', '.join(reasons)}")
    raise ConfigError(f"--attention {choice}: {'; '.join(refusals) or 'no such backend'}", param="attention")
