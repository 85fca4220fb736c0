"""Reads which layers keep indexer keys for sparse attention, and how wide they are. It must not know bytes."""

from collections.abc import Callable

from servekit.kvcalc.caches import IndexerCache
from servekit.kvcalc.fields import Fields, describe

IndexerReader = Callable[[Fields, int], list[IndexerCache | None]]


def deepseek_indexer(fields: Fields, num_layers: int) -> list[IndexerCache | None]:
    """DeepSeek sparse attention: fp8 keys with fp32 scales, on the layers that choose tokens for themselves.

    A layer that reuses an earlier choice keeps no keys: `indexer_types` (full, shared), `index_topk_pattern` (F, S), or
    one full layer in every `index_topk_freq` after the first `index_skip_topk_offset`.
    """
    cache = IndexerCache(fields.integer("index_head_dim"), is_scaled_fp8=True)
    return [cache if owns else None for owns in _owners(fields, num_layers)]


def minimax_indexer(fields: Fields, num_layers: int) -> list[IndexerCache | None]:
    """MiniMax-M3: one index key head on each sparse layer, in the KV dtype; no values are kept."""
    sparse = fields.sub("sparse_attention_config")
    if sparse is None:
        names = fields.texts("layer_types")
        if names is None:
            raise fields.error("sparse_attention_config", "is missing (or layer_types)")
        fields.per_layer("layer_types", names, num_layers)
        cache = IndexerCache(fields.integer("index_head_dim"))
        return [cache if name == "minimax_m3_sparse" else None for name in names]
    if not sparse.flag("use_sparse_attention", default=True):
        return [None] * num_layers
    chosen = sparse.ints("sparse_attention_freq", high=1)
    if chosen is None:
        raise sparse.error("sparse_attention_freq", "is missing")
    sparse.per_layer("sparse_attention_freq", chosen, num_layers)
    without_value = sparse.ints("sparse_disable_index_value", high=1)
    if without_value is not None:
        sparse.per_layer("sparse_disable_index_value", without_value, num_layers)
        with_value = next((i for i, item in enumerate(chosen) if item and not without_value[i]), None)
        if with_value is not None:
            raise sparse.error(
                "sparse_disable_index_value", f"is 0 for the sparse layer {with_value}: index values are not known"
            )
    cache = IndexerCache(sparse.integer("sparse_index_dim"))
    return [cache if item else None for item in chosen]


def _owners(fields: Fields, num_layers: int) -> list[bool]:
    types = fields.texts("indexer_types")
    if types is not None:
        fields.per_layer("indexer_types", types, num_layers)
        return [_named(fields, "indexer_types", item, "full", "shared") for item in types]
    pattern = fields.text("index_topk_pattern")
    if pattern is not None:
        fields.per_layer("index_topk_pattern", pattern, num_layers)
        return [_named(fields, "index_topk_pattern", item, "F", "S") for item in pattern]
    period = fields.optional_integer("index_topk_freq", low=0) or 1
    offset = fields.optional_integer("index_skip_topk_offset", low=0)
    offset = 2 if offset is None else offset
    return [max(index - offset + 1, 0) % period == 0 for index in range(num_layers)]


def _named(fields: Fields, name: str, item: str, owns: str, shares: str) -> bool:
    if item not in (owns, shares):
        raise fields.error(name, f"holds {describe(item)}, which is neither {owns} nor {shares}")
    return item == owns
