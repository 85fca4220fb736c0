"""GGUF metadata -> the dictionary of a transformers config.json. It must not know tensors' contents or tokenizers.

Source of the keys: the GGUF specification and llama.cpp's conversion script; of the names: transformers 5's configs.
What changes a model's arithmetic and is not known here is refused by name, never passed over.
"""

import math
import struct
from typing import Any

from servekit.errors import ModelError
from servekit.store.gguf_metadata import GgufFile

_MODEL_TYPES = {
    "llama": ("llama", "LlamaForCausalLM"),
    "qwen2": ("qwen2", "Qwen2ForCausalLM"),
    "qwen3": ("qwen3", "Qwen3ForCausalLM"),
    "gemma2": ("gemma2", "Gemma2ForCausalLM"),
    "gemma3": ("gemma3_text", "Gemma3ForCausalLM"),
}
# The largest Gemmas scale attention by hidden size over heads instead of head size; only their depth tells.
_GEMMA_27B_LAYERS = {"gemma2": 46, "gemma3": 62}
_SLIDING_PATTERN = {"gemma2": 2, "gemma3": 6}
_GEMMA3_LOCAL_THETA = 10_000.0
# Llama 3.x: the three constants that every release shares; `factor` differs and is read from the file.
_LLAMA3_LOW, _LLAMA3_HIGH, _LLAMA3_CONTEXT = 1.0, 4.0, 8192
# Turn ends that older files do not announce as eot_token_id.
_TURN_ENDS = ("<|im_end|>", "<|eot_id|>", "<|eom_id|>", "<end_of_turn>")
_CONTROL = 3


