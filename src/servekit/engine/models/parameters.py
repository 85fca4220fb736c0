"""Which tensors a decoder needs, by their names in transformers' checkpoints, and whether a checkpoint has just those.

Only names and shapes are compared, so a broken checkpoint is refused before anything large is read.
"""

import re
from collections.abc import Mapping

from servekit.engine.spec.decoder import DecoderSpec
from servekit.errors import ModelError

Shape = tuple[int, ...]

_PREFIXES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
_BARE = ("layers.", "embed_tokens.", "norm.")
_IGNORED = re.compile(
    r"(vision_tower|model\.vision_tower|multi_modal_projector|model\.multi_modal_projector)\."
    r"|.*\.rotary_emb\.inv_freq$"
)
"""Vision halves of multimodal checkpoints (text is served), and rotary tables that old exports stored."""
_LISTED = 6


def canonical_name(name: str) -> str | None:
    """A checkpoint's tensor name as plain text models spell it; None for a tensor that is not part of the decoder."""
    if _IGNORED.match(name):
        return None
    for prefix, plain in _PREFIXES:
        if name.startswith(prefix):
            return plain + name.removeprefix(prefix)
    # A model saved without its head has no `model.` before its names.
    return f"model.{name}" if name.startswith(_BARE) else name


def expected_parameters(spec: DecoderSpec) -> dict[str, Shape]:
    """Every tensor of the decoder with its shape; weight matrices are [out, in]."""
    hidden, mlp, q, kv = spec.hidden_size, spec.intermediate_size, spec.q_size, spec.kv_size
    shapes: dict[str, Shape] = {"model.embed_tokens.weight": (spec.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not spec.tie_embeddings:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}."
        projections = (
            ("self_attn.q_proj", q, hidden, spec.qkv_bias),
            ("self_attn.k_proj", kv, hidden, spec.qkv_bias),
            ("self_attn.v_proj", kv, hidden, spec.qkv_bias),
            ("self_attn.o_proj", hidden, q, spec.output_bias),
            ("mlp.gate_proj", mlp, hidden, spec.mlp_bias),
            ("mlp.up_proj", mlp, hidden, spec.mlp_bias),
            ("mlp.down_proj", hidden, mlp, spec.mlp_bias),
        )
        for name, size_out, size_in, has_bias in projections:
            shapes[f"{layer}{name}.weight"] = (size_out, size_in)
            if has_bias:
                shapes[f"{layer}{name}.bias"] = (size_out,)
        norms = ["input_layernorm", "post_attention_layernorm"]
        if spec.post_norms:
            norms += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
        shapes.update({f"{layer}{name}.weight": (hidden,) for name in norms})
        if spec.qk_norm:
            shapes.update({f"{layer}self_attn.{name}.weight": (spec.head_dim,) for name in ("q_norm", "k_norm")})
    return shapes


def check_parameters(spec: DecoderSpec, found: Mapping[str, Shape]) -> list[str]:
    """Compare a checkpoint's tensors (names as in the file) with what `spec` needs, and return warnings.

    Raises ModelError listing what is missing, left over or of another shape.
    """
    expected = expected_parameters(spec)
    present = {plain: shape for name, shape in found.items() if (plain := canonical_name(name)) is not None}
    warnings = []
    if spec.tie_embeddings and present.pop("lm_head.weight", None) is not None:
        warnings.append("config.json ties the head to the embeddings, so the checkpoint's lm_head.weight is not used")
    problems = listed_problems(expected, present)
    if problems:
        raise ModelError(
            f"the checkpoint does not fit its config.json: {'; '.join(problems)}",
            hint="the download may be incomplete, or the files belong to different models",
        )
    return warnings


def listed_problems(expected: Mapping[str, Shape], present: Mapping[str, Shape]) -> list[str]:
    """What of `present` differs from `expected`, in words; empty when nothing does."""
    return [
        *_listed("missing", [name for name in expected if name not in present]),
        *_listed("not known", [name for name in present if name not in expected]),
        *_listed(
            "of the wrong shape",
            [f"{n} is {list(present[n])}, not {list(s)}" for n, s in expected.items() if present.get(n, s) != s],
        ),
    ]


def _listed(what: str, names: list[str]) -> list[str]:
    if not names:
        return []
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return [f"{len(names)} tensors {what} ({', '.join(names[:_LISTED])}{more})"]
