"""The structures of csrc/servekit.h, field by field, for ctypes. It must not know what computes with them."""

import ctypes

ABI = 4
"""What sk_abi() of a library with these structures returns."""
PANEL = 16
"""Output channels that lie together in packed weights."""
GROUP = 32
"""Inputs that share a scale."""

Q4, Q8, BF16 = 1, 2, 3
KV_F32, KV_BF16, KV_Q8_0 = 0, 1, 2
KV_TILE = 16
"""Tokens that lie together in KV_Q8_0: blocks have a multiple of it."""
SOURCES = {"F32": 0, "Q4_0": 2, "Q4_1": 3, "Q8_0": 8, "Q4_K": 12}
"""What can be packed: rows of float32, or of ggml's blocks, by ggml's name and number."""
ACTIVATIONS = {"silu": 0, "gelu": 1, "gelu_tanh": 2, "relu": 3}

_I32 = ctypes.c_int32
_F32 = ctypes.c_float
_POINTER = ctypes.c_void_p


class Matrix(ctypes.Structure):
    """sk_matrix."""

    _fields_ = (
        ("format", _I32),
        ("n", _I32),
        ("k", _I32),
        ("n_padded", _I32),
        ("k_padded", _I32),
        ("reserved", _I32),
        ("packed", _POINTER),
        ("bias", _POINTER),
    )


class Attention(ctypes.Structure):
    """sk_attention."""

    _fields_ = (
        ("heads", _I32),
        ("kv_heads", _I32),
        ("head_dim", _I32),
        ("window", _I32),
        ("scale", _F32),
        ("softcap", _F32),
        ("causal", _I32),
        ("reserved", _I32),
    )


class Step(ctypes.Structure):
    """sk_batch."""

    _fields_ = (
        ("tokens", _I32),
        ("seqs", _I32),
        ("block_size", _I32),
        ("max_blocks", _I32),
        ("positions", _POINTER),
        ("slot_mapping", _POINTER),
        ("block_tables", _POINTER),
        ("starts", _POINTER),
        ("context_lens", _POINTER),
    )


class Layer(ctypes.Structure):
    """sk_layer."""

    _fields_ = (
        ("input_norm", _POINTER),
        ("qk_norm", _POINTER),
        ("post_attention_norm", _POINTER),
        ("mlp_norm", _POINTER),
        ("post_mlp_norm", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("attention", Attention),
        ("qkv", Matrix),
        ("output", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("cache", _POINTER),
    )


class Decoder(ctypes.Structure):
    """sk_decoder."""

    _fields_ = (
        ("num_layers", _I32),
        ("hidden", _I32),
        ("activation", _I32),
        ("kv_dtype", _I32),
        ("eps", _F32),
        ("layers", ctypes.POINTER(Layer)),
        ("final_norm", _POINTER),
    )


class EncoderLayer(ctypes.Structure):
    """sk_encoder_layer."""

    _fields_ = (
        ("attention_norm", _POINTER),
        ("attention_norm_bias", _POINTER),
        ("mlp_norm", _POINTER),
        ("mlp_norm_bias", _POINTER),
        ("cos", _POINTER),
        ("sin", _POINTER),
        ("attention", Attention),
        ("qkv", Matrix),
        ("output", Matrix),
        ("up", Matrix),
        ("down", Matrix),
    )


class Encoder(ctypes.Structure):
    """sk_encoder."""

    _fields_ = (
        ("num_layers", _I32),
        ("hidden", _I32),
        ("activation", _I32),
        ("pre_norm", _I32),
        ("gated", _I32),
        ("eps", _F32),
        ("layers", ctypes.POINTER(EncoderLayer)),
        ("embedding_norm", _POINTER),
        ("embedding_norm_bias", _POINTER),
        ("final_norm", _POINTER),
        ("final_norm_bias", _POINTER),
    )


class Choice(ctypes.Structure):
    """sk_choice."""

    _fields_ = (
        ("uniform", ctypes.c_double),
        ("temperature", _F32),
        ("top_p", _F32),
        ("min_p", _F32),
        ("top_k", _I32),
    )
