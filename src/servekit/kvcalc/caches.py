"""What one attention layer keeps per request, as element counts. It must not know config.json, bytes or dtypes.

A layer may keep several caches: Falcon-H1 keeps keys, values and a Mamba-2 state (states.py); DeepSeek-V4 keeps a
window, compressed keys and an indexer.
"""

from dataclasses import dataclass, replace
from enum import StrEnum
from fractions import Fraction

from servekit.errors import ConfigError
from servekit.kvcalc.states import StateCache


class Growth(StrEnum):
    """The term of a request's bytes that a cache belongs to: what it grows with, or that it does not."""

    TOKENS = "tokens"
    INDEXER = "indexer"
    WINDOW = "window"
    STATE = "state"
    SOURCE = "source"


@dataclass(frozen=True, slots=True)
class AttentionCache:
    """Keys and values of one layer.

    `value_dim` 0 means that the key vector serves as the value too: MLA's latent (`is_latent`) and DeepSeek-V4's
    shared vector. `window` limits the tokens kept; `compress_ratio` R keeps one entry for R tokens. `over_source`
    marks cross-attention, whose tokens are those of the encoder.
    """

    num_kv_heads: int
    key_dim: int
    value_dim: int
    window: int | None = None
    compress_ratio: int = 1
    is_latent: bool = False
    over_source: bool = False

    @property
    def growth(self) -> Growth:
        """The term this cache belongs to."""
        if self.over_source:
            return Growth.SOURCE
        return Growth.TOKENS if self.window is None else Growth.WINDOW

    def num_entries(self, num_tokens: int, block_size: int = 1) -> int:
        """Stored entries after `num_tokens` tokens (source tokens for cross-attention), in whole blocks."""
        kept = -(-num_tokens // self.compress_ratio)
        if self.window is not None:
            kept = min(kept, self.window)
        return -(-kept // block_size) * block_size

    def per_device(self, num_devices: int) -> "AttentionCache":
        """This cache on one of `num_devices`: heads divide, but never below one; a shared vector is replicated."""
        heads = self.num_kv_heads
        if num_devices == 1 or self.is_latent or heads == 1:
            return self
        if heads % num_devices and num_devices % heads:
            raise ConfigError(
                f"{heads} KV heads cannot be divided over {num_devices} devices",
                hint=f"choose a --tp that divides {heads}, or a multiple of it",
                param="tp",
            )
        return replace(self, num_kv_heads=max(1, heads // num_devices))


@dataclass(frozen=True, slots=True)
class IndexerCache:
    """The keys by which sparse attention chooses tokens: `num_vectors` of `dim` elements a token, one head.

    `is_scaled_fp8`: fp8 with one fp32 scale per 128 elements whatever the KV dtype (DeepSeek sparse attention);
    otherwise in the KV dtype. Every device keeps all of it.
    """

    dim: int
    num_vectors: int = 1
    compress_ratio: int = 1
    is_scaled_fp8: bool = False

    @property
    def growth(self) -> Growth:
        """Always the indexer's own term."""
        return Growth.INDEXER

    def num_entries(self, num_tokens: int, block_size: int = 1) -> int:
        """Stored entries after `num_tokens` tokens, in whole blocks."""
        kept = -(-num_tokens // self.compress_ratio)
        return -(-kept // block_size) * block_size


TokenCache = AttentionCache | IndexerCache


@dataclass(frozen=True, slots=True)
class Layer:
    """One block of the model: the published name of its kind, and what it keeps. A block without a cache keeps ()."""

    kind: str
    token_caches: tuple[TokenCache, ...] = ()
    state: StateCache | None = None

    def per_device(self, num_devices: int) -> "Layer":
        """What one of `num_devices` devices keeps of this layer under tensor parallelism."""
        caches = tuple(c.per_device(num_devices) if isinstance(c, AttentionCache) else c for c in self.token_caches)
        return Layer(self.kind, caches, self.state.per_device(num_devices) if self.state else None)


def entries_per_token(cache: TokenCache) -> Fraction:
    """How many entries one more token adds while the window is not full."""
    return Fraction(1, cache.compress_ratio)
