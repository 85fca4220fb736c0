"""Bytes of keys, values and states: the arithmetic that the calculator and the engine share. It must not know torch.

A request's bytes have five terms, never one number: growth x tokens, indexer keys x tokens, windows (capped), fixed
state, and cross-attention x source tokens.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from fractions import Fraction

from servekit.errors import ConfigError
from servekit.kvcalc.caches import AttentionCache, Growth, Layer, entries_per_token
from servekit.kvcalc.kv_formats import KV_DTYPES, KvDtype, parse_kv_dtype
from servekit.kvcalc.model_shape import ModelShape

__all__ = ["KV_DTYPES", "KvTerms", "PoolPlan", "kv_block_bytes", "kv_terms", "plan_pool", "request_bytes"]

STATE_DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class KvTerms:
    """The terms of one request's bytes. Growth and indexer are exact fractions where one entry serves many tokens."""

    bytes_per_token: Fraction
    indexer_bytes_per_token: Fraction
    window_bytes: int
    state_bytes: int
    cross_bytes_per_source_token: int


def kv_terms(shape: ModelShape, kv_dtype: KvDtype) -> KvTerms:
    """The five terms of a model in a KV dtype, over all layers."""
    rates = dict.fromkeys(Growth, Fraction(0))
    for layer in shape.layers:
        for cache in layer.token_caches:
            rate = kv_dtype.entry_bytes(cache) * entries_per_token(cache)
            window = cache.window if isinstance(cache, AttentionCache) else None
            rates[cache.growth] += rate * (window or 1)
    return KvTerms(
        bytes_per_token=rates[Growth.TOKENS],
        indexer_bytes_per_token=rates[Growth.INDEXER],
        window_bytes=int(rates[Growth.WINDOW]),
        state_bytes=sum(state_bytes(layer, shape.dtype) for layer in shape.layers),
        cross_bytes_per_source_token=int(rates[Growth.SOURCE]),
    )


def state_bytes(layer: Layer, dtype: str) -> int:
    """Bytes of one layer's recurrent state: convolution in the model's dtype, recurrence in its own."""
    state = layer.state
    if state is None:
        return 0
    recurrent = STATE_DTYPE_BYTES[state.recurrent_dtype or dtype]
    return state.num_conv * STATE_DTYPE_BYTES[dtype] + state.num_recurrent * recurrent


def request_bytes(
    shape: ModelShape, kv_dtype: KvDtype, *, num_tokens: int, source_tokens: int = 0, block_size: int = 1
) -> int:
    """Bytes that one request of `num_tokens` holds, in whole blocks of `block_size` tokens."""
    total = 0
    for layer in shape.layers:
        for cache in layer.token_caches:
            count = source_tokens if cache.growth is Growth.SOURCE else num_tokens
            total += cache.num_entries(count, block_size) * kv_dtype.entry_bytes(cache)
        total += state_bytes(layer, shape.dtype)
    return total


def kv_block_bytes(shape: ModelShape, *, block_size: int, kv_dtype: str) -> int:
    """Bytes of one block of the engine's pool, over all attention layers.

    The pool gives every attention layer the same block table, so a sliding layer is paid for like a full one.
    """
    dtype = parse_kv_dtype(kv_dtype)
    return block_size * sum(dtype.entry_bytes(cache) for cache in _attention_caches(shape.layers))


@dataclass(frozen=True, slots=True)
class PoolPlan:
    """The engine's paged pool. `num_blocks` counts the reserved null block; the other counts do not.

    `num_tokens` = (num_blocks - 1) x block_size; `kv_bytes` = num_blocks x block_bytes; `max_model_len` is the context,
    or all usable tokens when those are fewer; `max_seqs_at_context` sequences of that length fit at once.
    """

    block_size: int
    block_bytes: int
    bytes_per_token: int
    num_blocks: int
    kv_bytes: int
    num_tokens: int
    max_seqs_at_context: int
    max_model_len: int


def plan_pool(shape: ModelShape, *, kv_memory: int, block_size: int, kv_dtype: str, max_model_len: int) -> PoolPlan:
    """How many blocks fit in `kv_memory` bytes. Raises ConfigError with both numbers when not even two do."""
    block_bytes = kv_block_bytes(shape, block_size=block_size, kv_dtype=kv_dtype)
    if block_bytes == 0:
        raise ConfigError(f"a {shape.model_type} model keeps no keys and values, so it has no KV pool", param="model")
    num_blocks = kv_memory // block_bytes
    if num_blocks < 2:
        raise ConfigError(
            f"{kv_memory:,} bytes of KV memory hold {max(num_blocks, 0)} blocks of {block_bytes:,} bytes, but the pool "
            f"needs two: one for tokens, one reserved ({2 * block_bytes:,} bytes)",
            hint="raise --kv-memory, or choose a smaller --block-size",
            param="kv_memory",
        )
    num_tokens = (num_blocks - 1) * block_size
    length = min(max_model_len, num_tokens)
    return PoolPlan(
        block_size=block_size,
        block_bytes=block_bytes,
        bytes_per_token=block_bytes // block_size,
        num_blocks=num_blocks,
        kv_bytes=num_blocks * block_bytes,
        num_tokens=num_tokens,
        max_seqs_at_context=(num_blocks - 1) // -(-length // block_size),
        max_model_len=length,
    )


def _attention_caches(layers: Iterable[Layer]) -> Iterable[AttentionCache]:
    for layer in layers:
        for cache in layer.token_caches:
            if isinstance(cache, AttentionCache) and not cache.over_source:
                yield cache
