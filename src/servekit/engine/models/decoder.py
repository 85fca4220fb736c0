"""The decoder: every decoder-only family, from a DecoderSpec. It must not know how its batch was scheduled.

Matrix products run in the compute dtype; the residual stream, the norms and the rotations are float32. In bfloat16 a
stream of magnitude 50 moves in steps of a quarter, and which tokens share a matrix product would decide close calls.
"""

from dataclasses import dataclass
from typing import Any

import torch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.batch import Batch
from servekit.engine.kv_cache import KvCache
from servekit.engine.layers.linear import DenseLinear, Linear
from servekit.engine.layers.mlp import GatedMLP
from servekit.engine.layers.norm import RMSNorm
from servekit.engine.layers.rope import RotaryTable, rotate
from servekit.engine.spec.attention import AttentionShape
from servekit.engine.spec.decoder import DecoderSpec


@dataclass(frozen=True, slots=True)
class DecoderLayer:
    """One block's weights. The `post_` norms exist in families with norms on both sides (Gemma 2 and 3).

    `qk_norm` holds the norm weights of q and k heads as one [H + K, D], so that one product serves both.
    """

    attention: AttentionShape
    rotary: RotaryTable
    input_norm: RMSNorm
    qkv: Linear
    qk_norm: RMSNorm | None
    output: Linear
    post_attention_norm: RMSNorm | None
    mlp_norm: RMSNorm
    mlp: GatedMLP
    post_mlp_norm: RMSNorm | None


class Decoder:
    """Token ids in, hidden states out; `logits` turns chosen rows into scores over the vocabulary."""

    def __init__(
        self,
        spec: DecoderSpec,
        *,
        embedding: torch.Tensor,
        layers: list[DecoderLayer],
        final_norm: RMSNorm,
        head: Linear | None,
        backend: AttentionBackend[Any],
    ) -> None:
        self.spec = spec
        self._embedding = embedding
        self._layers = layers
        self._final_norm = final_norm
        self._head = head
        self._backend = backend
        scale = spec.embed_scale
        # Rounded to the compute dtype first, as the families that scale were trained.
        self._embed_scale = None if scale is None else torch.tensor(scale).to(embedding.dtype).item()
        # One table serves all layers that rotate alike; keep the distinct ones, to look positions up once a step.
        self._rotaries = list({id(layer.rotary): layer.rotary for layer in layers}.values())

    def forward(self, batch: Batch, cache: KvCache | None) -> torch.Tensor:
        """Hidden states [T, hidden] of every token, normalised; keys and values are written to `cache`."""
        x = torch.nn.functional.embedding(batch.input_ids, self._embedding).float()
        if self._embed_scale is not None:
            x = x * self._embed_scale
        rotations = {id(rotary): rotary.at(batch.positions) for rotary in self._rotaries}
        plan = self._backend.plan(batch)
        for index, layer in enumerate(self._layers):
            attended = self._attend(index, layer, layer.input_norm(x), rotations[id(layer.rotary)], batch, cache, plan)
            if layer.post_attention_norm is not None:
                attended = layer.post_attention_norm(attended)
            x = x + attended
            fed = layer.mlp(layer.mlp_norm(x))
            if layer.post_mlp_norm is not None:
                fed = layer.post_mlp_norm(fed)
            x = x + fed
        return self._final_norm(x)

    @property
    def nbytes(self) -> int:
        """What embedding and matrices occupy; the norms are too small to count."""
        matrices = [matrix for layer in self._layers for matrix in (layer.qkv, layer.output, *layer.mlp.matrices)]
        shared = isinstance(self._head, DenseLinear) and self._head.weight is self._embedding
        head = 0 if shared or self._head is None else self._head.nbytes
        return self._embedding.nbytes + head + sum(matrix.nbytes for matrix in matrices)

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """`hidden` [S, hidden] -> float32 scores [S, vocab]."""
        assert self._head is not None, "this decoder was built without its head"
        scores = self._head(hidden).float()
        cap = self.spec.logits_softcap
        return scores if cap is None else cap * torch.tanh(scores / cap)

    def _attend(
        self,
        index: int,
        layer: DecoderLayer,
        x: torch.Tensor,
        rotation: tuple[torch.Tensor, torch.Tensor],
        batch: Batch,
        cache: KvCache | None,
        plan: Any,
    ) -> torch.Tensor:
        spec = self.spec
        heads = layer.qkv(x).view(batch.num_tokens, -1, spec.head_dim)  # [T, H + 2K, D]
        num_rotated = spec.num_heads + spec.num_kv_heads
        rotated = heads[:, :num_rotated]
        if layer.qk_norm is not None:
            rotated = layer.qk_norm(rotated)
        rotated = rotate(rotated, *rotation)
        q = rotated[:, : spec.num_heads]
        kv = torch.cat((rotated[:, spec.num_heads :], heads[:, num_rotated:]), dim=1)  # [T, 2K, D]
        pages = None
        if cache is not None and batch.slot_mapping is not None:
            # Through the cache's dtype always, so that a prompt computed in one piece and in chunks agree.
            stored = kv.to(cache.dtype)
            cache.write(index, stored, batch.slot_mapping)
            kv = stored.to(q.dtype)
            pages = cache.layer(index)
        attended = self._backend.forward(layer.attention, q, kv, pages, plan)
        return layer.output(attended.reshape(batch.num_tokens, -1))