def gguf_config(file: GgufFile) -> dict[str, Any]:
    """The model's configuration, as transformers would have stored it.

    Raises ModelError for an unknown architecture, a missing key, or a feature that is not read.
    """
    architecture = file.scalar("general.architecture")
    if architecture not in _MODEL_TYPES:
        raise ModelError(
            f"{file.path.name} is of architecture {architecture!r}, which is not read",
            hint=f"known architectures: {', '.join(_MODEL_TYPES)}",
        )
    keys = _Keys(file, architecture)
    model_type, class_name = _MODEL_TYPES[architecture]
    if keys.get("expert_count"):
        raise ModelError(f"{file.path.name} is a mixture of experts, which is not read")
    hidden_size, num_heads = int(keys("embedding_length")), int(keys("attention.head_count"))
    head_dim = int(keys.get("attention.key_length") or hidden_size // num_heads)
    if (value_dim := keys.get("attention.value_length")) not in (None, head_dim):
        raise ModelError(f"{file.path.name} has heads of {head_dim} for keys but {value_dim} for values; not read")
    if (rotary := keys.get("rope.dimension_count")) not in (None, head_dim):
        raise ModelError(f"{file.path.name} rotates only {rotary} of {head_dim} dimensions; not read")
    config: dict[str, Any] = {
        "architectures": [class_name],
        "model_type": model_type,
        "hidden_size": hidden_size,
        "num_hidden_layers": int(keys("block_count")),
        "num_attention_heads": num_heads,
        "num_key_value_heads": int(keys.get("attention.head_count_kv") or num_heads),
        "head_dim": head_dim,
        "intermediate_size": int(keys("feed_forward_length")),
        "rms_norm_eps": _shortest(keys("attention.layer_norm_rms_epsilon")),
        "max_position_embeddings": int(keys("context_length")),
        "vocab_size": _vocab_size(file),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.scalar("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.scalar("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.scalar("tokenizer.ggml.padding_token_id"),
    }
    if architecture.startswith("gemma"):
        config |= _gemma(keys, config)
    else:
        config |= {"hidden_act": "silu", "rope_parameters": _rope(keys)}
    if architecture == "llama":
        config |= {
            "attention_bias": "blk.0.attn_q.bias" in file.tensors,
            "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        }
    return config


def gguf_generation_config(file: GgufFile) -> dict[str, Any]:
    """The dictionary of a generation_config.json: every token that ends a turn or a text, and the BOS token."""
    ids = [file.scalar(f"tokenizer.ggml.{name}_token_id") for name in ("eos", "eot", "eom")]
    tokens, types = file.array("tokenizer.ggml.tokens") or [], file.array("tokenizer.ggml.token_type") or []
    ids += [index for index, kind in enumerate(types) if kind == _CONTROL and tokens[index] in _TURN_ENDS]
    return {
        "bos_token_id": file.scalar("tokenizer.ggml.bos_token_id"),
        "eos_token_id": list(dict.fromkeys(index for index in ids if index is not None)),
    }


class _Keys:
    """The scalars under one architecture's prefix; a call demands the key, get() does not."""

    def __init__(self, file: GgufFile, architecture: str) -> None:
        self.file = file
        self.architecture = architecture

    def get(self, name: str) -> Any:
        key = f"{self.architecture}.{name}"
        value = self.file.scalar(key)
        if value is None and key in self.file:
            raise ModelError(f"{self.file.path.name} gives {key} for each layer apart, which is not read")
        return value

    def __call__(self, name: str) -> Any:
        value = self.get(name)
        if value is None:
            raise ModelError(f"{self.file.path.name} does not say {self.architecture}.{name}")
        return value


def _vocab_size(file: GgufFile) -> int:
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ModelError(f"{file.path.name} has no token embedding")
    return embedding.shape[0]


def _gemma(keys: _Keys, config: dict[str, Any]) -> dict[str, Any]:
    architecture, num_layers = keys.architecture, config["num_hidden_layers"]
    large = num_layers == _GEMMA_27B_LAYERS[architecture]
    pattern = _SLIDING_PATTERN[architecture]
    rope: dict[str, Any] = _rope(keys)
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": _shortest(keys.get("rope.freq_base_swa") or _GEMMA3_LOCAL_THETA)}
        rope = {"full_attention": rope, "sliding_attention": local}
    attention_cap, final_cap = keys.get("attn_logit_softcapping"), keys.get("final_logit_softcapping")
    return {
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": config["hidden_size"] // config["num_attention_heads"]
        if large
        else config["head_dim"],
        "sliding_window": int(keys("attention.sliding_window")),
        "layer_types": [
            "full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(num_layers)
        ],
        "attn_logit_softcapping": None if attention_cap is None else _shortest(attention_cap),
        "final_logit_softcapping": None if final_cap is None else _shortest(final_cap),
        "rope_parameters": rope,
    }


def _rope(keys: _Keys) -> dict[str, Any]:
    theta = _shortest(keys.get("rope.freq_base") or 10_000.0)
    if "rope_freqs.weight" in keys.file.tensors:
        return _llama3_rope(keys.file, theta)
    kind, factor = keys.get("rope.scaling.type"), keys.get("rope.scaling.factor")
    if kind in (None, "none") or (kind == "linear" and factor in (None, 0.0, 1.0)):
        return {"rope_type": "default", "rope_theta": theta}
    if kind == "linear":
        return {"rope_type": "linear", "rope_theta": theta, "factor": _shortest(factor)}
    raise ModelError(f"{keys.file.path.name} uses rope scaling {kind!r}, which is not read")


def _llama3_rope(file: GgufFile, theta: float) -> dict[str, Any]:
    """Recover Llama 3's scaling from the divisors that the file holds for each frequency, and check that it is that."""
    tensor = file.tensors["rope_freqs.weight"]
    (count,) = tensor.shape
    if tensor.type_id != 0 or tensor.offset + 4 * count > len(file.data):
        raise ModelError(f"{file.path.name}: rope_freqs.weight is not {count} float32 numbers")
    stored = struct.unpack_from(f"<{count}f", file.data, tensor.offset)
    factor = _shortest(max(stored))
    expected = [_llama3_divisor(theta ** (index / count), factor) for index in range(count)]
    if not all(math.isclose(a, b, rel_tol=1e-4) for a, b in zip(stored, expected, strict=True)):
        raise ModelError(f"{file.path.name}: rope_freqs.weight is not Llama 3's rope scaling; other kinds are not read")
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": _LLAMA3_LOW,
        "high_freq_factor": _LLAMA3_HIGH,
        "original_max_position_embeddings": _LLAMA3_CONTEXT,
    }


def _llama3_divisor(inverse_frequency: float, factor: float) -> float:
    turns = _LLAMA3_CONTEXT / (2 * math.pi * inverse_frequency)
    if turns > _LLAMA3_HIGH:
        return 1.0
    if turns < _LLAMA3_LOW:
        return factor
    smooth = (turns - _LLAMA3_LOW) / (_LLAMA3_HIGH - _LLAMA3_LOW)
    return 1.0 / ((1.0 - smooth) / factor + smooth)


def _shortest(value: float) -> float:
    """The shortest decimal that is the same float32: files hold 9.999999747378752e-06 where 1e-5 was meant."""
    packed = struct.pack("<f", value)
    for digits in range(1, 10):
        short = float(f"{value:.{digits}g}")
        if struct.pack("<f", short) == packed:
            return short
    return value
