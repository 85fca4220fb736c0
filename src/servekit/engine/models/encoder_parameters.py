"""Which tensors an encoder needs, by their names in transformers' checkpoints, and whether a checkpoint has them.

Only names and shapes are compared, so a broken checkpoint is refused before anything large is read.
"""

import re
from collections.abc import Mapping

from servekit.engine.models.parameters import Shape, listed_problems
from servekit.engine.spec.encoder import EncoderSpec
from servekit.errors import ModelError

_IGNORED = re.compile(r"(.*\.)?(position_ids|token_type_ids|inv_freq)$|pooler\.|cls\.|lm_head\.|vocab_|qa_outputs\.")
"""Buffers that old exports stored, and heads of tasks that are not embedding: pooled outputs and masked words."""


def canonical_names(spec: EncoderSpec, found: Mapping[str, Shape]) -> dict[str, str]:
    """Names as the spec spells them -> names in the file. Old exports call a norm's weight gamma and its bias beta."""
    heads = set(_classifier_parameters(spec))
    names: dict[str, str] = {}
    for name in found:
        plain = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        if plain not in heads:
            prefix = next((prefix for prefix in spec.names.prefixes if plain.startswith(prefix)), "")
            plain = plain.removeprefix(prefix)
            if _IGNORED.match(plain):
                continue
        names[plain] = name
    return names


def expected_encoder_parameters(spec: EncoderSpec) -> dict[str, Shape]:
    """Every tensor of the encoder and its head with its shape; weight matrices are [out, in]."""
    hidden, names = spec.hidden_size, spec.names
    shapes: dict[str, Shape] = {f"{names.word_embedding}.weight": (spec.vocab_size, hidden)}
    if spec.num_positions:
        shapes[f"{names.position_embedding}.weight"] = (spec.num_positions, hidden)
    if spec.num_token_types:
        shapes[f"{names.type_embedding}.weight"] = (spec.num_token_types, hidden)
    if spec.num_relative_buckets:
        shapes[f"{names.relative_bias}.weight"] = (spec.num_relative_buckets, spec.num_heads)

    def norm(name: str) -> None:
        shapes[f"{name}.weight"] = (hidden,)
        if spec.norm_bias:
            shapes[f"{name}.bias"] = (hidden,)

    def linear(name: str, size_out: int, size_in: int, has_bias: bool) -> None:
        shapes[f"{name}.weight"] = (size_out, size_in)
        if has_bias:
            shapes[f"{name}.bias"] = (size_out,)

    norm(names.embedding_norm)
    for index in range(spec.num_layers):
        layer = f"{names.layers}{index}."
        for name in names.qkv:
            linear(layer + name, 3 * hidden // len(names.qkv), hidden, spec.attention_bias)
        linear(layer + names.output, hidden, hidden, spec.attention_bias)
        for name in names.up:
            linear(layer + name, spec.intermediate_size * (2 if spec.up_is_fused else 1), hidden, spec.mlp_bias)
        linear(layer + names.down, hidden, spec.intermediate_size, spec.mlp_bias)
        if index or not spec.pre_norm:
            norm(layer + names.attention_norm)
        norm(layer + names.mlp_norm)
    if spec.pre_norm:
        norm(names.final_norm)
    return shapes | _classifier_parameters(spec)


def check_encoder_parameters(spec: EncoderSpec, found: Mapping[str, Shape]) -> None:
    """Compare a checkpoint's tensors (names as in the file) with what `spec` needs.

    Raises ModelError listing what is missing, left over or of another shape.
    """
    present = {plain: found[name] for plain, name in canonical_names(spec, found).items()}
    problems = listed_problems(expected_encoder_parameters(spec), present)
    if problems:
        raise ModelError(
            f"the checkpoint does not fit its config.json: {'; '.join(problems)}",
            hint="the download may be incomplete, or the files belong to different models",
        )


def _classifier_parameters(spec: EncoderSpec) -> dict[str, Shape]:
    head, hidden = spec.classifier, spec.hidden_size
    if head is None:
        return {}
    shapes: dict[str, Shape] = {
        f"{head.dense}.weight": (hidden, hidden),
        f"{head.out}.weight": (head.num_labels, hidden),
        f"{head.out}.bias": (head.num_labels,),
    }
    if head.dense_bias:
        shapes[f"{head.dense}.bias"] = (hidden,)
    if head.norm is not None:
        shapes[f"{head.norm}.weight"] = (hidden,)
        if spec.norm_bias:
            shapes[f"{head.norm}.bias"] = (hidden,)
    return shapes
