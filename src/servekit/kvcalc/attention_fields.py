"""Reads heads, head sizes and windows from a config.json, whatever their spelling. It must not know layer patterns.

Every reader gives the cache of one full-attention layer; windows and sharing are put on afterwards.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

from servekit.kvcalc.caches import AttentionCache
from servekit.kvcalc.fields import Fields

HeadsReader = Callable[[Fields], AttentionCache]

HIDDEN: Final = ("hidden_size", "n_embd", "d_model", "dim")
QUERY_HEADS: Final = ("num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads")
KV_HEADS: Final = ("num_key_value_heads", "num_kv_heads", "n_head_kv", "n_kv_heads", "num_attention_groups")
HEAD_DIM: Final = ("head_dim", "kv_channels", "attention_head_dim", "hidden_size_per_head")
WINDOW: Final = ("sliding_window", "sliding_window_size", "attention_window_size", "window_size")


def grouped_heads(
    *, head_dim: int | None = None, num_kv_heads: int | None = None, num_query_heads: int | None = None
) -> HeadsReader:
    """Multi-head, grouped-query or multi-query attention; MLA when `kv_lora_rank` is there.

    The arguments are the defaults of the family's config class, for the fields that its checkpoints leave out.
    """

    def read(fields: Fields) -> AttentionCache:
        if fields.has("kv_lora_rank"):
            return latent(fields)
        query = _query_heads(fields, num_query_heads)
        heads = fields.optional_integer(*KV_HEADS)
        if heads is None and num_kv_heads is not None and "num_key_value_heads" not in fields.values:
            fields.note(f"{fields.prefix}num_key_value_heads is absent: {num_kv_heads}, the class default")
            heads = num_kv_heads
        if heads is None:
            fields.note(f"{fields.prefix}num_key_value_heads is absent: one for each of the {query} query heads")
            heads = query
        return keys_and_values(fields, query, heads, read_head_dim(fields, query, head_dim))

    return read


def keys_and_values(fields: Fields, query_heads: int, kv_heads: int, head_dim: int) -> AttentionCache:
    """K and V of a layer; `v_head_dim` gives V its own size. Raises ConfigError when heads do not group."""
    if query_heads % kv_heads:
        name = fields.name_of(*KV_HEADS)
        raise fields.error(name, f"is {kv_heads}, which does not divide the {query_heads} query heads")
    value_dim = fields.optional_integer("v_head_dim", zero_is_absent=True) or head_dim
    return AttentionCache(kv_heads, head_dim, value_dim)


def read_head_dim(fields: Fields, query_heads: int, default: int | None = None) -> int:
    """The explicit head size, else the class default, else hidden size over query heads."""
    explicit = fields.optional_integer(*HEAD_DIM, zero_is_absent=True)
    if explicit is not None:
        return explicit
    if default is not None:
        fields.note(f"{fields.prefix}head_dim is absent: {default}, the class default")
        return default
    hidden = fields.integer(*HIDDEN)
    if hidden % query_heads:
        raise fields.error(
            fields.name_of(*HIDDEN),
            f"is {hidden}, which {query_heads} query heads do not divide, and head_dim is absent",
        )
    return hidden // query_heads


def latent(fields: Fields) -> AttentionCache:
    """Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434): one compressed vector and one rope key, no V."""
    rank = fields.integer("kv_lora_rank")
    return AttentionCache(1, rank + fields.integer("qk_rope_head_dim", low=0), 0, is_latent=True)


def latent_unless_switched_off(fields: Fields) -> AttentionCache:
    """MLA families: a null `kv_lora_rank` is allowed only beside `use_mla` false (small DeepSeek-VL2)."""
    if not fields.has("kv_lora_rank") and not fields.flag("use_mla", default=True):
        return grouped_heads()(fields)
    return latent(fields)


def shared_vector(fields: Fields) -> AttentionCache:
    """DeepSeek-V4: one vector of `head_dim` is both key and value."""
    return AttentionCache(fields.integer("num_key_value_heads"), fields.integer("head_dim"), 0)


def falcon_heads(fields: Fields) -> AttentionCache:
    """Falcon: `num_kv_heads` counts only with `new_decoder_architecture`; else `multi_query` means one."""
    query = fields.integer(*QUERY_HEADS)
    if fields.flag("new_decoder_architecture", default=False):
        heads = fields.optional_integer("num_kv_heads", "n_head_kv", "num_key_value_heads") or query
    else:
        heads = 1 if fields.flag("multi_query", default=True) else query
    return keys_and_values(fields, query, heads, read_head_dim(fields, query))


def chatglm_heads(fields: Fields) -> AttentionCache:
    """ChatGLM 2 to 4: `multi_query_group_num` with `multi_query_attention`."""
    query = fields.integer(*QUERY_HEADS)
    grouped = fields.flag("multi_query_attention", default=False)
    heads = fields.integer("multi_query_group_num") if grouped else query
    return keys_and_values(fields, query, heads, read_head_dim(fields, query))


def bigcode_heads(fields: Fields) -> AttentionCache:
    """GPT-BigCode (StarCoder): one KV head with `multi_query`, which is the class default."""
    query = fields.integer(*QUERY_HEADS)
    heads = 1 if fields.flag("multi_query", default=True) else query
    return keys_and_values(fields, query, heads, read_head_dim(fields, query))


def nested_heads(fields: Fields) -> AttentionCache:
    """MPT and DBRX: `attn_config.kv_n_heads`, or one with `attn_config.attn_type` multiquery_attention."""
    query = fields.integer(*QUERY_HEADS)
    attention = fields.sub("attn_config")
    heads = attention.optional_integer("kv_n_heads") if attention else None
    if heads is None and attention and attention.text("attn_type") == "multiquery_attention":
        heads = 1
    if heads is None:
        heads = fields.optional_integer(*KV_HEADS) or query
    return keys_and_values(fields, query, heads, read_head_dim(fields, query))


def zamba_heads(fields: Fields) -> AttentionCache:
    """Zamba: attention sees two hidden states side by side, so a head is twice as wide; `kv_channels` is not it."""
    query = fields.integer("num_attention_heads")
    head_dim = fields.optional_integer("attention_head_dim", zero_is_absent=True)
    if head_dim is None:
        head_dim = 2 * fields.integer(*HIDDEN) // query
    return AttentionCache(fields.optional_integer("num_key_value_heads") or query, head_dim, head_dim)


def t5_heads(fields: Fields) -> AttentionCache:
    """T5: `num_heads` of `d_kv`, which need not multiply to `d_model`."""
    heads, head_dim = fields.integer("num_heads"), fields.integer("d_kv")
    return AttentionCache(heads, head_dim, head_dim)


def bart_heads(fields: Fields) -> AttentionCache:
    """BART, Whisper and their kin: the decoder's own head count."""
    heads = fields.integer("decoder_attention_heads", "num_attention_heads", "attention_heads")
    head_dim = read_head_dim(fields, heads)
    return AttentionCache(heads, head_dim, head_dim)


