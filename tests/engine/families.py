"""A tiny random model of each decoder family, made by transformers, which is the oracle for ours."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
_GEMMA3_ROPE = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1_000_000.0},
    "sliding_attention": {"rope_type": "default", "rope_theta": 10_000.0},
}

FAMILIES: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "llama": ("Llama", {"tie_word_embeddings": True}),
    "llama-biased": ("Llama", {"attention_bias": True, "mlp_bias": True, "tie_word_embeddings": False}),
    "llama3-rope": ("Llama", {"rope_parameters": _LLAMA3_ROPE, "head_dim": 32}),
    "llama-yarn": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "yarn",
                "factor": 4.0,
                "rope_theta": 10_000.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": 16, "tie_word_embeddings": False}),
    "qwen2": ("Qwen2", {"tie_word_embeddings": True}),
    "qwen2-sliding": ("Qwen2", {"use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}),
    "qwen3": ("Qwen3", {"head_dim": 32, "tie_word_embeddings": False}),
    "gemma2": (
        "Gemma2",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 24,
            "attn_logit_softcapping": 20.0,
            "final_logit_softcapping": 10.0,
        },
    ),
    "gemma3": (
        "Gemma3Text",
        {
            "head_dim": 32,
            "sliding_window": 16,
            "query_pre_attn_scalar": 32,
            "num_hidden_layers": 7,
            "rope_parameters": _GEMMA3_ROPE,
        },
    ),
}


@dataclass(frozen=True)
class TinyModel:
    """A checkpoint on disk and the transformers model that wrote it."""

    directory: Path
    oracle: Any

    @torch.inference_mode()
    def logits(self, token_ids: list[int]) -> torch.Tensor:
        """transformers' scores [T, vocab], eager attention, float32."""
        logits: torch.Tensor = self.oracle(torch.tensor([token_ids])).logits[0]
        return logits

    def greedy(self, token_ids: list[int], num_tokens: int) -> list[int]:
        """transformers' greedy continuation."""
        out = self.oracle.generate(
            torch.tensor([token_ids]), max_new_tokens=num_tokens, min_new_tokens=num_tokens, do_sample=False
        )
        ids: list[int] = out[0, len(token_ids) :].tolist()
        return ids


def make_tiny(family: str, directory: Path, **overrides: Any) -> TinyModel:
    """Write a random checkpoint of `family` into `directory`."""
    name, differences = FAMILIES[family]
    torch.manual_seed(sum(map(ord, family)))
    config = getattr(transformers, f"{name}Config")(**{**_COMMON, **differences, **overrides})
    config._attn_implementation = "eager"
    oracle: Any = transformers.AutoModelForCausalLM.from_config(config)  # type: ignore[no-untyped-call]
    oracle.eval().float()
    with torch.no_grad():
        for parameter in oracle.parameters():
            # Larger than the usual initialisation, biases and norms included: a mistake must show in the logits.
            parameter.normal_(std=0.25)
    oracle.save_pretrained(directory)
    return TinyModel(directory, oracle)
