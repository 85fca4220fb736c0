"""Bits a weight takes in each format, scales included, and which parts of a model a checkpoint leaves alone.

It must not know parameter counts. Sources: the formats' own definitions (GPTQ, AWQ, OCP MX, bitsandbytes, ggml).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from fractions import Fraction
from types import MappingProxyType
from typing import Final

from servekit.errors import ConfigError
from servekit.kvcalc.fields import Fields, describe

# One module of a middle layer stands for each part when a skip list is asked.
_MODULES: Final = MappingProxyType(
    {
        "embedding": "model.embed_tokens",
        "lm_head": "lm_head",
        "attention": "model.layers.{}.self_attn.q_proj",
        "recurrent": "model.layers.{}.linear_attn.in_proj",
        "mlp": "model.layers.{}.mlp.down_proj",
        "experts": "model.layers.{}.mlp.experts.0.down_proj",
        "shared_experts": "model.layers.{}.mlp.shared_experts.down_proj",
        "router": "model.layers.{}.mlp.router",
        "vision": "model.vision_tower.layers.0.fc1",
    }
)
_NEVER: Final = frozenset({"embedding", "lm_head", "router", "norms", "vision"})
_SKIP_LISTS: Final = ("modules_to_not_convert", "ignore", "exclude_modules", "ignored_layers")


class UnknownFormatError(ConfigError):
    """A quantisation that is not known: the weights' size stays unknown, keys and values do not depend on it."""


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """`bits` a weight, scales included. `covers_all`: embedding and head too, as floats and GGUF files do."""

    name: str
    bits: Fraction
    covers_all: bool = False


