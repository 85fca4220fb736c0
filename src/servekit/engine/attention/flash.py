"""Attention by the flash-attn packages: version 2 (`flash_attn`), 3 (`flash_attn_interface`) or 4 (`flash_attn.cute`).

They are looked for when a backend is selected, newest first, and are no dependency. Version 2 wants pages of a multiple
of 256 tokens; 3 and 4 take smaller ones.
"""

import importlib
import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.attention.paged import (
    PagedPlan,
    bias_reasons,
    compute_capability,
    gpu_reasons,
    half_precision_reasons,
    head_reasons,
    keys_and_values,
    plan_paged,
    window_sides,
)
from servekit.engine.batch import Batch
from servekit.engine.spec.attention import AttentionShape

Call = Callable[[AttentionShape, torch.Tensor, torch.Tensor, torch.Tensor, PagedPlan], torch.Tensor]
"""q [T, H, D] and keys and values, paged [N, block_size, K, D] or ragged [T, K, D], to [T, H, D]."""


@dataclass(frozen=True, slots=True)
class FlashVersion:
    """One generation of the package: where it is, what it needs, and how it is called."""

    name: str
    module: str
    capabilities: tuple[int, ...]
    block_size_multiple: int
    default_block_size: int
    largest_head: int
    bind: Callable[[Any], Call]


def _bind_2(module: Any) -> Call:
    def call(shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        out: torch.Tensor = module.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=plan.query_starts,
            cu_seqlens_k=plan.context_starts,
            max_seqlen_q=plan.max_query_len,
            max_seqlen_k=plan.max_context_len,
            softmax_scale=shape.scale,
            causal=shape.causal,
            window_size=window_sides(shape) if shape.window is not None else (-1, -1),
            softcap=shape.softcap or 0.0,
            block_table=plan.block_tables,
        )
        return out

    return call


def _bind_3(module: Any) -> Call:
    def call(shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        common: dict[str, Any] = {
            "softmax_scale": shape.scale,
            "causal": shape.causal,
            "window_size": window_sides(shape) if shape.window is not None else (-1, -1),
            "softcap": shape.softcap or 0.0,
            "cu_seqlens_q": plan.query_starts,
            "max_seqlen_q": plan.max_query_len,
        }
        if plan.block_tables is None:
            out = module.flash_attn_varlen_func(
                q, k, v, cu_seqlens_k=plan.context_starts, max_seqlen_k=plan.max_context_len, **common
            )
        else:
            out = module.flash_attn_with_kvcache(
                q, k, v, cache_seqlens=plan.context_lens, page_table=plan.block_tables, **common
            )
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return call


def _bind_4(module: Any) -> Call:
    def call(shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, plan: PagedPlan) -> torch.Tensor:
        sides = (None, None) if shape.window is None else window_sides(shape)
        paged = plan.block_tables is not None
        out = module.flash_attn_varlen_func(
            q,
            k,
            v,
            cu_seqlens_q=plan.query_starts,
            cu_seqlens_k=None if paged else plan.context_starts,
            seqused_k=plan.context_lens if paged else None,
            page_table=plan.block_tables,
            softmax_scale=shape.scale,
            causal=shape.causal,
            window_size=sides,
            softcap=shape.softcap or 0.0,
        )
        first: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return first

    return call


VERSIONS = (
    FlashVersion("flash-attn 4", "flash_attn.cute", (9, 10), 128, 128, 128, _bind_4),
    FlashVersion("flash-attn 3", "flash_attn_interface", (9,), 16, 64, 256, _bind_3),
    FlashVersion("flash-attn 2", "flash_attn", (8, 9, 10, 12), 256, 256, 256, _bind_2),
)
"""Newest first. Which of those that are there is fastest has not been measured."""


class FlashAttention(AttentionBackend[PagedPlan]):
    """Whichever version of the package is there for this GPU."""

    name = "flash"
    is_capturable = True

    def __init__(self, device: torch.device | None = None) -> None:
        version = _version_for(compute_capability(device or torch.device("cuda")))
        assert version is not None, "this backend is selected only where a version is there"
        self.block_size_multiple = version.block_size_multiple
        self.default_block_size = version.default_block_size
        self.version = version.name
        self._call = version.bind(importlib.import_module(version.module))

    @classmethod
    def unsupported(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> list[str]:
        """No package for this GPU, float32, large or odd heads, or a bias."""
        reasons = gpu_reasons(device, (8, 0))
        if reasons:
            return reasons
        version = _version_for(compute_capability(device))
        if version is None:
            return ["no flash-attn package for this GPU is installed"]
        return half_precision_reasons(dtype) + head_reasons(shape, version.largest_head) + bias_reasons(shape)

    def plan(self, batch: Batch) -> PagedPlan:
        """See plan_paged."""
        return plan_paged(batch)

    def forward(
        self,
        shape: AttentionShape,
        q: torch.Tensor,
        kv: torch.Tensor,
        cache: torch.Tensor | None,
        plan: PagedPlan,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.forward."""
        assert bias is None, "a layer with a bias is not given to this source"
        keys, values, _ = keys_and_values(kv, cache, plan)
        return self._call(shape, q, keys, values, plan)


def _version_for(capability: tuple[int, int]) -> FlashVersion | None:
    """The newest version that is installed and was built for this GPU's generation."""
    for version in VERSIONS:
        if capability[0] in version.capabilities and _is_installed(version.module):
            return version
    return None


def _is_installed(module: str) -> bool:
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package is not there either
        return False
