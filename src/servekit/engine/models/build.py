"""Puts a decoder together from a spec and a checkpoint. Every expected tensor is taken once; nothing else is read."""

from typing import Any

import torch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.layers.linear import DenseLinear, Linear, LinearFormat
from servekit.engine.layers.mlp import GatedMLP
from servekit.engine.layers.norm import RMSNorm
from servekit.engine.layers.rope import RotaryTable
from servekit.engine.models.decoder import Decoder, DecoderLayer
from servekit.engine.models.parameters import canonical_name
from servekit.engine.models.parts import Parts
from servekit.engine.models.weights import Progress, WeightSource
from servekit.engine.spec.attention import AttentionShape, attention_shapes
from servekit.engine.spec.decoder import DecoderSpec
from servekit.engine.spec.rope import RopeSpec


def build_decoder(
    spec: DecoderSpec,
    source: WeightSource,
    *,
    linear: LinearFormat,
    backend: AttentionBackend[Any],
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
    progress: Progress | None = None,
    with_head: bool = True,
) -> Decoder:
    """The decoder with its weights on `device`. `check_parameters` has passed, so every name is there.

    `with_head` False spares the output matrix where only hidden states are wanted.
    """
    names = {plain: name for name in source.shapes() if (plain := canonical_name(name)) is not None}
    parts = Parts(source, names, linear, dtype, device)
    builder = _Builder(spec, parts)
    rotaries: dict[RopeSpec, RotaryTable] = {}
    for rope in spec.ropes:
        if rope not in rotaries:
            rotaries[rope] = RotaryTable(rope, spec.head_dim, max_positions, device=device)
    layers = []
    for index, (shape, rope) in enumerate(zip(attention_shapes(spec), spec.ropes, strict=True)):
        layers.append(builder.layer(index, shape, rotaries[rope]))
        if progress is not None:
            progress(index + 1, spec.num_layers)
    embedding = parts.table("model.embed_tokens")
    # A tied head shares its numbers with the embedding; a format with a layout of its own still needs its own copy.
    head_name = "model.embed_tokens" if spec.tie_embeddings else "lm_head"
    head: Linear | None = None
    if with_head:
        shares = spec.tie_embeddings and linear.name == "dense"
        head = DenseLinear(embedding) if shares else parts.linear([head_name], is_head=True)
    return Decoder(
        spec,
        embedding=embedding,
        layers=layers,
        final_norm=builder.norm("model.norm"),
        head=head,
        backend=backend,
    )


class _Builder:
    """Names of the checkpoint -> layers of the decoder."""

    def __init__(self, spec: DecoderSpec, parts: Parts) -> None:
        self._spec = spec
        self._parts = parts

    def layer(self, index: int, shape: AttentionShape, rotary: RotaryTable) -> DecoderLayer:
        """Block `index`. In the families with norms on both sides, `post_attention_layernorm` is the attention's own;
        in the others it is the one before the MLP."""
        spec, name = self._spec, f"model.layers.{index}."
        both = spec.post_norms
        return DecoderLayer(
            attention=shape,
            rotary=rotary,
            input_norm=self.norm(name + "input_layernorm"),
            qkv=self._parts.linear([f"{name}self_attn.{part}_proj" for part in "qkv"], has_bias=spec.qkv_bias),
            qk_norm=self._qk_norm(name) if spec.qk_norm else None,
            output=self._parts.linear([f"{name}self_attn.o_proj"], has_bias=spec.output_bias),
            post_attention_norm=self.norm(name + "post_attention_layernorm") if both else None,
            mlp_norm=self.norm(name + ("pre_feedforward_layernorm" if both else "post_attention_layernorm")),
            mlp=GatedMLP(
                self._parts.linear([f"{name}mlp.gate_proj", f"{name}mlp.up_proj"], has_bias=spec.mlp_bias),
                self._parts.linear([f"{name}mlp.down_proj"], has_bias=spec.mlp_bias),
                spec.activation,
            ),
            post_mlp_norm=self.norm(name + "post_feedforward_layernorm") if both else None,
        )

    def norm(self, name: str) -> RMSNorm:
        """The norm `name`."""
        return RMSNorm(self._norm_weight(name), self._spec.norm_eps, self._parts.dtype)

    def _qk_norm(self, layer: str) -> RMSNorm:
        spec = self._spec
        q, k = (self._norm_weight(f"{layer}self_attn.{part}_norm") for part in "qk")
        weight = torch.cat((q.expand(spec.num_heads, -1), k.expand(spec.num_kv_heads, -1)))
        return RMSNorm(weight, spec.norm_eps, self._parts.dtype)

    def _norm_weight(self, name: str) -> torch.Tensor:
        """In float32, with the offset that the family stores its norms without."""
        return self._parts.float32(f"{name}.weight") + self._spec.norm_offset
