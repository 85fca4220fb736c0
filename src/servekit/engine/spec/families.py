"""config.json -> DecoderSpec, by `model_type`. Families are rows of data here, not files of code."""

from collections.abc import Callable, Mapping
from typing import Any

from servekit.engine.spec.decoder import Activation, DecoderSpec
from servekit.engine.spec.rope import RopeSpec, read_rope
from servekit.errors import ModelError

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


def read_decoder_spec(config: Mapping[str, Any]) -> DecoderSpec:
    """The spec of a config.json. Raises ModelError naming the field for what is missing, absurd or not offered."""
    model_type = config.get("model_type")
    family = _FAMILIES.get(model_type) if isinstance(model_type, str) else None
    if family is None:
        raise ModelError(
            f"config.json: model_type {model_type!r} is not one servekit can run",
            hint=f"it runs {', '.join(sorted(_FAMILIES))}",
        )
    return family(_Fields(config))


class _Fields:
    """Typed reads from a config.json; every refusal names the field."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"config.json: {name} must be a positive whole number, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number."""
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be a number, not {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A number, or None where the file has none or null."""
        return None if self.config.get(name) is None else self.number(name, 0.0)

    def flag(self, name: str, default: bool) -> bool:
        """A switch."""
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be true or false, not {value!r}")
        return value

    def activation(self, *names: str, default: str) -> Activation:
        """The MLP's activation under the first of `names` that is there."""
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if value not in _ACTIVATIONS:
            raise ModelError(f"config.json: {names[0]} {value!r} is not known")
        return _ACTIVATIONS[value]

    def layer_types(self) -> list[str] | None:
        """The list `layer_types`, one a layer, or None."""
        types = self.config.get("layer_types")
        if types is None:
            return None
        num_layers = self.integer("num_hidden_layers")
        known = {"full_attention", "sliding_attention"}
        if not isinstance(types, list) or len(types) != num_layers or not set(types) <= known:
            raise ModelError(
                f"config.json: layer_types must list {num_layers} of {', '.join(sorted(known))}, not {types!r}"
            )
        return types

    def refuse(self, name: str, allowed: object) -> None:
        """Raise unless the field is absent or `allowed`: a feature of the family that is not offered."""
        value = self.config.get(name)
        if value is not None and value != allowed:
            raise ModelError(f"config.json: {name} {value!r} is not offered by servekit")


def _base(fields: _Fields, family: str, **differences: Any) -> DecoderSpec:
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
    if "ropes" not in differences:
        shared["ropes"] = (read_rope(fields.config, theta_default=10_000.0),) * num_layers
    return DecoderSpec(family=family, **{**shared, **differences})


def _llama(fields: _Fields) -> DecoderSpec:
    fields.refuse("pretraining_tp", 1)
    bias = fields.flag("attention_bias", False)
    return _base(fields, "llama", qkv_bias=bias, output_bias=bias, mlp_bias=fields.flag("mlp_bias", False))


def _mistral(fields: _Fields) -> DecoderSpec:
    # Null means full attention, but a missing key means the family's default.
    window = fields.integer("sliding_window", 4096) if fields.config.get("sliding_window", 4096) is not None else None
    return _base(fields, "mistral", windows=(window,) * fields.integer("num_hidden_layers"))


def _qwen_windows(fields: _Fields) -> tuple[int | None, ...]:
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


def _qwen2(fields: _Fields) -> DecoderSpec:
    return _base(fields, "qwen2", qkv_bias=True, windows=_qwen_windows(fields))


def _qwen3(fields: _Fields) -> DecoderSpec:
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


def _gemma(fields: _Fields, family: str, **differences: Any) -> DecoderSpec:
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


def _interleaved(fields: _Fields, period: int) -> tuple[bool, ...]:
    """Which layers slide: `layer_types` when given, else all but every `period`-th."""
    types = fields.layer_types()
    if types is not None:
        return tuple(kind == "sliding_attention" for kind in types)
    return tuple((i + 1) % period != 0 for i in range(fields.integer("num_hidden_layers")))


def _gemma2(fields: _Fields) -> DecoderSpec:
    window = fields.integer("sliding_window", 4096)
    return _gemma(fields, "gemma2", windows=tuple(window if s else None for s in _interleaved(fields, 2)))


def _gemma3_text(fields: _Fields) -> DecoderSpec:
    fields.refuse("use_bidirectional_attention", False)
    window = fields.integer("sliding_window", 4096)
    slides = _interleaved(fields, fields.integer("sliding_window_pattern", 6))
    full, local = _gemma3_ropes(fields)
    return _gemma(
        fields,
        "gemma3",
        qk_norm=True,
        windows=tuple(window if s else None for s in slides),
        ropes=tuple(local if s else full for s in slides),
    )


def _gemma3_ropes(fields: _Fields) -> tuple[RopeSpec, RopeSpec]:
    """Full layers follow the scaled global embedding, sliding ones a plain one with their own base."""
    full = read_rope(fields.config, theta_default=1_000_000.0, layer_type="full_attention")
    nested = fields.config.get("rope_parameters") or {}
    if "sliding_attention" in nested:
        local = {"rope_parameters": nested["sliding_attention"]}
    else:
        local = {"rope_theta": fields.number("rope_local_base_freq", 10_000.0)}
    return full, read_rope(local, theta_default=10_000.0)


def _gemma3(fields: _Fields) -> DecoderSpec:
    """The multimodal wrapper: its text half; the vision tower is not loaded."""
    text = fields.config.get("text_config")
    if not isinstance(text, Mapping):
        raise ModelError("config.json: text_config is missing")
    return _gemma3_text(_Fields(text))


_FAMILIES: dict[str, Callable[[_Fields], DecoderSpec]] = {
    "llama": _llama,
    "mistral": _mistral,
    "qwen2": _qwen2,
    "qwen3": _qwen3,
    "gemma2": _gemma2,
    "gemma3": _gemma3,
    "gemma3_text": _gemma3_text,
}
