"""config.json -> DecoderSpec, by `model_type`. Families are rows of data here, not files of code."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from servekit.engine.spec.decoder import DecoderSpec
from servekit.engine.spec.fields import Fields
from servekit.engine.spec.rope import RopeSpec, read_rope
from servekit.errors import ModelError


def read_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json. Raises ModelError naming the field for what is missing, absurd or not offered."""
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            f"config.json: model_type {model_type!r} is not one servekit can run",
            hint=f"it runs {', '.join(sorted(_FAMILIES))}",
        )
    return family(Fields(config))


def _base(fields: Fields, family: str, **differences: Any) -> DecoderSpec:
    """What all families share: Llama. `differences` are the fields in which one departs from it."""
    num_heads = fields.integer("num_attention_heads")
    hidden_size = fields.integer("hidden_size")
    num_kv_heads = fields.integer("num_key_value_heads", num_heads)
    if num_heads % num_kv_heads:
        raise ModelError(f"config.json: num_attention_heads {num_heads} is not a multiple of {num_kv_heads} KV heads")
    head_dim = fields.integer("head_dim", hidden_size // num_heads)
    if head_dim % 2:
        raise ModelError(f"config.json: head_dim {head_dim} is odd, and rotary embeddings need pairs")
    if "quantization_config" in fields.config:
        raise ModelError("config.json: quantization_config is set, and servekit reads quantised weights from GGUF only")
    num_layers = fields.integer("num_hidden_layers")
    shared: dict[str, Any] = {
        "vocab_size": fields.integer("vocab_size"),
        "hidden_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": fields.integer("max_position_embeddings", 2048),
        "norm_eps": fields.number("rms_norm_eps", 1e-6),
        "activation": fields.activation("hidden_act", default="silu"),
        "tie_embeddings": fields.flag("tie_word_embeddings", False),
        "attention_scale": head_dim**-0.5,
        "windows": (None,) * num_layers,
    }
    if fields.flag("is_causal", True) is False:
        shared["causal"] = False
    if "ropes" not in differences:
        shared["ropes"] = (read_rope(fields.config, theta_default=10_000.0),) * num_layers
    return DecoderSpec(family=family, **{**shared, **differences})


def _llama(fields: Fields) -> DecoderSpec:
    fields.refuse("pretraining_tp", 1)
    bias = fields.flag("attention_bias", False)
    return _base(fields, "llama", qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def _mistral(fields: Fields) -> DecoderSpec:
    # Null means full attention, but a missing key means the family's default.
    window = fields.integer("sliding_window", 4096) if fields.config.get("sliding_window", 4096) is not None else None
    return _base(fields, "mistral", windows=(window,) * fields.integer("num_hidden_layers"))


def _qwen_windows(fields: Fields) -> tuple[int | None, ...]:
    """Qwen 2 and 3: full attention unless `use_sliding_window`; then the first `max_window_layers` stay full."""
    num_layers = fields.integer("num_hidden_layers")
    if not fields.flag("use_sliding_window", False):
        return (None,) * num_layers
    window = fields.integer("sliding_window", 4096)
    types = fields.layer_types()
    if types is None:
        first = int(fields.number("max_window_layers", 28))
        return tuple(window if i >= first else None for i in range(num_layers))
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _qwen2(fields: Fields) -> DecoderSpec:
    return _base(fields, "qwen2", qkv_bias=True, windows=_qwen_windows(fields))


def _qwen3(fields: Fields) -> DecoderSpec:
    bias = fields.flag("attention_bias", False)
    head_dim = fields.integer("head_dim", 128)
    return _base(
        fields,
        "qwen3",
        qk_norm=True,
        qkv_bias=bias,
        output_bias=bias,
        head_dim=head_dim,
        attention_scale=head_dim**-0.5,
        windows=_qwen_windows(fields),
    )


def _gemma(fields: Fields, family: str, **differences: Any) -> DecoderSpec:
    """What Gemma 2 and 3 share: norms stored as w - 1 and on both sides, scaled embeddings, tied head."""
    bias = fields.flag("attention_bias", False)
    head_dim = fields.integer("head_dim", 256)
    return _base(
        fields,
        family,
        head_dim=head_dim,
        qkv_bias=bias,
        output_bias=bias,
        norm_offset=1.0,
        post_norms=True,
        embed_scale=float(fields.integer("hidden_size")) ** 0.5,
        tie_embeddings=fields.flag("tie_word_embeddings", True),
        activation=fields.activation("hidden_activation", "hidden_act", default="gelu_pytorch_tanh"),
        attention_scale=fields.number("query_pre_attn_scalar", 256.0) ** -0.5,
        attention_softcap=fields.optional_number("attn_logit_softcapping"),
        logits_softcap=fields.optional_number("final_logit_softcapping"),
        **differences,
    )


def _interleaved(fields: Fields, period: int) -> tuple[bool, ...]:
    """Which layers slide: `layer_types` when given, else all but every `period`-th."""
    types = fields.layer_types()
    if types is not None:
        return tuple(kind == "sliding_attention" for kind in types)
    return tuple((i + 1) % period != 0 for i in range(fields.integer("num_hidden_layers")))


def _gemma2(fields: Fields) -> DecoderSpec:
    window = fields.integer("sliding_window", 4096)
    return _gemma(fields, "gemma2", windows=tuple(window if s else None for s in _interleaved(fields, 2)))


def _gemma3_text(fields: Fields) -> DecoderSpec:
    both_ways = fields.flag("use_bidirectional_attention", False)
    window = fields.integer("sliding_window", 4096)
    if both_ways:
        # The config's window counts both sides: half of it either way, and the token itself.
        window = window // 2 + 1
    slides = _interleaved(fields, fields.integer("sliding_window_pattern", 6))
    full, local = _gemma3_ropes(fields)
    return _gemma(
        fields,
        "gemma3",
        qk_norm=True,
        windows=tuple(window if s else None for s in slides),
        ropes=tuple(local if s else full for s in slides),
        causal=not both_ways,
    )


def _gemma3_ropes(fields: Fields) -> tuple[RopeSpec, RopeSpec]:
    """Full layers follow the scaled global embedding, sliding ones a plain one with their own base."""
    full = read_rope(fields.config, theta_default=1_000_000.0, layer_type="full_attention")
    nested = fields.config.get("rope_parameters") or {}
    if "sliding_attention" in nested:
        local = {"rope_parameters": nested["sliding_attention"]}
    else:
        local = {"rope_theta": fields.number("rope_local_base_freq", 10_000.0)}
    return full, read_rope(local, theta_default=10_000.0)


def _gemma3(fields: Fields) -> DecoderSpec:
    """The multimodal wrapper: its text half; the vision tower is not loaded."""
    text = fields.config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError("config.json: text_config is missing")
    return _gemma3_text(Fields(text))


def _pplx_qwen3(fields: Fields) -> DecoderSpec:
    """Qwen 3 with the causal mask taken off, for embedding only."""
    return replace(_qwen3(fields), causal=False)


_FAMILIES: dict[str, Callable[[Fields], DecoderSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "bidirectional_pplx_qwen3": _pplx_qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
}
