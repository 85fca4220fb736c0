"""A tiny random model of each encoder family, made by transformers, which is the oracle for ours."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import transformers

from tests.engine.families import TinyModel

_COMMON: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "cls_token_id": 1, "sep_token_id": 2}

ENCODERS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "bert": ("Bert", {}),
    "roberta": ("Roberta", {"type_vocab_size": 1}),
    "xlm-roberta": ("XLMRoberta", {"type_vocab_size": 1}),
    "distilbert": (
        "DistilBert",
        {"dim": 64, "hidden_dim": 96, "n_layers": 3, "n_heads": 4, "activation": "gelu"},
    ),
    "mpnet": ("MPNet", {}),
    "modernbert": ("ModernBert", {**_SPECIAL, "local_attention": 16, "num_hidden_layers": 5}),
    "modernbert-biased": (
        "ModernBert",
        {**_SPECIAL, "attention_bias": True, "mlp_bias": True, "norm_bias": True},
    ),
    "nomic": ("NomicBert", {}),
}
_NO_COMMON = {"distilbert": ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")}


def make_encoder(family: str, directory: Path, *, head: str = "AutoModel", **overrides: Any) -> TinyModel:
    """Write a random checkpoint of `family` into `directory`; `head` is the class of transformers that makes it."""
    name, differences = ENCODERS[family]
    torch.manual_seed(sum(map(ord, family)))
    common = {key: value for key, value in _COMMON.items() if key not in _NO_COMMON.get(family, ())}
    config = getattr(transformers, f"{name}Config")(**{**common, **differences, **overrides})
    config._attn_implementation = "eager"
    oracle: Any = getattr(transformers, head).from_config(config)
    oracle.eval().float()
    with torch.no_grad():
        for parameter in oracle.parameters():
            # Larger than the usual initialisation, biases and norms included: a mistake must show in the vectors.
            parameter.normal_(std=0.25)
    oracle.save_pretrained(directory)
    return TinyModel(directory, oracle)


@torch.inference_mode()
def hidden_states(tiny: TinyModel, token_ids: list[int]) -> torch.Tensor:
    """transformers' hidden states [T, hidden] of one text alone."""
    hidden: torch.Tensor = tiny.oracle(torch.tensor([token_ids])).last_hidden_state[0]
    return hidden