def sliding_cache(fields: Fields, full: AttentionCache, default_window: int | None = None) -> AttentionCache:
    """The cache of a sliding layer: its window, and its own heads where the `swa_` fields say so (MiMo-V2)."""
    heads = fields.optional_integer("swa_num_key_value_heads") or full.num_kv_heads
    key_dim = fields.optional_integer("swa_head_dim", zero_is_absent=True)
    value_dim = fields.optional_integer("swa_v_head_dim", zero_is_absent=True)
    return replace(
        full,
        num_kv_heads=heads,
        key_dim=key_dim or full.key_dim,
        value_dim=value_dim or (key_dim if key_dim and not fields.has("v_head_dim") else full.value_dim),
        window=read_window(fields, default_window),
    )


def read_window(fields: Fields, default: int | None = None) -> int:
    """Tokens a sliding layer keeps. Bidirectional Gemma 3 and 4 keep half the window and one."""
    name = next((name for name in WINDOW if fields.has(name)), None)
    if name is None and default is None:
        raise fields.error(WINDOW[0], "is missing, but layers slide")
    if name is None or (default is not None and not fields.has(name)):
        fields.note(f"{fields.prefix}{WINDOW[0]} is absent: {default}, the class default")
        window = default or 0
    else:
        window = fields.integer(name)
    both_ways = fields.values.get("use_bidirectional_attention")
    if both_ways not in (None, False, True, "all", "vision"):
        raise fields.error("use_bidirectional_attention", "must be true, false, all or vision")
    return window // 2 + 1 if both_ways in (True, "all") else window


def gemma4_global(fields: Fields, local: AttentionCache) -> AttentionCache:
    """Gemma 4: global layers have a head size of their own, and their own KV heads with `attention_k_eq_v`."""
    head_dim = fields.optional_integer("global_head_dim", zero_is_absent=True)
    if head_dim is None:
        fields.note(f"{fields.prefix}global_head_dim is absent: 512, the class default")
        head_dim = 512
    heads = None
    if fields.flag("attention_k_eq_v", default=False):
        heads = fields.optional_integer("num_global_key_value_heads")
    return AttentionCache(heads or local.num_kv_heads, head_dim, head_dim)


def _query_heads(fields: Fields, default: int | None) -> int:
    heads = fields.optional_integer(*QUERY_HEADS)
    if heads is None and default is not None:
        fields.note(f"{fields.prefix}num_attention_heads is absent: {default}, the class default")
        return default
    return fields.integer(*QUERY_HEADS)
