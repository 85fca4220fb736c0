"""The encoder: every encoder-only family, from an EncoderSpec. It must not know how its batch was put together.

Matrix products run in the compute dtype; the residual stream and the norms are float32.
"""

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.batch import Batch
from servekit.engine.layers.linear import Linear
from servekit.engine.layers.mlp import GatedMLP, PlainMLP
from servekit.engine.layers.norm import LayerNorm
from servekit.engine.layers.rope import RotaryTable, rotate
from servekit.engine.spec.attention import AttentionShape
from servekit.engine.spec.encoder import EncoderSpec


@dataclass(frozen=True, slots=True)
class EncoderLayer:
    """One block's weights. `attention_norm` is None in the first layer of families that normalise before."""

    attention: AttentionShape
    rotary: RotaryTable | None
    qkv: Linear
    output: Linear
    attention_norm: LayerNorm | None
    mlp: GatedMLP | PlainMLP
    mlp_norm: LayerNorm


@dataclass(frozen=True, slots=True)
class EncoderTables:
    """What tokens are looked up in: words [V, hidden]; positions [P, hidden] and types [N, hidden] where there are any.

    `relative_bias` [H, 2 * P - 1] is added to attention scores by distance.
    """

    words: torch.Tensor
    positions: torch.Tensor | None
    types: torch.Tensor | None
    relative_bias: torch.Tensor | None

    @property
    def nbytes(self) -> int:
        """What the embeddings occupy; the bias is too small to count."""
        return sum(table.nbytes for table in (self.words, self.positions, self.types) if table is not None)


def summed_embeddings(spec: EncoderSpec, tables: EncoderTables, batch: Batch) -> torch.Tensor:
    """What each token [T] looks up in all tables, added up, before its norm: [T, hidden] in float32."""
    lookup = torch.nn.functional.embedding
    x = lookup(batch.input_ids, tables.words).float()
    if tables.positions is not None:
        x += lookup(batch.positions + spec.position_offset, tables.positions)
    if tables.types is not None:
        # One text is all of the first type, and some families know no other.
        if batch.token_types is None or spec.num_token_types == 1:
            x += tables.types[0]
        else:
            x += lookup(batch.token_types, tables.types)
    return x


class EncoderModel(Protocol):
    """What turns texts into hidden states: an Encoder, or one that kernels of our own compute."""

    spec: EncoderSpec

    @property
    def nbytes(self) -> int: ...

    def forward(self, batch: Batch) -> torch.Tensor: ...


class Encoder:
    """Token ids in, hidden states out; a batch without KV cache is attended within itself, both ways."""

    def __init__(
        self,
        spec: EncoderSpec,
        *,
        tables: EncoderTables,
        embedding_norm: LayerNorm,
        layers: list[EncoderLayer],
        final_norm: LayerNorm | None,
        backend: AttentionBackend[Any],
        dtype: torch.dtype,
    ) -> None:
        self.spec = spec
        self._tables = tables
        self._embedding_norm = embedding_norm
        self._layers = layers
        self._final_norm = final_norm
        self._backend = backend
        self._dtype = dtype
        self._rotaries = list({id(layer.rotary): layer.rotary for layer in layers if layer.rotary}.values())

    @property
    def nbytes(self) -> int:
        """What embeddings and matrices occupy; the norms are too small to count."""
        matrices = [matrix for layer in self._layers for matrix in (layer.qkv, layer.output, *layer.mlp.matrices)]
        return self._tables.nbytes + sum(matrix.nbytes for matrix in matrices)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, hidden] of every token, in float32."""
        x = self._embedding_norm(summed_embeddings(self.spec, self._tables, batch))
        rotations = {id(rotary): rotary.at(batch.positions) for rotary in self._rotaries}
        plan = self._backend.plan(batch)
        step = self._pre_norm_layer if self.spec.pre_norm else self._post_norm_layer
        for layer in self._layers:
            x = step(layer, x, rotations.get(id(layer.rotary)), plan)
        return x if self._final_norm is None else self._final_norm(x)

    def _post_norm_layer(
        self, layer: EncoderLayer, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None, plan: Any
    ) -> torch.Tensor:
        assert layer.attention_norm is not None
        x = layer.attention_norm(x + self._attend(layer, x.to(self._dtype), rotation, plan))
        return layer.mlp_norm(x + layer.mlp(x.to(self._dtype)))

    def _pre_norm_layer(
        self, layer: EncoderLayer, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None, plan: Any
    ) -> torch.Tensor:
        normed = x if layer.attention_norm is None else layer.attention_norm(x)
        x = x + self._attend(layer, normed.to(self._dtype), rotation, plan)
        return x + layer.mlp(layer.mlp_norm(x).to(self._dtype))

    def _attend(
        self, layer: EncoderLayer, x: torch.Tensor, rotation: tuple[torch.Tensor, torch.Tensor] | None, plan: Any
    ) -> torch.Tensor:
        num_heads = self.spec.num_heads
        heads = layer.qkv(x).view(x.shape[0], 3 * num_heads, self.spec.head_dim)  # [T, 3H, D]
        q, kv = heads[:, :num_heads], heads[:, num_heads:]
        if rotation is not None:
            rotated = rotate(heads[:, : 2 * num_heads], *rotation)
            q = rotated[:, :num_heads]
            kv = torch.cat((rotated[:, num_heads:], heads[:, 2 * num_heads :]), dim=1)
        attended = self._backend.forward(layer.attention, q, kv, None, plan, self._tables.relative_bias)
        return layer.output(attended.reshape(x.shape[0], -1))
