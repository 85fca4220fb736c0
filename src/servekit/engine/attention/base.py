"""The attention seam. A backend says what it cannot do, plans once a step, and then runs once a layer."""

from abc import ABC, abstractmethod
from typing import Generic, TypeVar

import torch

from servekit.engine.batch import Batch
from servekit.engine.spec.attention import AttentionShape

PlanT = TypeVar("PlanT")


class AttentionBackend(ABC, Generic[PlanT]):
    """Attention over a ragged batch.

    `block_size_multiple` is what the block size must be divisible by; `default_block_size` what it does best with.
    `is_capturable`: it plans from the batch's tensors and `longest` alone, so that a recorded step serves any batch of
    its size.
    """

    name: str
    is_capturable: bool = False
    block_size_multiple: int = 1
    default_block_size: int = 16

    @classmethod
    @abstractmethod
    def unsupported(cls, shape: AttentionShape, dtype: torch.dtype, device: torch.device) -> list[str]:
        """Why this backend cannot serve such a layer; empty when it can."""

    @abstractmethod
    def plan(self, batch: Batch) -> PlanT:
        """What all layers of a step share: masks, gather indices, groups."""

    @abstractmethod
    def forward(
        self,
        shape: AttentionShape,
        q: torch.Tensor,
        kv: torch.Tensor,
        cache: torch.Tensor | None,
        plan: PlanT,
        bias: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """`q` [T, H, D] and this step's `kv` [T, 2 * K, D] (keys first) -> [T, H, D].

        `cache` [num_blocks, block_size, 2, K, D] already holds this step's kv; None when the batch has no KV cache.
        `bias` [H, 2 * P - 1] is added to scaled scores by distance: column key - query + P - 1. It comes without a
        cache and without a softcap, and is the same for all layers of a step.
        """


def visible(
    context_len: int, query_len: int, window: int | None, device: torch.device, *, causal: bool = True
) -> torch.Tensor:
    """The mask `[query_len, context_len]` of one sequence: True where a query may look.

    Lower-right aligned: the last query sees the whole context, however many tokens were cached before it.
    """
    query = torch.arange(context_len - query_len, context_len, device=device).unsqueeze(1)
    key = torch.arange(context_len, device=device).unsqueeze(0)
    if not causal:
        return (
            torch.ones(query_len, context_len, dtype=torch.bool, device=device)
            if window is None
            else ((key - query).abs() < window)
        )
    mask = key <= query
    return mask if window is None else mask & (key > query - window)
