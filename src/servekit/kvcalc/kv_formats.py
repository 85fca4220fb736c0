"""The formats keys and values are stored in, with all their overheads. It must not know models.

Block formats of llama.cpp pack a whole row (all heads of a token), those with hardware scales pack each head.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from servekit.errors import ConfigError
from servekit.kvcalc.caches import AttentionCache, IndexerCache, TokenCache


@dataclass(frozen=True, slots=True)
class KvFormat:
    """`block_bytes` for every `block_elements` elements, in units of a row or of one head.

    `head_scale_bytes` is added for each head, once for K and once for V.
    """

    name: str
    block_bytes: int
    block_elements: int = 1
    packs_row: bool = False
    head_scale_bytes: int = 0

    def side_bytes(self, num_heads: int, dim: int) -> int:
        """Bytes of one token's K or V: `num_heads` vectors of `dim`."""
        if dim == 0:
            return 0
        if self.packs_row:
            return -(-num_heads * dim // self.block_elements) * self.block_bytes
        return num_heads * (-(-dim // self.block_elements) * self.block_bytes + self.head_scale_bytes)


_FORMATS = (
    KvFormat("float32", 4),
    KvFormat("bfloat16", 2),
    KvFormat("float16", 2),
    KvFormat("fp8", 1),
    KvFormat("int8", 1),
    KvFormat("fp8_per_token_head", 1, head_scale_bytes=4),
    KvFormat("int8_per_token_head", 1, head_scale_bytes=4),
    KvFormat("mxfp8", 33, 32),
    KvFormat("nvfp4", 9, 16),
    KvFormat("q8_0", 34, 32, packs_row=True),
    KvFormat("q5_1", 24, 32, packs_row=True),
    KvFormat("q5_0", 22, 32, packs_row=True),
    KvFormat("q4_1", 20, 32, packs_row=True),
    KvFormat("q4_0", 18, 32, packs_row=True),
    KvFormat("iq4_nl", 18, 32, packs_row=True),
    KvFormat("fp8_ds_mla", 1),
)
_BY_NAME = {form.name: form for form in _FORMATS}

KV_DTYPES: Final[Mapping[str, KvFormat]] = MappingProxyType(
    {
        **_BY_NAME,
        "fp32": _BY_NAME["float32"],
        "f32": _BY_NAME["float32"],
        "bf16": _BY_NAME["bfloat16"],
        "fp16": _BY_NAME["float16"],
        "f16": _BY_NAME["float16"],
        "half": _BY_NAME["float16"],
        "fp8_e4m3": _BY_NAME["fp8"],
        "fp8_e5m2": _BY_NAME["fp8"],
    }
)


@dataclass(frozen=True, slots=True)
class KvDtype:
    """A KV dtype as the user names it: one format, or "q8_0/q4_0" for keys and values apart."""

    name: str
    keys: KvFormat
    values: KvFormat

    def entry_bytes(self, cache: TokenCache) -> int:
        """Bytes of one stored entry of one layer. Raises ConfigError when the format is not defined for it."""
        if isinstance(cache, IndexerCache):
            if cache.is_scaled_fp8:
                return cache.num_vectors * (cache.dim + 4 * -(-cache.dim // 128))
            return cache.num_vectors * self.keys.side_bytes(1, cache.dim)
        if self.keys.name == "fp8_ds_mla":
            return _ds_mla_bytes(cache)
        if cache.is_latent and self.keys.head_scale_bytes:
            raise ConfigError(
                f"{self.name} has a scale for each KV head, but MLA keeps one latent vector",
                hint="use fp8 or fp8_ds_mla",
                param="kv_dtype",
            )
        keys = self.keys.side_bytes(cache.num_kv_heads, cache.key_dim)
        return keys + self.values.side_bytes(cache.num_kv_heads, cache.value_dim)


def parse_kv_dtype(name: str) -> KvDtype:
    """A KV dtype by its name or alias. Raises ConfigError listing the known ones."""
    halves = name.strip().split("/")
    formats = [KV_DTYPES.get(half) for half in halves]
    if len(halves) > 2 or any(form is None for form in formats):
        raise ConfigError(
            f"unknown KV dtype {name!r}",
            hint="known are " + ", ".join(_BY_NAME) + ', or two of them as "keys/values"',
            param="kv_dtype",
        )
    found = [form for form in formats if form is not None]
    keys, values = found[0], found[-1]
    if keys is not values and "fp8_ds_mla" in (keys.name, values.name):
        raise ConfigError("fp8_ds_mla holds no separate values", param="kv_dtype")
    return KvDtype(keys.name if keys is values else f"{keys.name}/{values.name}", keys, values)


def _ds_mla_bytes(cache: AttentionCache) -> int:
    """DeepSeek's packed latent: 512 fp8 values, a fp32 scale for each 128 of them, and 64 bf16 rope values."""
    if not cache.is_latent or cache.key_dim != 576:
        raise ConfigError(
            "fp8_ds_mla is defined for an MLA latent of 512 + 64 only",
            hint="use fp8 for this model",
            param="kv_dtype",
        )
    return 512 + 512 // 128 * 4 + 64 * 2
