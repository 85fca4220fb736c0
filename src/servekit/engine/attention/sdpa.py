"""Paged, ragged attention through torch's scaled_dot_product_attention: the backend for CPUs and for any other device.

SDPA knows neither pages nor ragged batches. So sequences of alike length are padded into groups (groups.py) and each
group is one call a layer: its blocks gathered by one indexed read, its mask made once a step. Decodes fold the query
heads that share a KV head into the query length, which needs no copy of the keys.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
from torch.nn.functional import scaled_dot_product_attention

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.attention.groups import Group, group_rows
from servekit.engine.batch import Batch
from servekit.engine.spec.attention import AttentionShape

_PRODUCT_KEYS = range(32, 257)
"""Keys for which two bfloat16 matrix products are faster on a CPU than its fused kernel: 0.39 ms and 0.54 for 12 heads
of 32 and 128 keys on a Zen 4 core. In float32 they are not."""


@dataclass(slots=True)
class GroupPlan:
    """One padded group of S sequences, Q queries and C keys each.

    `tokens` selects its rows of q: a slice where they lie side by side and need no padding (sparing copies), else an
    index [S * Q] in which padding repeats the last token. `kept` selects the real ones of S * Q; None when all are.
    `blocks` [S * M] are the pages to gather; None when all keys are in the step itself.
    """

    num_seqs: int
    query_len: int
    context_len: int
    tokens: slice | torch.Tensor
    kept: torch.Tensor | None
    blocks: torch.Tensor | None
    first_positions: torch.Tensor  # [S, 1] position of the first query
    context_lens: torch.Tensor  # [S, 1] keys of each sequence, without padding
    is_one_whole_prefill: bool
    is_padded: bool
    masks: dict[tuple[int | None, bool], torch.Tensor | None] = field(default_factory=dict)

    def mask(self, shape: AttentionShape, dtype: torch.dtype, bias: torch.Tensor | None = None) -> torch.Tensor | None:
        """Additive mask [S, 1, Q, C]: 0 where a query may look, -inf elsewhere; None where all may look everywhere.

        With `bias` it is [S, H, Q, C] and holds that as well. Made once for each window and direction.
        """
        key = (shape.window, shape.causal)
        if key not in self.masks:
            self.masks[key] = self._make_mask(shape, dtype, bias)
        return self.masks[key]

    def _make_mask(self, shape: AttentionShape, dtype: torch.dtype, bias: torch.Tensor | None) -> torch.Tensor | None:
        window, device = shape.window, self.first_positions.device
        key = torch.arange(self.context_len, device=device)
        query = (self.first_positions + torch.arange(self.query_len, device=device)).unsqueeze(-1)  # [S, Q, 1]
        if shape.causal:
            hidden = key > query if window is None else (key > query) | (key <= query - window)
        else:
            if window is not None and window >= self.context_len:
                window = None
            if not self.is_padded and window is None and bias is None:
                return None
            hidden = (key >= self.context_lens).unsqueeze(1)  # [S, 1, C]
            if window is not None:
                hidden = hidden | ((key - query).abs() >= window)
        mask = torch.zeros(hidden.shape, dtype=dtype, device=device).masked_fill_(hidden, float("-inf")).unsqueeze(1)
        if bias is None:
            return mask
        places = torch.arange(self.query_len, device=device).unsqueeze(1)
        return mask + bias[:, key - places + bias.shape[1] // 2].to(dtype)


class SdpaAttention(AttentionBackend[list[GroupPlan]]):
    """Any dtype, window and softcap. Blocks of 16 tokens: gathering gains nothing from larger ones."""

    name = "sdpa"

    @classmethod
    def unsupported(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> list[str]:
        """It does everything; a softcap takes the plain formula instead of the fused kernel."""
        return []

    def plan(self, batch: Batch) -> list[GroupPlan]:
        """The groups with their indices; masks follow when a layer first asks for its window."""
        return [_plan_group(group, batch) for group in group_rows(batch.query_lens, batch.context_lens)]

    def forward(
        self,
        shape: AttentionShape,
        q: torch.Tensor,
        kv: torch.Tensor,
        cache: torch.Tensor | None,
        plan: list[GroupPlan],
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.forward."""
        if len(plan) == 1 and isinstance(plan[0].tokens, slice):
            return _attend(shape, q, kv, cache, plan[0], bias)
        out = torch.empty_like(q)
        for group in plan:
            attended = _attend(shape, q[group.tokens], kv, cache, group, bias)
            if group.kept is None:
                out[group.tokens] = attended
            else:
                assert isinstance(group.tokens, torch.Tensor)
                out[group.tokens[group.kept]] = attended[group.kept]
        return out


