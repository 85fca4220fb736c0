"""Finds the KV dtype that a checkpoint declares for itself. It must not know any other field."""

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from servekit.kvcalc.fields import Fields, describe

_ALGORITHMS: Final = MappingProxyType({"FP8": "fp8", "INT8": "int8", "NVFP4": "nvfp4"})
_SCHEMES: Final = MappingProxyType({("float", 8): "fp8", ("int", 8): "int8", ("float", 4): "nvfp4"})


def declared_kv_dtype(levels: list[Fields], quantization: Mapping[str, Any] | None = None) -> str | None:
    """The KV dtype named by `quantization_config`, at either level, or by a hf_quant_config.json; None without one.

    Raises ConfigError for a declaration that is not known.
    """
    sources = [found for level in levels if (found := level.sub("quantization_config")) is not None]
    if quantization is not None:
        sources.append(Fields(quantization, prefix="hf_quant_config.json "))
    for source in sources:
        declared = _from(source) or _from(source.sub("quantization"))
        if declared is not None:
            return declared
    return None


def _from(source: Fields | None) -> str | None:
    if source is None:
        return None
    scheme = source.sub("kv_cache_scheme")
    if scheme is not None:
        key = (scheme.text("type") or "float", scheme.integer("num_bits", high=64))
        if key not in _SCHEMES:
            raise scheme.error("num_bits", f"declares an unknown KV cache scheme, {key[1]}-bit {describe(key[0])}")
        return _SCHEMES[key]
    algorithm = source.text("kv_cache_quant_algo")
    if algorithm is None or algorithm.lower() in ("none", "auto"):
        return None
    if algorithm.upper() not in _ALGORITHMS:
        raise source.error("kv_cache_quant_algo", f"is {describe(algorithm)}, which is not known")
    return _ALGORITHMS[algorithm.upper()]
