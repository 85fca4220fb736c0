"""Puts an encoder together from a spec and a checkpoint. Every expected tensor is taken once; nothing else is read."""

from typing import Any

import torch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.layers.linear import LinearFormat
from servekit.engine.layers.mlp import GatedMLP, PlainMLP
from servekit.engine.layers.norm import LayerNorm
from servekit.engine.layers.relative_bias import relative_bias
from servekit.engine.layers.rope import RotaryTable
from servekit.engine.models.encoder import Encoder, EncoderLayer, EncoderTables
from servekit.engine.models.encoder_parameters import canonical_names
from servekit.engine.models.pair_classifier import PairClassifier
from servekit.engine.models.parts import Parts
from servekit.engine.models.weights import WeightSource
from servekit.engine.spec.attention import AttentionShape
from servekit.engine.spec.encoder import EncoderSpec
from servekit.engine.spec.rope import RopeSpec


def encoder_attention_shapes(spec: EncoderSpec) -> list[AttentionShape]:
    """What each layer asks of the attention backend."""
    return [
        AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_heads,
            head_dim=spec.head_dim,
            scale=spec.head_dim**-0.5,
            window=window,
            causal=False,
            has_bias=bool(spec.num_relative_buckets),
        )
        for window in spec.windows
    ]


def build_encoder(
    spec: EncoderSpec,
    source: WeightSource,
    *,
    linear: LinearFormat,
    backend: AttentionBackend[Any],
    dtype: torch.dtype,
    device: torch.device,
    max_positions: int,
) -> Encoder:
    """The encoder with its weights on `device`. `check_encoder_parameters` has passed, so every name is there."""
    parts = Parts(source, canonical_names(spec, source.shapes()), linear, dtype, device)
    builder = _Builder(spec, parts)
    rotaries: dict[RopeSpec, RotaryTable] = {}
    for rope in spec.ropes:
        if rope is not None and rope not in rotaries:
            rotaries[rope] = RotaryTable(rope, spec.head_dim, max_positions, device=device)
    layers = [
        builder.layer(index, shape, rotaries[rope] if rope is not None else None)
        for index, (shape, rope) in enumerate(zip(encoder_attention_shapes(spec), spec.ropes, strict=True))
    ]
    names = spec.names
    return Encoder(
        spec,
        tables=encoder_tables(spec, parts, max_positions),
        embedding_norm=builder.norm(names.embedding_norm),
        layers=layers,
        final_norm=builder.norm(names.final_norm) if spec.pre_norm else None,
        backend=backend,
        dtype=dtype,
    )


def encoder_tables(spec: EncoderSpec, parts: Parts, max_positions: int) -> EncoderTables:
    """What tokens of texts up to `max_positions` long are looked up in."""
    names = spec.names
    bias = parts.table(names.relative_bias) if spec.num_relative_buckets else None
    return EncoderTables(
        words=parts.table(names.word_embedding),
        positions=parts.table(names.position_embedding) if spec.num_positions else None,
        types=parts.table(names.type_embedding) if spec.num_token_types else None,
        relative_bias=None if bias is None else relative_bias(bias, max_positions),
    )


def build_classifier(
    spec: EncoderSpec, source: WeightSource, *, linear: LinearFormat, dtype: torch.dtype, device: torch.device
) -> PairClassifier:
    """The head of a cross-encoder."""
    head = spec.classifier
    assert head is not None
    parts = Parts(source, canonical_names(spec, source.shapes()), linear, dtype, device)
    builder = _Builder(spec, parts)
    return PairClassifier(
        head,
        dense=parts.linear([head.dense], has_bias=head.dense_bias),
        norm=builder.norm(head.norm) if head.norm is not None else None,
        out=parts.linear([head.out], has_bias=True),
        dtype=dtype,
    )


class _Builder:
    """Names of the checkpoint -> layers of the encoder."""

    def __init__(self, spec: EncoderSpec, parts: Parts) -> None:
        self._spec = spec
        self._parts = parts

    def layer(self, index: int, shape: AttentionShape, rotary: RotaryTable | None) -> EncoderLayer:
        """Block `index`."""
        spec, names = self._spec, self._spec.names
        layer = f"{names.layers}{index}."
        up = self._parts.linear([layer + name for name in names.up], has_bias=spec.mlp_bias)
        down = self._parts.linear([layer + names.down], has_bias=spec.mlp_bias)
        has_norm = index > 0 or not spec.pre_norm
        return EncoderLayer(
            attention=shape,
            rotary=rotary,
            qkv=self._parts.linear([layer + name for name in names.qkv], has_bias=spec.attention_bias),
            output=self._parts.linear([layer + names.output], has_bias=spec.attention_bias),
            attention_norm=self.norm(layer + names.attention_norm) if has_norm else None,
            mlp=GatedMLP(up, down, spec.activation) if spec.gated else PlainMLP(up, down, spec.activation),
            mlp_norm=self.norm(layer + names.mlp_norm),
        )

    def norm(self, name: str) -> LayerNorm:
        """The norm `name`."""
        bias = self._parts.float32(f"{name}.bias") if self._spec.norm_bias else None
        return LayerNorm(self._parts.float32(f"{name}.weight"), bias, self._spec.norm_eps)
