"""The arithmetic of a request's KV bytes, one line a group of equal layers, in numbers as one writes it on paper."""

from dataclasses import dataclass
from fractions import Fraction

from servekit.kvcalc.caches import AttentionCache, Growth, IndexerCache, Layer, TokenCache
from servekit.kvcalc.kv_formats import KvDtype, KvFormat
from servekit.kvcalc.memory import STATE_DTYPE_BYTES, state_bytes
from servekit.kvcalc.model_shape import ModelShape
from servekit.kvcalc.states import StateCache


@dataclass(frozen=True, slots=True)
class Step:
    """One term of one group of layers: what it is, its formula in numbers, and its bytes.

    Bytes are per token for growth and indexer, per source token for cross-attention, per request for the others. A
    `window` of W tokens makes them those of W tokens.
    """

    growth: Growth
    num_layers: int
    name: str
    formula: str
    num_bytes: Fraction
    window: int | None = None


def explain(shape: ModelShape, kv_dtype: KvDtype) -> list[Step]:
    """Every term of every group of equal layers, growth first."""
    counts: dict[tuple[str, TokenCache | StateCache], int] = {}
    for layer in shape.layers:
        kept: tuple[TokenCache | StateCache, ...] = (*layer.token_caches, *((layer.state,) if layer.state else ()))
        for cache in kept:
            name = _name(layer, cache)
            counts[name, cache] = counts.get((name, cache), 0) + 1
    steps = []
    for (name, cache), count in counts.items():
        if isinstance(cache, StateCache):
            steps.append(_state_step(name, cache, count, shape.dtype))
        else:
            steps.append(_token_step(name, cache, count, kv_dtype))
    terms = list(Growth)
    return sorted(steps, key=lambda step: terms.index(step.growth))


def _name(layer: Layer, cache: TokenCache | StateCache) -> str:
    if isinstance(cache, StateCache):
        return cache.name
    if isinstance(cache, IndexerCache):
        return "indexer keys"
    if cache.over_source:
        return "cross-attention"
    if cache.is_latent:
        return "latent attention (MLA)"
    if cache.compress_ratio > 1:
        return f"compressed {cache.compress_ratio}:1"
    if cache.window is not None:
        return "chunked attention" if layer.kind.startswith("chunked") else "sliding attention"
    return "full attention"


def _token_step(name: str, cache: TokenCache, count: int, kv_dtype: KvDtype) -> Step:
    per_entry = kv_dtype.entry_bytes(cache)
    formula = f"{_layers(count)} x {_entry(cache, kv_dtype, per_entry)}"
    total = Fraction(count * per_entry, cache.compress_ratio)
    if cache.compress_ratio > 1:
        formula += f" / {cache.compress_ratio} tokens"
    window = cache.window if isinstance(cache, AttentionCache) else None
    if window is not None:
        formula += f" x {window:,} tokens"
        total *= window
    return Step(cache.growth, count, name, formula, total, window)


def _entry(cache: TokenCache, kv_dtype: KvDtype, per_entry: int) -> str:
    if isinstance(cache, IndexerCache):
        if cache.is_scaled_fp8:
            return f"({cache.dim} fp8 + {4 * -(-cache.dim // 128)} B scale)"
        return _side(1, f"{cache.dim}", kv_dtype.keys, per_entry)
    if kv_dtype.keys is not kv_dtype.values or kv_dtype.name == "fp8_ds_mla":
        return f"{per_entry:,} B ({kv_dtype.name})"
    if cache.is_latent:
        return _side(1, f"{cache.key_dim} (latent, not doubled)", kv_dtype.keys, per_entry)
    if cache.value_dim == 0:
        return _side(cache.num_kv_heads, f"{cache.key_dim} (K = V)", kv_dtype.keys, per_entry)
    dims = f"{cache.key_dim}" if cache.key_dim == cache.value_dim else f"({cache.key_dim} + {cache.value_dim})"
    text = _side(cache.num_kv_heads, dims, kv_dtype.keys, per_entry)
    return f"2 x {text}" if cache.key_dim == cache.value_dim and not text.endswith(")") else text


def _side(heads: int, dims: str, form: KvFormat, per_entry: int) -> str:
    if form.block_elements > 1 or form.head_scale_bytes:
        return f"{per_entry:,} B ({form.name})"
    kv_heads = f"{heads} KV head{'s' if heads > 1 else ''} x " if heads > 1 or "(" not in dims else ""
    return f"{kv_heads}{dims} x {form.block_bytes} B"


def _state_step(name: str, state: StateCache, count: int, dtype: str) -> Step:
    parts = []
    if state.num_conv:
        parts.append(f"({state.conv_formula}) x {STATE_DTYPE_BYTES[dtype]} B")
    if state.num_recurrent:
        parts.append(f"({state.recurrent_formula}) x {STATE_DTYPE_BYTES[state.recurrent_dtype or dtype]} B")
    formula = f"{_layers(count)} x [{' + '.join(parts)}]"
    return Step(Growth.STATE, count, name, formula, Fraction(count * state_bytes(Layer("", (), state), dtype)))


def _layers(count: int) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"