WEIGHT_FORMATS: Final[Mapping[str, WeightFormat]] = MappingProxyType(
    {
        "fp32": WeightFormat("float32", Fraction(32), True),
        "bf16": WeightFormat("bfloat16", Fraction(16), True),
        "fp16": WeightFormat("float16", Fraction(16), True),
        "float32": WeightFormat("float32", Fraction(32), True),
        "bfloat16": WeightFormat("bfloat16", Fraction(16), True),
        "float16": WeightFormat("float16", Fraction(16), True),
        "fp8": WeightFormat("fp8", Fraction(8)),
        "int8": WeightFormat("int8", Fraction(8)),
        "int4": WeightFormat("int4", 4 + Fraction(16 + 4, 128)),
        "nf4": WeightFormat("nf4", Fraction(9, 2)),
        "mxfp4": WeightFormat("mxfp4", Fraction(17, 4)),
        "nvfp4": WeightFormat("nvfp4", Fraction(9, 2)),
        "q8_0": WeightFormat("q8_0", Fraction(17, 2), True),
        "q4_0": WeightFormat("q4_0", Fraction(9, 2), True),
    }
)


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint stores each part: `formats` for quantised parts, `base` for the others."""

    base: WeightFormat
    formats: Mapping[str, WeightFormat]

    @property
    def name(self) -> str:
        """The formats in use, for one line."""
        return ", ".join(dict.fromkeys([*(form.name for form in self.formats.values()), self.base.name]))

    def bits(self, part: str) -> Fraction:
        """Bits of one weight of a part."""
        return self.formats.get(part, self.base).bits


def uniform(name: str, dtype: str, parts: Mapping[str, int]) -> Quantization:
    """The format a user asks for. Raises ConfigError for an unknown name."""
    form = WEIGHT_FORMATS.get(name)
    if form is None:
        raise ConfigError(
            f"unknown weights dtype {name!r}", hint="known are " + ", ".join(WEIGHT_FORMATS), param="weights_dtype"
        )
    if form.covers_all and form.bits >= 16:
        return Quantization(form, {})
    kept = frozenset({"norms"}) if form.covers_all else _NEVER
    return Quantization(WEIGHT_FORMATS[dtype], {part: form for part in parts if part not in kept})


def declared(
    levels: tuple[Fields, ...], dtype: str, parts: Mapping[str, int], *, hidden: int, num_layers: int
) -> Quantization:
    """What `quantization_config` says, or the plain dtype. Raises UnknownFormatError for an unknown method."""
    base = WEIGHT_FORMATS[dtype]
    config = next((found for level in levels if (found := level.sub("quantization_config")) is not None), None)
    if config is None:
        return Quantization(base, {})
    form = _method(config, hidden)
    skips = [item for name in _SKIP_LISTS for item in config.texts(name) or []]
    never = _NEVER - {"lm_head"} if config.flag("lm_head", default=False) else _NEVER
    formats = {part: form for part in parts if part not in never and not _is_skipped(part, skips, num_layers // 2)}
    expert = next((text for level in levels if (text := level.text("expert_dtype")) is not None), None)
    if expert == "fp4" and "experts" in formats:
        formats["experts"] = WEIGHT_FORMATS["mxfp4"]
    return Quantization(base, formats)


def _method(config: Fields, hidden: int) -> WeightFormat:
    method = config.text("quant_method") or ("modelopt" if config.has("quant_algo") else None)
    match method:
        case "gptq" | "awq" | "auto-round" | "gptq_marlin" | "awq_marlin":
            return _grouped(config, hidden)
        case "fp8" | "fbgemm_fp8":
            return WeightFormat("fp8", 8 + _block_scale(config))
        case "mxfp4":
            return WEIGHT_FORMATS["mxfp4"]
        case "bitsandbytes":
            return _bitsandbytes(config)
        case "compressed-tensors":
            return _compressed(config)
        case "modelopt":
            return _modelopt(config)
    raise UnknownFormatError(f"config.json field {config.prefix}quant_method is {describe(method)}, which is not known")


def _grouped(config: Fields, hidden: int) -> WeightFormat:
    bits = config.integer("bits", "w_bit", high=16)
    group = config.optional_integer("group_size", "q_group_size", low=-1)
    group = hidden if group is None or group <= 0 else group
    rows = Fraction(32, hidden) if config.flag("desc_act", default=False) else Fraction(0)
    return WeightFormat(f"{config.text('quant_method')} {bits} bit", bits + Fraction(16 + bits, group) + rows)


def _block_scale(config: Fields) -> Fraction:
    block = config.ints("weight_block_size", low=1)
    return Fraction(32, block[0] * block[1]) if block and len(block) == 2 else Fraction(0)


def _bitsandbytes(config: Fields) -> WeightFormat:
    if not config.flag("load_in_4bit", default=False):
        return WeightFormat("bitsandbytes 8 bit", Fraction(8))
    double = config.flag("bnb_4bit_use_double_quant", default=False)
    # Double quantisation keeps the fp32 scale of 64 weights in 8 bits, with one fp32 scale for 256 of those.
    scale = Fraction(8, 64) + Fraction(32, 64 * 256) if double else Fraction(32, 64)
    return WeightFormat("nf4", 4 + scale)


def _compressed(config: Fields) -> WeightFormat:
    groups = config.sub("config_groups")
    for name in groups.values if groups else ():
        group = groups.sub(name) if groups else None
        weights = group.sub("weights") if group else None
        if weights is None:
            continue
        bits = weights.integer("num_bits", high=16)
        form = f"{config.text('format') or ''} {(group.text('format') if group else None) or ''}"
        size = weights.optional_integer("group_size", low=-1)
        if "mxfp4" in form or "nvfp4" in form:
            return WEIGHT_FORMATS["mxfp4" if "mxfp4" in form else "nvfp4"]
        block = (
            weights.ints("block_structure", low=1) if isinstance(weights.values.get("block_structure"), list) else None
        )
        scale = Fraction(16, size) if size and size > 0 else Fraction(0)
        if block and len(block) == 2:
            scale = Fraction(32, block[0] * block[1])
        if not weights.flag("symmetric", default=True) and size and size > 0:
            scale += Fraction(bits, size)
        return WeightFormat(f"{weights.text('type') or 'int'}{bits}", bits + scale)
    raise config.error("config_groups", "names no weights")


def _modelopt(config: Fields) -> WeightFormat:
    algorithm = (config.text("quant_algo") or "").upper()
    known = {
        "FP8": WEIGHT_FORMATS["fp8"],
        "NVFP4": WEIGHT_FORMATS["nvfp4"],
        "NVFP4_AWQ": WEIGHT_FORMATS["nvfp4"],
        "W4A16_AWQ": WEIGHT_FORMATS["int4"],
        "INT8_SQ": WEIGHT_FORMATS["int8"],
        "MXFP4": WEIGHT_FORMATS["mxfp4"],
    }
    if algorithm not in known:
        raise UnknownFormatError(f"config.json field {config.prefix}quant_algo is {describe(algorithm)}, not known")
    return known[algorithm]


def _is_skipped(part: str, skips: list[str], layer: int) -> bool:
    module = _MODULES[part].format(layer)
    return any(_matches(module, pattern) for pattern in skips)


def _matches(module: str, pattern: str) -> bool:
    if pattern.startswith("re:"):
        try:
            return re.match(pattern[3:], module) is not None
        except re.error as error:
            raise ConfigError(
                f"config.json holds the broken expression {pattern!r}: {error}", param="ignore"
            ) from error
    return pattern in module or fnmatchcase(module, f"{pattern}*")
