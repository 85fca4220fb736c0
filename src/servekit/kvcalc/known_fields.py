"""Refuses absurd values in the fields that every family shares, read or not: a broken file must not look whole."""

from typing import Final

from servekit.kvcalc.fields import Fields

_SIZES: Final = (
    "hidden_size",
    "n_embd",
    "d_model",
    "num_hidden_layers",
    "n_layer",
    "num_layers",
    "num_attention_heads",
    "n_head",
    "num_key_value_heads",
    "num_kv_heads",
    "head_dim",
    "v_head_dim",
    "vocab_size",
    "shared_expert_intermediate_size",
    "shared_intermediate_size",
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "num_experts_per_tok",
    "sliding_window",
    "max_window_layers",
    "attention_chunk_size",
    "kv_lora_rank",
    "q_lora_rank",
    "expand",
    "mamba_expand",
    "conv_kernel",
    "state_size",
)
# One size, or one for each layer or modality.
_SIZES_OR_LISTS: Final = ("intermediate_size", "moe_intermediate_size")
_FLAGS: Final = ("use_sliding_window", "tie_word_embeddings", "use_cla", "multi_query", "is_encoder_decoder")


def check_known_fields(levels: list[Fields]) -> None:
    """Raises ConfigError naming the first field whose value is of the wrong type or size."""
    for level in levels:
        for name in _SIZES:
            level.optional_integer(name, low=0)
        for name in _FLAGS:
            level.flag(name, default=False)
        for name in _SIZES_OR_LISTS:
            if not isinstance(level.values.get(name), list):
                level.optional_integer(name, low=0)
