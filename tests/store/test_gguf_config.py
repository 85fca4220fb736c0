import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoConfig

from servekit.errors import ModelError
from servekit.store.gguf_config import gguf_config, gguf_generation_config
from servekit.store.gguf_metadata import GgufFile
from tests.store.gguf_files import HEAD_DIM, HIDDEN, byte_level_vocabulary, tensors, write_gguf

VOCAB = len(byte_level_vocabulary()["tokens"])


def config_of(path: Path) -> dict[str, Any]:
    with GgufFile(path) as file:
        return gguf_config(file)


def test_llama(tmp_path: Path) -> None:
    assert config_of(write_gguf(tmp_path / "m.gguf")) == {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "intermediate_size": 96,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 128,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": None,
        "hidden_act": "silu",
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
        "attention_bias": False,
        "mlp_bias": False,
    }


@pytest.mark.parametrize(
    ("architecture", "model_type"),
    [("qwen2", "qwen2"), ("qwen3", "qwen3"), ("gemma2", "gemma2"), ("gemma3", "gemma3_text")],
)
def test_other_families(tmp_path: Path, architecture: str, model_type: str) -> None:
    config = config_of(write_gguf(tmp_path / "m.gguf", architecture=architecture))
    assert config["model_type"] == model_type
    assert config["head_dim"] == HEAD_DIM


@pytest.mark.parametrize("architecture", ["llama", "qwen2", "qwen3", "gemma2", "gemma3"])
def test_transformers_understands_the_config(tmp_path: Path, architecture: str) -> None:
    config = config_of(write_gguf(tmp_path / "m.gguf", architecture=architecture))
    theirs = AutoConfig.for_model(**config).to_dict()
    assert {key: theirs[key] for key in config} == config


def test_gemma_layers(tmp_path: Path) -> None:
    extra = {"gemma2.attn_logit_softcapping": 50.0, "gemma2.final_logit_softcapping": 30.0}
    config = config_of(write_gguf(tmp_path / "m.gguf", architecture="gemma2", extra=extra))
    assert config["layer_types"] == ["sliding_attention", "full_attention"]
    assert config["sliding_window"] == 32
    assert (config["attn_logit_softcapping"], config["final_logit_softcapping"]) == (50.0, 30.0)
    assert config["query_pre_attn_scalar"] == HEAD_DIM
    config = config_of(write_gguf(tmp_path / "n.gguf", architecture="gemma3"))
    assert config["layer_types"] == ["sliding_attention", "sliding_attention"]
    assert config["rope_parameters"] == {
        "full_attention": {"rope_type": "default", "rope_theta": 10000.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    }


def test_a_separate_head_unties(tmp_path: Path) -> None:
    weights = tensors(vocab_size=VOCAB)
    weights["output.weight"] = weights["token_embd.weight"] + 1
    assert config_of(write_gguf(tmp_path / "m.gguf", weights=weights))["tie_word_embeddings"] is False


def test_linear_scaling(tmp_path: Path) -> None:
    extra = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    config = config_of(write_gguf(tmp_path / "m.gguf", extra=extra))
    assert config["rope_parameters"] == {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}


def llama3_divisors(factor: float) -> np.ndarray[Any, np.dtype[np.float32]]:
    """As llama.cpp's conversion computes them from the original configuration."""
    divisors = []
    for index in range(0, HEAD_DIM, 2):
        wavelength = 2 * math.pi * 10000.0 ** (index / HEAD_DIM)
        if wavelength < 8192 / 4:
            divisors.append(1.0)
        elif wavelength > 8192 / 1:
            divisors.append(factor)
        else:
            smooth = (8192 / wavelength - 1) / 3
            divisors.append(1 / ((1 - smooth) / factor + smooth))
    return np.array(divisors, np.float32)


@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_llama3_scaling_is_recovered(tmp_path: Path, factor: float) -> None:
    divisors = llama3_divisors(factor)
    assert 1.0 < divisors[-2] < factor or divisors[-1] == factor
    weights = tensors(vocab_size=VOCAB) | {"rope_freqs.weight": divisors}
    assert config_of(write_gguf(tmp_path / "m.gguf", weights=weights))["rope_parameters"] == {
        "rope_type": "llama3",
        "rope_theta": 10000.0,
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }


def test_other_rope_divisors_are_refused(tmp_path: Path) -> None:
    weights = tensors(vocab_size=VOCAB) | {"rope_freqs.weight": np.linspace(1, 9, HEAD_DIM // 2, dtype=np.float32)}
    with pytest.raises(ModelError, match="rope_freqs"):
        config_of(write_gguf(tmp_path / "m.gguf", weights=weights))


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({"llama.expert_count": 8}, "mixture of experts"),
        ({"llama.rope.scaling.type": "yarn", "llama.rope.scaling.factor": 4.0}, "'yarn'"),
        ({"llama.rope.dimension_count": 8}, "rotates only 8 of 16"),
        ({"llama.attention.value_length": 8}, "8 for values"),
    ],
)
def test_what_is_not_read_is_named(tmp_path: Path, extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message):
        config_of(write_gguf(tmp_path / "m.gguf", extra=extra))


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'mamba'") as caught:
        config_of(write_gguf(tmp_path / "m.gguf", architecture="mamba"))
    assert caught.value.hint == "known architectures: llama, qwen2, qwen3, gemma2, gemma3"


def test_every_token_that_ends_a_turn_is_an_eos(tmp_path: Path) -> None:
    extra = {"tokenizer.ggml.eot_token_id": 0}
    vocabulary = byte_level_vocabulary()
    vocabulary["eos"] = 5
    path = write_gguf(tmp_path / "m.gguf", vocabulary=vocabulary, extra=extra)
    with GgufFile(path) as file:
        assert gguf_generation_config(file) == {"bos_token_id": 1, "eos_token_id": [5, 0, 2]}


def test_hidden_size_is_not_the_head_size(tmp_path: Path) -> None:
    config = config_of(write_gguf(tmp_path / "m.gguf", architecture="qwen3"))
    assert config["head_dim"] * config["num_attention_heads"] == HIDDEN
