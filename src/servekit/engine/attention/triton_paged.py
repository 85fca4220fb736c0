"""Attention by our own Triton kernels: pages of any size, window, softcap and any dtype, wherever Triton runs."""

import importlib.util
import os
from typing import Any

import torch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.attention.paged import PagedPlan, bias_reasons, gpu_reasons, keys_and_values, plan_paged
from servekit.engine.batch import Batch
from servekit.engine.spec.attention import AttentionShape

MAX_SPLITS = 32
KEYS_A_SPLIT = 256
"""A split of fewer keys costs more in merging than it gains."""
_TILE_KEYS = 64
_TILE_ROWS = 64
_LEAST_ROWS = 16
"""The smallest tile of the matrix units."""
_LAUNCH = {"num_warps": 4, "num_stages": 2}
"""Two tiles of keys and values of the largest heads fit into the shared memory of every GPU of Ampere or newer."""
PROGRAMS_WANTED = 264
"""Two for each multiprocessor of a large GPU."""


class TritonAttention(AttentionBackend[PagedPlan]):
    """Decoding splits long contexts; everything else is one kernel over tiles of queries."""

    name = "triton"
    is_capturable = True
    default_block_size = 16

    def __init__(self) -> None:
        # Compiled or interpreted is decided when it is imported, so not before somebody wants it.
        from servekit.engine.attention import triton_kernels

        self._kernels: Any = triton_kernels

    @classmethod
    def unsupported(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> list[str]:
        """No Triton, no GPU for it unless it is interpreted, heads over 256, or a bias."""
        if importlib.util.find_spec("triton") is None:
            return ["triton is not installed"]
        reasons = [] if os.environ.get("TRITON_INTERPRET") == "1" else gpu_reasons(device, (8, 0))
        if reasons:
            return reasons
        large = [f"heads of {shape.head_dim} are larger than 256"] if shape.head_dim > 256 else []
        return large + bias_reasons(shape)

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
        # A captured decoding step has one token a sequence; so has an eager one whose longest query is one.
        if tables is not None and plan.max_query_len == 1 and len(q) == len(plan.context_lens) and shape.causal:
            return self._decode(shape, q, keys, values, tables, plan)
        return self._ragged(shape, q, keys, values, tables, plan)

    def _ragged(
        self,
        shape: AttentionShape,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor | None,
        plan: PagedPlan,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        group = shape.num_heads // shape.num_kv_heads
        rows = max(_LEAST_ROWS, min(_TILE_ROWS, _power_of_two(plan.max_query_len * group)))
        grid = (len(plan.context_lens), -(-plan.max_query_len * group // rows), shape.num_kv_heads)
        self._kernels.attend_ragged[grid](
            out,
            q,
            keys,
            values,
            plan.context_lens if tables is None else tables,
            plan.query_starts,
            plan.context_lens,
            shape.scale,
            q.stride(0),
            q.stride(1),
            out.stride(0),
            out.stride(1),
            keys.stride(-3),
            keys.stride(-2),
            keys.stride(0),
            0 if tables is None else tables.stride(0),
            block_size=1 if tables is None else keys.shape[1],
            group=group,
            head_dim=shape.head_dim,
            padded_dim=max(_LEAST_ROWS, _power_of_two(shape.head_dim)),
            tile_rows=rows,
            tile_keys=_TILE_KEYS,
            paged=tables is not None,
            causal=shape.causal,
            window=shape.window or 0,
            softcap=shape.softcap or 0.0,
            **_LAUNCH,
        )
        return out

    def _decode(
        self,
        shape: AttentionShape,
        q: torch.Tensor,
        keys: torch.Tensor,
        values: torch.Tensor,
        tables: torch.Tensor,
        plan: PagedPlan,
    ) -> torch.Tensor:
        out = torch.empty_like(q)
        num_seqs, group = len(plan.context_lens), shape.num_heads // shape.num_kv_heads
        splits = num_splits(num_seqs * shape.num_kv_heads, min(plan.max_context_len, shape.window or 2**31))
        parts = torch.empty(num_seqs, shape.num_heads, splits, shape.head_dim, dtype=torch.float32, device=q.device)
        norms = torch.empty(num_seqs, shape.num_heads, splits, dtype=torch.float32, device=q.device)
        padded_dim = max(_LEAST_ROWS, _power_of_two(shape.head_dim))
        self._kernels.attend_decode[(num_seqs, shape.num_kv_heads, splits)](
            parts,
            norms,
            q,
            keys,
            values,
            tables,
            plan.context_lens,
            shape.scale,
            q.stride(0),
            q.stride(1),
            keys.stride(1),
            keys.stride(2),
            keys.stride(0),
            tables.stride(0),
            shape.num_heads,
            block_size=keys.shape[1],
            group=group,
            head_dim=shape.head_dim,
            padded_dim=padded_dim,
            tile_rows=max(_LEAST_ROWS, _power_of_two(group)),
            tile_keys=_TILE_KEYS,
            num_splits=splits,
            window=shape.window or 0,
            softcap=shape.softcap or 0.0,
            **_LAUNCH,
        )
        self._kernels.merge_parts[(num_seqs, shape.num_heads)](
            out,
            parts,
            norms,
            out.stride(0),
            out.stride(1),
            shape.num_heads,
            head_dim=shape.head_dim,
            padded_dim=padded_dim,
            num_splits=splits,
            padded_splits=_power_of_two(splits),
        )
        return out


def num_splits(num_programs: int, max_context_len: int) -> int:
    """Into how many parts a context is cut, so that a few sequences keep a whole GPU busy. A power of two."""
    wanted = -(-PROGRAMS_WANTED // num_programs)
    useful = -(-max_context_len // KEYS_A_SPLIT)
    return min(MAX_SPLITS, _power_of_two(max(1, min(wanted, useful))))


def _power_of_two(num: int) -> int:
    """The smallest one that is not less."""
    return 1 << (num - 1).bit_length()
