"""Attention by torch's own `varlen_attn`: the flash kernels that torch ships, since 2.13 over paged keys as well."""

import inspect
from typing import Any

import torch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.attention.paged import (
    PagedPlan,
    bias_reasons,
    gpu_reasons,
    half_precision_reasons,
    head_reasons,
    keys_and_values,
    plan_paged,
    window_sides,
)
from servekit.engine.batch import Batch
from servekit.engine.spec.attention import AttentionShape


class VarlenAttention(AttentionBackend[PagedPlan]):
    """The kernels are those of flash-attn 2, so pages are a multiple of 256 tokens."""

    name = "varlen"
    is_capturable = True
    block_size_multiple = 256
    default_block_size = 256

    def __init__(self) -> None:
        function = _varlen_attn()
        assert function is not None, "this backend is selected only where torch has it"
        self._attend = function

    @classmethod
    def unsupported(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> list[str]:
        """An older torch, no GPU of Ampere or newer, float32, large or odd heads, a softcap or a bias."""
        reasons = gpu_reasons(device, (8, 0))
        if reasons:
            return reasons
        if _varlen_attn() is None:
            return [f"torch {torch.__version__} has no varlen_attn with block_table"]
        softcap = [] if shape.softcap is None else ["it has no softcap"]
        return half_precision_reasons(dtype) + head_reasons(shape, 256) + softcap + bias_reasons(shape)

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
        keys, values, tables = keys_and_values(kv, cache, plan)
        paged: dict[str, Any] = {} if tables is None else {"seqused_k": plan.context_lens, "block_table": tables}
        out: torch.Tensor = self._attend(
            q,
            keys,
            values,
            plan.query_starts,
            plan.context_starts,
            plan.max_query_len,
            plan.max_context_len,
            scale=shape.scale,
            window_size=window_sides(shape),
            enable_gqa=shape.num_heads != shape.num_kv_heads,
            **paged,
        )
        return out


def _varlen_attn() -> Any:
    """The function, where torch has it and it reads pages."""
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return None
    return varlen_attn if "block_table" in inspect.signature(varlen_attn).parameters else None
