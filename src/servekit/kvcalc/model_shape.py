"""config.json -> ModelShape: what every layer of a model keeps per request. It must not know bytes or memory.

The file is read as published: nested configs, legacy spellings and class defaults included. What cannot be read with
certainty is refused by name; with `assume` it is computed and listed in `assumed`.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from servekit.kvcalc import patterns
from servekit.kvcalc.caches import Growth, Layer
from servekit.kvcalc.families import FAMILIES, Family
from servekit.kvcalc.fields import MAX_LAYERS, MAX_TOKENS, Fields, describe
from servekit.kvcalc.kinds import LAYER_TYPES, Kind
from servekit.kvcalc.known_fields import check_known_fields
from servekit.kvcalc.kv_declared import declared_kv_dtype
from servekit.kvcalc.layer_builder import build_layers
from servekit.kvcalc.nesting import find_model_type, find_text

ASSUMPTIONS: Final = ("gqa",)
_CONTEXT: Final = (
    "max_position_embeddings",
    "n_positions",
    "seq_length",
    "max_sequence_length",
    "max_seq_len",
    "n_ctx",
    "max_target_positions",
    "model_max_length",
)
_FLOATS: Final = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "half": "float16"}
# Fields that change what a layer keeps, and that are read only where model_type says how.
_TELLING: Final = (
    "is_encoder_decoder",
    "state_size",
    "mamba_d_state",
    "ssm_state_size",
    "hybrid_override_pattern",
    "linear_attn_config",
    "linear_num_value_heads",
    "full_attention_interval",
    "compress_ratios",
    "conv_L_cache",
    "lru_width",
    "index_head_dim",
    "sparse_attention_config",
    "cross_attention_layers",
    "hybrid_layer_pattern",
    "attention_chunk_size",
    "d_kv",
    "attn_config",
    "multi_query",
    "multi_query_attention",
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model as far as its memory goes.

    `dtype` is the dtype of the weights and of states: float32, bfloat16 or float16. `declared_kv_dtype` is the KV
    dtype that the checkpoint itself asks for. `max_model_len` is the context in tokens. `source_tokens` is the fixed
    number of encoder tokens (Whisper's audio, one image), None when the prompt decides. `mtp_layers` are the extra
    layers that multi-token prediction keeps, beside `layers`. `notes` say what was filled in for absent fields,
    `assumed` what was computed without being known. `text` and `root` are the two levels of the file.
    """

    model_type: str
    layers: tuple[Layer, ...]
    dtype: str
    declared_kv_dtype: str | None
    max_model_len: int | None
    source_tokens: int | None
    mtp_layers: tuple[Layer, ...]
    notes: tuple[str, ...]
    assumed: tuple[str, ...]
    text: Mapping[str, Any]
    root: Mapping[str, Any]

    def per_device(self, num_devices: int) -> "ModelShape":
        """What one of `num_devices` keeps under tensor parallelism. Raises ConfigError when heads do not divide."""
        return replace(
            self,
            layers=tuple(layer.per_device(num_devices) for layer in self.layers),
            mtp_layers=tuple(layer.per_device(num_devices) for layer in self.mtp_layers),
        )


def read_model_shape(
    config: Mapping[str, Any], *, assume: str | None = None, quantization: Mapping[str, Any] | None = None
) -> ModelShape:
    """Reads a config.json. `quantization` is the content of a hf_quant_config.json beside it.

    Raises ConfigError naming the field, for anything missing, absurd or unknown. `assume="gqa"` computes an unknown
    model or layer type as full grouped-query attention instead, and says so in `assumed`.
    """
    text, levels = find_text(config)
    check_known_fields(levels)
    model_type, field = find_model_type(levels)
    assumed: list[str] = []
    family = FAMILIES.get(model_type) if model_type is not None else _generic(text)
    if model_type is None:
        assumed.append("model_type is missing: attention layers as the other fields describe them")
    if family is None:
        if assume is None:
            raise text.error(
                field,
                f"is {describe(model_type)}, which is not known",
                hint="--assume gqa computes it as full grouped-query attention and marks the result as assumed",
            )
        assumed.append(f"{field} {describe(model_type)} is not known: full grouped-query attention on all layers")
        family = Family()
    if assume is not None:
        text = _without_unknown_layers(text, assumed)
    num_layers = _num_layers(text, family)
    layers = build_layers(text, family, num_layers)
    dtype, mtp_layers = _dtype(levels), _mtp_layers(text, layers)
    return ModelShape(
        model_type=model_type or "unknown",
        layers=layers,
        dtype=dtype,
        declared_kv_dtype=declared_kv_dtype(levels, quantization),
        max_model_len=_context(levels),
        source_tokens=_source_tokens(levels),
        mtp_layers=mtp_layers,
        notes=tuple(text.notes),
        assumed=tuple(assumed),
        text=text.values,
        root=config,
    )


