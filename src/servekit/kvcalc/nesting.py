"""Finds the text model inside a config.json and its model type. It must not know what a family keeps."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from servekit.errors import ConfigError
from servekit.kvcalc.families import FAMILIES
from servekit.kvcalc.fields import Fields, describe

_TEXT_LEVELS: Final = ("text_config", "language_config", "llm_config", "thinker_config", "decoder")
_MAX_DEPTH: Final = 4
# The text model that a wrapper's class assumes when its text_config does not say.
_WRAPPED: Final = MappingProxyType(
    {
        "llava": "llama",
        "llava_next": "llama",
        "vipllava": "llama",
        "paligemma": "gemma",
        "mistral3": "mistral",
        "idefics2": "mistral",
        "smolvlm": "llama",
        "idefics3": "llama",
    }
)
_SUFFIXES: Final = ("_text_model", "_text", "_thinker", "_vl_text")
_ARCHITECTURES: Final = MappingProxyType(
    {"RWForCausalLM": "falcon", "DeciLMForCausalLM": "deci", "GPTBigCodeForCausalLM": "gpt_bigcode"}
)
_HEADS: Final = ("ForCausalLM", "LMHeadModel", "ForConditionalGeneration", "ForMaskedLM", "Model")


def find_text(config: Mapping[str, Any]) -> tuple[Fields, list[Fields]]:
    """The level that describes the text model, and all levels from it up to the file's own.

    Raises ConfigError when a level is not an object, or when the file is none.
    """
    if not isinstance(config, Mapping):
        raise ConfigError(f"config.json must hold an object, not {describe(config)}", param="config.json")
    levels = [Fields(config)]
    while len(levels) <= _MAX_DEPTH:
        inner = next((found for name in _TEXT_LEVELS if (found := levels[0].sub(name)) is not None), None)
        if inner is None or not inner.values:
            break
        levels.insert(0, inner)
    return levels[0], levels


def find_model_type(levels: list[Fields]) -> tuple[str | None, str]:
    """The family name of the text model, or None when the file names neither type nor architecture; and its field.

    The innermost `model_type` counts; a text_config without one takes the wrapper's. Raises ConfigError for a type that
    is not a string.
    """
    for level in levels:
        name = level.text("model_type")
        if not name:
            continue
        known = resolve(name)
        if known is None and level is not levels[0]:
            known = _WRAPPED.get(name)
        return known or name, f"{level.prefix}model_type"
    for level in levels:
        for architecture in level.texts("architectures") or []:
            guessed = from_architecture(architecture)
            if guessed is not None:
                level.note(f"model_type is absent: {guessed}, from architectures")
                return guessed, f"{level.prefix}architectures"
            return architecture, f"{level.prefix}architectures"
    return None, "model_type"


def resolve(name: str) -> str | None:
    """The family a published model type belongs to: itself, or without the suffix of a text model."""
    if name in FAMILIES:
        return name
    stems = (name[: -len(suffix)] for suffix in _SUFFIXES if name.endswith(suffix))
    return next((stem for stem in stems if stem in FAMILIES), None)


def from_architecture(name: str) -> str | None:
    """The family behind an architecture's class name: GptOssForCausalLM is gpt_oss."""
    if name in _ARCHITECTURES:
        return _ARCHITECTURES[name]
    suffix = next((suffix for suffix in _HEADS if name.endswith(suffix)), "")
    stem = name[: len(name) - len(suffix)].lower()
    return next((family for family in FAMILIES if family.replace("_", "").replace("-", "").lower() == stem), None)
