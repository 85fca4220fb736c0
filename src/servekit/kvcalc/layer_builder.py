"""Puts kinds, heads, windows, states and sharing together into one Layer a block. It must not know bytes."""

from dataclasses import replace

from servekit.kvcalc.attention_fields import (
    QUERY_HEADS,
    gemma4_global,
    keys_and_values,
    read_head_dim,
    read_window,
    sliding_cache,
)
from servekit.kvcalc.caches import AttentionCache, IndexerCache, Layer, TokenCache
from servekit.kvcalc.families import Family
from servekit.kvcalc.fields import Fields
from servekit.kvcalc.kinds import Kind
from servekit.kvcalc.patterns import read_kinds
from servekit.kvcalc.states import StateCache

_ATTENDS = (Kind.FULL, Kind.SLIDING, Kind.CHUNKED, Kind.BOTH, Kind.BOTH_SLIDING, Kind.CROSS)
_COMPRESSED = (Kind.COMPRESSED_SPARSE, Kind.COMPRESSED_HEAVY)
_STATES = (Kind.STATE, Kind.BOTH, Kind.BOTH_SLIDING)


def build_layers(fields: Fields, family: Family, num_layers: int) -> tuple[Layer, ...]:
    """What every layer of the text model keeps. Raises ConfigError naming the field that cannot be honoured."""
    if family.is_encoder:
        return (Layer(Kind.NONE),) * num_layers
    if fields.has("block_configs"):
        return _blocks(fields, num_layers)
    if fields.has("num_key_value_heads_per_layer"):
        return _heads_per_layer(fields, num_layers)
    kinds = read_kinds(fields, num_layers, family.pattern)
    indexers: list[IndexerCache | None] = [None] * num_layers
    if family.indexer is not None:
        indexers = family.indexer(fields, num_layers)
    of_kind = {kind: _layer(fields, family, kind) for kind in dict.fromkeys(kinds)}
    layers = []
    for kind, indexer in zip(kinds, indexers, strict=True):
        layer = of_kind[kind]
        layers.append(replace(layer, token_caches=(*layer.token_caches, indexer)) if indexer else layer)
    return _share(fields, layers)


def _layer(fields: Fields, family: Family, kind: Kind) -> Layer:
    caches: tuple[TokenCache, ...] = ()
    if kind in _ATTENDS:
        caches = (_attention(fields, family, kind),) * family.caches_per_layer
        if family.crosses:
            caches += (replace(family.heads(fields), over_source=True),)
    elif kind in _COMPRESSED:
        caches = _compressed(fields, family, kind)
    return Layer(kind, caches, _state(fields, family, kind) if kind in _STATES else None)


def _attention(fields: Fields, family: Family, kind: Kind) -> AttentionCache:
    full = family.heads(fields)
    if kind in (Kind.SLIDING, Kind.BOTH_SLIDING):
        if fields.values.get("use_sliding_window") is False:
            return full
        return sliding_cache(fields, full, family.window)
    if kind is Kind.CHUNKED:
        chunk = fields.optional_integer("attention_chunk_size")
        if chunk is None:
            fields.note(f"{fields.prefix}attention_chunk_size is absent: 8192, the class default")
        return replace(full, window=chunk or 8192)
    if kind is Kind.CROSS:
        return replace(full, over_source=True)
    return gemma4_global(fields, full) if family.has_global_heads else full


def _compressed(fields: Fields, family: Family, kind: Kind) -> tuple[TokenCache, ...]:
    """DeepSeek-V4: a window of single tokens, and one entry for every R tokens before it."""
    vector = family.heads(fields)
    rates = fields.sub("compress_rates")
    name = "compressed_sparse_attention" if kind is Kind.COMPRESSED_SPARSE else "heavily_compressed_attention"
    ratio = rates.optional_integer(name) if rates else None
    ratio = ratio or (4 if kind is Kind.COMPRESSED_SPARSE else 128)
    window = replace(vector, window=read_window(fields, family.window))
    caches: tuple[TokenCache, ...] = (window, replace(vector, compress_ratio=ratio))
    if kind is Kind.COMPRESSED_SPARSE:
        caches += (IndexerCache(fields.integer("index_head_dim"), compress_ratio=ratio),)
    return caches


def _state(fields: Fields, family: Family, kind: Kind) -> StateCache:
    reader = family.sliding_state if kind is Kind.BOTH_SLIDING else family.state
    if reader is None:
        name = next((name for name in ("layer_types", "layers_block_type") if fields.has(name)), "model_type")
        raise fields.error(name, "names recurrent layers, but this model_type is not known to have any")
    return reader(fields)


def _share(fields: Fields, layers: list[Layer]) -> tuple[Layer, ...]:
    """Cross-layer sharing: the last `num_kv_shared_layers` reuse, or with `use_cla` all but the first of every N."""
    num_shared = fields.optional_integer("num_kv_shared_layers", low=0, high=len(layers) - 1) or 0
    owners = len(layers) - num_shared
    period = fields.integer("cla_share_factor") if fields.flag("use_cla", default=False) else 1
    return tuple(
        layer if index < owners and index % period == 0 else Layer(Kind.NONE, (), layer.state)
        for index, layer in enumerate(layers)
    )


def _blocks(fields: Fields, num_layers: int) -> tuple[Layer, ...]:
    """Nemotron-NAS: every block says for itself whether and how it attends."""
    blocks = fields.values["block_configs"]
    if not isinstance(blocks, list):
        raise fields.error("block_configs", "must be a list")
    fields.per_layer("block_configs", blocks, num_layers)
    query = fields.integer(*QUERY_HEADS)
    head_dim = read_head_dim(fields, query)
    layers = []
    for index, value in enumerate(blocks):
        block = Fields({"block": value}, prefix=f"{fields.prefix}block_configs[{index}].", notes=fields.notes)
        attention = (block.sub("block") or block).sub("attention")
        if attention is None:
            raise block.error("attention", "is missing")
        if attention.flag("no_op", default=False) or attention.flag("replace_with_linear", default=False):
            layers.append(Layer(Kind.NONE))
            continue
        group = attention.integer("n_heads_in_group", high=query)
        cache = keys_and_values(fields, query, max(1, query // group), head_dim)
        window = attention.optional_integer("window_length")
        kind = Kind.FULL if window is None else Kind.SLIDING
        layers.append(Layer(kind, (replace(cache, window=window),)))
    return tuple(layers)


def _heads_per_layer(fields: Fields, num_layers: int) -> tuple[Layer, ...]:
    """DeciLM: a list of KV heads, one a layer."""
    counts = fields.ints("num_key_value_heads_per_layer", low=1) or []
    fields.per_layer("num_key_value_heads_per_layer", counts, num_layers)
    query = fields.integer(*QUERY_HEADS)
    head_dim = read_head_dim(fields, query)
    return tuple(Layer(Kind.FULL, (keys_and_values(fields, query, count, head_dim),)) for count in counts)
