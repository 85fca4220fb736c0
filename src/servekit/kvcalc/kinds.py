"""The kinds of layers and the names published configs give them. It must not know sizes."""

from enum import StrEnum
from types import MappingProxyType
from typing import Final


class Kind(StrEnum):
    """What a layer keeps: everything, a window, a chunk, a state, both, cross-attention, or nothing."""

    FULL = "full attention"
    SLIDING = "sliding attention"
    CHUNKED = "chunked attention"
    STATE = "recurrent state"
    BOTH = "attention and state"
    BOTH_SLIDING = "sliding attention and state"
    CROSS = "cross-attention"
    COMPRESSED_SPARSE = "compressed sparse attention"
    COMPRESSED_HEAVY = "heavily compressed attention"
    NONE = "no cache"


LAYER_TYPES: Final = MappingProxyType(
    {
        "full_attention": Kind.FULL,
        "attention": Kind.FULL,
        "global": Kind.FULL,
        "indexed_attention": Kind.FULL,
        "deepseek_sparse_attention": Kind.FULL,
        "minimax_m3_sparse": Kind.FULL,
        "sliding_attention": Kind.SLIDING,
        "window_attention": Kind.SLIDING,
        "local": Kind.SLIDING,
        "chunked_attention": Kind.CHUNKED,
        "linear_attention": Kind.STATE,
        "mamba": Kind.STATE,
        "mamba2": Kind.STATE,
        "recurrent": Kind.STATE,
        "conv": Kind.STATE,
        "hybrid": Kind.BOTH,
        "hybrid_sliding": Kind.BOTH_SLIDING,
        "compressed_sparse_attention": Kind.COMPRESSED_SPARSE,
        "heavily_compressed_attention": Kind.COMPRESSED_HEAVY,
        "mlp": Kind.NONE,
        "moe": Kind.NONE,
    }
)
