"""The oracle: attention as the formula is written, one sequence and one head group at a time. Slow and obvious."""

import torch

from servekit.engine.attention.base import AttentionBackend, visible
from servekit.engine.batch import Batch
from servekit.engine.spec.attention import AttentionShape


class ReferenceAttention(AttentionBackend[Batch]):
    """softmax(q k^T scale) v in float32, by a loop. Other backends are tested against it."""

    name = "reference"

    @classmethod
    def unsupported(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> list[str]:
        """It does everything."""
        return []

    def plan(self, batch: Batch) -> Batch:
        """Nothing to prepare."""
        return batch

    def forward(
        self,
        shape: AttentionShape,
        q: torch.Tensor,
        kv: torch.Tensor,
        cache: torch.Tensor | None,
        plan: Batch,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """See AttentionBackend.forward."""
        out = torch.empty_like(q)
        starts = plan.cu_seqlens_q.tolist()
        for row, context_len in enumerate(plan.context_lens.tolist()):
            tokens = slice(starts[row], starts[row + 1])
            if cache is None or plan.block_tables is None:
                keys, values = kv[tokens].chunk(2, dim=1)
            else:
                blocks = cache[plan.block_tables[row]]  # [M, block_size, 2, K, D]
                keys, values = blocks.flatten(0, 1)[:context_len].unbind(1)
            out[tokens] = self._attend(shape, q[tokens], keys, values, bias).to(q.dtype)
        return out

    @staticmethod
    def _attend(
        shape: AttentionShape, q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """q [n, H, D], keys and values [context, K, D] -> [n, H, D] in float32."""
        group = shape.num_heads // shape.num_kv_heads
        k = keys.float().repeat_interleave(group, dim=1).transpose(0, 1)  # [H, context, D]
        v = values.float().repeat_interleave(group, dim=1).transpose(0, 1)
        scores = q.float().transpose(0, 1) @ k.transpose(1, 2) * shape.scale  # [H, n, context]
        if shape.softcap is not None:
            scores = shape.softcap * torch.tanh(scores / shape.softcap)
        if bias is not None:
            places = torch.arange(k.shape[1], device=q.device)
            scores = scores + bias[:, places - places.unsqueeze(1) + bias.shape[1] // 2]
        mask = visible(k.shape[1], q.shape[0], shape.window, q.device, causal=shape.causal)
        return (scores.masked_fill(~mask, float("-inf")).softmax(dim=-1) @ v).transpose(0, 1)