def _num_layers(text: Fields, family: Family) -> int:
    number = text.optional_integer(*family.layers, high=MAX_LAYERS)
    if number is not None:
        return number
    if family.crosses and "num_decoder_layers" in family.layers:
        number = text.optional_integer("num_layers", high=MAX_LAYERS)
    for name in ("layer_types", "layers_block_type"):
        if number is None and text.has(name):
            number = len(text.texts(name) or [])
    if number is None and text.has("hybrid_override_pattern"):
        number = len(text.text("hybrid_override_pattern") or "")
    return number if number else text.integer(*family.layers, high=MAX_LAYERS)


def _generic(text: Fields) -> Family:
    """A file without model_type: read as far as its fields are the same in every family, else refused."""
    telling = next((name for name in _TELLING if text.has(name) and text.values[name] is not False), None)
    if telling is not None:
        raise text.error("model_type", f"is missing, and {telling} cannot be read without it")
    if text.has("use_sliding_window") or not text.has("sliding_window"):
        return Family(pattern=patterns.qwen_switch)
    if text.has("sliding_window_pattern"):
        return Family(pattern=patterns.nth_full(6, "sliding_window_pattern"))
    return Family(pattern=patterns.sliding_if_window)


def _without_unknown_layers(text: Fields, assumed: list[str]) -> Fields:
    values = dict(text.values)
    for name in ("layer_types", "layers_block_type"):
        names = text.texts(name)
        unknown = sorted({item for item in names or [] if item not in LAYER_TYPES})
        if names and unknown:
            assumed.append(f"{name} {', '.join(map(describe, unknown))}: full grouped-query attention")
            values[name] = [item if item in LAYER_TYPES else "full_attention" for item in names]
    return Fields(values, prefix=text.prefix, notes=text.notes)


def _dtype(levels: list[Fields]) -> str:
    for level in levels:
        for name in ("dtype", "torch_dtype"):
            declared = level.text(name)
            if declared is None or declared == "auto":
                continue
            known = _FLOATS.get(declared.removeprefix("torch."))
            if known is None:
                raise level.error(name, f"is {describe(declared)}, which is not float32, bfloat16 or float16")
            return known
    levels[0].note("torch_dtype is absent: bfloat16")
    return "bfloat16"


def _context(levels: list[Fields]) -> int | None:
    for level in levels:
        for name in _CONTEXT:
            value = level.optional_integer(name, high=MAX_TOKENS)
            if value is not None:
                return value
    return None


def _source_tokens(levels: list[Fields]) -> int | None:
    fixed = levels[0].optional_integer("max_source_positions")
    if fixed is not None:
        return fixed
    vision = levels[-1].sub("vision_config")
    if not levels[0].has("cross_attention_layers") or vision is None:
        return None
    side = vision.integer("image_size") // vision.integer("patch_size")
    return (side * side + 1) * vision.integer("max_num_tiles")


def _mtp_layers(text: Fields, layers: tuple[Layer, ...]) -> tuple[Layer, ...]:
    number = text.optional_integer("num_nextn_predict_layers", "mtp_num_hidden_layers", low=0, high=MAX_LAYERS) or 0
    growing = [layer for layer in layers if any(cache.growth is Growth.TOKENS for cache in layer.token_caches)]
    if not number or not growing or text.has("compress_ratios"):
        # DeepSeek-V4's extra layer keeps a window only, which does not grow.
        return ()
    return (Layer(Kind.FULL, growing[-1].token_caches),) * number