def _plan_group(group: Group, batch: Batch) -> GroupPlan:
    device = batch.input_ids.device
    rows = np.array(group.rows)
    query_lens, context_lens = batch.query_lens[rows], batch.context_lens[rows]
    starts = batch.cu_seqlens_q[rows]
    is_padded = bool((query_lens != group.query_len).any())
    tokens: slice | torch.Tensor
    kept = None
    if not is_padded and bool((np.diff(starts) == group.query_len).all()):
        tokens = slice(int(starts[0]), int(starts[-1]) + group.query_len)
    else:
        offsets = np.arange(group.query_len)
        index = starts[:, None] + np.minimum(offsets, query_lens[:, None] - 1)
        tokens = torch.from_numpy(index.ravel()).to(device)
        if is_padded:
            kept = torch.from_numpy(np.flatnonzero((offsets < query_lens[:, None]).ravel())).to(device)

    # Sequences that start at position 0 have all their keys in the step itself: no pages are read for them.
    is_whole = bool((query_lens == context_lens).all())
    blocks, context_len = None, group.context_len
    if not is_whole:
        assert batch.block_tables is not None, "without a KV cache every context is in the batch"
        num_blocks = -(-group.context_len // batch.block_size)
        blocks = batch.block_tables[torch.from_numpy(rows).to(device), :num_blocks].flatten()
        context_len = num_blocks * batch.block_size
    return GroupPlan(
        num_seqs=len(rows),
        query_len=group.query_len,
        context_len=context_len,
        tokens=tokens,
        kept=kept,
        blocks=blocks,
        first_positions=torch.from_numpy(context_lens - query_lens).to(device).unsqueeze(1),
        context_lens=torch.from_numpy(context_lens).to(device).unsqueeze(1),
        is_padded=is_padded,
        is_one_whole_prefill=is_whole and len(rows) == 1,
    )


def _attend(
    shape: AttentionShape,
    q: torch.Tensor,
    kv: torch.Tensor,
    cache: torch.Tensor | None,
    group: GroupPlan,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """q [S * Q, H, D] -> [S * Q, H, D]."""
    num_seqs, num_queries, kv_heads, head_dim = group.num_seqs, group.query_len, shape.num_kv_heads, shape.head_dim
    if group.blocks is None:
        paged = kv[group.tokens]
    else:
        assert cache is not None, "a context outside the step needs the KV cache"
        paged = cache.index_select(0, group.blocks)
    paged = paged.view(num_seqs, group.context_len, 2, kv_heads, head_dim).to(q.dtype)
    keys, values = paged[:, :, 0].transpose(1, 2), paged[:, :, 1].transpose(1, 2)  # [S, K, C, D]

    if shape.softcap is not None:
        return _attend_softcapped(shape, q, keys, values, group)
    if num_queries == 1:
        folded = q.view(num_seqs, kv_heads, shape.num_heads // kv_heads, head_dim)
        mask = group.mask(shape, q.dtype, bias)
        out = scaled_dot_product_attention(folded, keys, values, attn_mask=mask, scale=shape.scale)
        return out.reshape(num_seqs, shape.num_heads, head_dim)
    queries = q.view(num_seqs, num_queries, shape.num_heads, head_dim).transpose(1, 2)  # [S, H, Q, D]
    if _takes_products(shape, q, group):
        return _attend_by_products(shape, queries, keys, values, group.mask(shape, q.dtype, bias))
    causal = shape.causal and group.is_one_whole_prefill and (shape.window is None or shape.window >= group.context_len)
    out = scaled_dot_product_attention(
        queries,
        keys,
        values,
        attn_mask=None if causal else group.mask(shape, q.dtype, bias),
        is_causal=causal,
        scale=shape.scale,
        enable_gqa=True,
    )
    return out.transpose(1, 2).reshape(-1, shape.num_heads, head_dim)


def _takes_products(shape: AttentionShape, q: torch.Tensor, group: GroupPlan) -> bool:
    return (
        not shape.causal
        and shape.num_heads == shape.num_kv_heads
        and q.dtype == torch.bfloat16
        and q.device.type == "cpu"
        and group.context_len in _PRODUCT_KEYS
    )


def _attend_by_products(
    shape: AttentionShape, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor | None
) -> torch.Tensor:
    """All heads [S, H, ., D] as one batch of matrices."""
    num_seqs, num_heads, num_queries, head_dim = queries.shape
    q, k, v = (heads.reshape(num_seqs * num_heads, -1, head_dim) for heads in (queries, keys, values))
    scores = torch.baddbmm(q.new_empty(1), q, k.transpose(1, 2), beta=0, alpha=shape.scale)  # [S * H, Q, C]
    if mask is not None:
        scores.view(num_seqs, num_heads, num_queries, -1).add_(mask)
    out = torch.bmm(scores.softmax(dim=-1), v).view(num_seqs, num_heads, num_queries, head_dim)
    return out.transpose(1, 2).reshape(-1, num_heads, head_dim)


def _attend_softcapped(
    shape: AttentionShape, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, group: GroupPlan
) -> torch.Tensor:
    """The same by matrix products, since the fused kernel has no place for the cap."""
    heads = (group.num_seqs, group.query_len, shape.num_kv_heads, -1, shape.head_dim)
    queries = q.view(heads).permute(0, 2, 3, 1, 4)  # [S, K, G, Q, D]
    scores = queries @ keys.unsqueeze(2).transpose(-1, -2) * shape.scale  # [S, K, G, Q, C]
    assert shape.softcap is not None
    scores = shape.softcap * torch.tanh(scores / shape.softcap)
    mask = group.mask(shape, q.dtype)
    if mask is not None:
        scores = scores + mask.unsqueeze(1)
    out = scores.softmax(dim=-1, dtype=torch.float32).to(q.dtype) @ values.unsqueeze(2)
    return out.permute(0, 3, 1, 2, 4).reshape(-1, shape.num_heads, shape.head_dim)
