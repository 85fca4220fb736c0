"""Small GGUF files, written with the `gguf` package, as llama.cpp's conversion would write them."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

HIDDEN, INNER, LAYERS, HEADS, KV_HEADS, HEAD_DIM = 64, 96, 2, 4, 2, 16

Tensors = Mapping[str, NDArray[np.float32]]


def byte_alphabet() -> list[str]:
    """GPT-2's 256 characters for bytes, in byte order."""
    printable = {*range(33, 127), *range(161, 173), *range(174, 256)}
    spelled, extra = [], 0
    for byte in range(256):
        spelled.append(chr(byte) if byte in printable else chr(256 + extra))
        extra += byte not in printable
    return spelled


def byte_level_vocabulary() -> dict[str, Any]:
    """ChatML control tokens, the byte alphabet and three merges, one of them across a space."""
    control = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    merges = ["h e", "l l", "Ġ he"]
    tokens = [*control, *byte_alphabet(), "he", "ll", "Ġhe"]
    return {
        "model": "gpt2",
        "pre": "smollm",
        "tokens": tokens,
        "types": [3] * 3 + [1] * (len(tokens) - 3),
        "merges": merges,
        "bos": 1,
        "eos": 2,
        "unk": 0,
    }


def sentencepiece_vocabulary() -> dict[str, Any]:
    """Llama-2 style pieces: unknown, BOS, EOS, 256 byte pieces, then pieces that score by their order."""
    pieces = ["▁", "h", "i", "▁h", "▁hi", "hi"]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    return {
        "model": "llama",
        "pre": None,
        "tokens": tokens,
        "types": [2, 3, 3] + [6] * 256 + [1] * len(pieces),
        # Single characters score lowest, as sentencepiece writes them; of the rest the earlier is better.
        "scores": [0.0] * 259 + [-10.0, -11.0, -12.0, -1.0, -2.0, -3.0],
        "bos": 1,
        "eos": 2,
        "unk": 0,
    }


def tensors(*, vocab_size: int, architecture: str = "llama") -> dict[str, NDArray[np.float32]]:
    """Random tensors under GGUF names, shaped like a tiny model of `architecture`."""
    rng = np.random.default_rng(0)

    def matrix(*shape: int) -> NDArray[np.float32]:
        return rng.standard_normal(shape, dtype=np.float32)

    found = {"token_embd.weight": matrix(vocab_size, HIDDEN), "output_norm.weight": matrix(HIDDEN)}
    for layer in range(LAYERS):
        prefix = f"blk.{layer}."
        found |= {
            prefix + "attn_norm.weight": matrix(HIDDEN),
            prefix + "attn_q.weight": matrix(HEADS * HEAD_DIM, HIDDEN),
            prefix + "attn_k.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "attn_v.weight": matrix(KV_HEADS * HEAD_DIM, HIDDEN),
            prefix + "attn_output.weight": matrix(HIDDEN, HEADS * HEAD_DIM),
            prefix + "ffn_norm.weight": matrix(HIDDEN),
            prefix + "ffn_gate.weight": matrix(INNER, HIDDEN),
            prefix + "ffn_up.weight": matrix(INNER, HIDDEN),
            prefix + "ffn_down.weight": matrix(HIDDEN, INNER),
        }
        if architecture.startswith("gemma"):
            found |= {
                prefix + "post_attention_norm.weight": matrix(HIDDEN),
                prefix + "post_ffw_norm.weight": matrix(HIDDEN),
            }
        if architecture in ("gemma3", "qwen3"):
            found |= {prefix + "attn_q_norm.weight": matrix(HEAD_DIM), prefix + "attn_k_norm.weight": matrix(HEAD_DIM)}
    return found


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    vocabulary: Mapping[str, Any] | None = None,
    weights: Tensors | None = None,
    kinds: Mapping[str, GGMLQuantizationType] | None = None,
    chat_template: str | None = None,
    extra: Mapping[str, Any] | None = None,
) -> Path:
    """Write one file. `kinds` quantises tensors by name; `extra` are further keys, taken as they are."""
    vocabulary = vocabulary or byte_level_vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(INNER)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    if architecture.startswith("gemma") or architecture == "qwen3":
        writer.add_key_length(HEAD_DIM)
        writer.add_value_length(HEAD_DIM)
    if architecture.startswith("gemma"):
        writer.add_sliding_window(32)
    writer.add_tokenizer_model(vocabulary["model"])
    if vocabulary["pre"] is not None:
        writer.add_tokenizer_pre(vocabulary["pre"])
    writer.add_token_list(vocabulary["tokens"])
    writer.add_token_types(vocabulary["types"])
    if "merges" in vocabulary:
        writer.add_token_merges(vocabulary["merges"])
    if "scores" in vocabulary:
        writer.add_token_scores(vocabulary["scores"])
    writer.add_bos_token_id(vocabulary["bos"])
    writer.add_eos_token_id(vocabulary["eos"])
    writer.add_unk_token_id(vocabulary["unk"])
    if chat_template is not None:
        writer.add_chat_template(chat_template)
    for key, value in (extra or {}).items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, float):
            writer.add_float32(key, value)
        else:
            writer.add_string(key, value)
    if weights is None:
        weights = tensors(vocab_size=len(vocabulary["tokens"]), architecture=architecture)
    for name, values in weights.items():
        kind = (kinds or {}).get(name)
        if kind is None:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quants.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
