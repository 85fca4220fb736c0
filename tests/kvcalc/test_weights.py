"""Weights: counted, quantised, and read from the headers of files."""

import json
import struct
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import ConfigError, ModelError
from servekit.kvcalc.checkpoint import StoredWeights, from_index, stored_weights
from servekit.kvcalc.model_shape import read_model_shape
from servekit.kvcalc.weights import Weights, weigh

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "tie_word_embeddings": False,
}
MIXTRAL: dict[str, Any] = {
    **LLAMA,
    "model_type": "mixtral",
    "vocab_size": 32000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}


def weights(config: dict[str, Any], **options: Any) -> Weights:
    return weigh(read_model_shape(config), **options)


@pytest.mark.parametrize(
    ("config", "parameters"),
    [
        (LLAMA, 8_030_261_248),
        ({**LLAMA, "num_key_value_heads": 32, "intermediate_size": 11008, "vocab_size": 32000}, 6_738_415_616),
        (
            {
                "model_type": "qwen3",
                "hidden_size": 1024,
                "num_hidden_layers": 28,
                "num_attention_heads": 16,
                "num_key_value_heads": 8,
                "head_dim": 128,
                "intermediate_size": 3072,
                "vocab_size": 151936,
                "tie_word_embeddings": True,
            },
            596_049_920,
        ),
        (
            {
                "model_type": "gemma3_text",
                "hidden_size": 1152,
                "num_hidden_layers": 26,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 256,
                "intermediate_size": 6912,
                "vocab_size": 262144,
                "sliding_window": 512,
                "sliding_window_pattern": 6,
            },
            999_885_952,
        ),
        (
            {
                "model_type": "gpt2",
                "n_layer": 12,
                "n_head": 12,
                "n_embd": 768,
                "n_positions": 1024,
                "vocab_size": 50257,
            },
            124_439_808,
        ),
        (
            {
                "model_type": "t5",
                "d_model": 512,
                "d_kv": 64,
                "d_ff": 2048,
                "num_heads": 8,
                "num_layers": 6,
                "num_decoder_layers": 6,
                "vocab_size": 32128,
            },
            60_506_624,
        ),
    ],
    ids=["Llama-3.1-8B", "Llama-2-7B", "Qwen3-0.6B", "Gemma-3-1B", "gpt2", "T5-small"],
)
def test_published_parameter_counts(config: dict[str, Any], parameters: int) -> None:
    found = weights(config)

    assert found.num_parameters == parameters
    assert found.source == "computed from config.json"


def test_a_mixture_of_experts_sets_memory_by_all_and_speed_by_some() -> None:
    found = weights(MIXTRAL)

    assert found.num_parameters == 46_702_792_704
    assert found.active_parameters == 12_879_925_248


def test_bytes_follow_the_dtype() -> None:
    assert weights(LLAMA).num_bytes == 2 * 8_030_261_248
    assert weights(LLAMA, weights_dtype="fp32").num_bytes == 4 * 8_030_261_248


def test_quantised_layers_leave_embedding_and_head_alone() -> None:
    embedding, norms = 2 * 128256 * 4096, 65 * 4096
    linear = 8_030_261_248 - embedding - norms

    assert weights(LLAMA, weights_dtype="int8").num_bytes == 2 * (embedding + norms) + linear


@pytest.mark.parametrize(
    ("declaration", "bits"),
    [
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 4 + 20 / 128),
        ({"quant_method": "awq", "w_bit": 4, "q_group_size": 64}, 4 + 20 / 64),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 8 + 32 / 128**2),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, 4.5),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, 8),
        ({"quant_method": "mxfp4"}, 4.25),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, 4.5),
        (
            {
                "quant_method": "compressed-tensors",
                "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 128, "symmetric": True}}},
            },
            4 + 16 / 128,
        ),
    ],
)
def test_bits_of_a_quantised_weight(declaration: dict[str, Any], bits: float) -> None:
    attention = 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)

    found = weights({**LLAMA, "quantization_config": declaration})

    assert found.part_bytes["attention"] == int(attention * bits / 8)


def test_a_skip_list_keeps_a_part_in_the_base_dtype() -> None:
    declaration = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}

    found = weights({**LLAMA, "quantization_config": declaration})

    assert found.part_bytes["attention"] == 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)
    assert found.part_bytes["mlp"] == int(32 * 3 * 4096 * 14336 * 4.25 / 8)


def test_a_skip_list_may_hold_expressions() -> None:
    declaration = {
        "quant_method": "compressed-tensors",
        "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"weights": {"num_bits": 4, "group_size": 32}}},
        "ignore": ["re:.*self_attn.*"],
    }

    found = weights({**LLAMA, "quantization_config": declaration})

    assert found.part_bytes["attention"] == 2 * 32 * (2 * 4096 * 4096 + 2 * 4096 * 1024)


def test_an_unknown_quantisation_leaves_the_size_unknown() -> None:
    found = weights({**LLAMA, "quantization_config": {"quant_method": "magic"}})

    assert found.num_bytes is None
    assert found.num_parameters == 8_030_261_248
    assert "quantization_config.quant_method is 'magic'" in found.source


def test_a_missing_size_leaves_the_weights_unknown() -> None:
    config = {name: value for name, value in LLAMA.items() if name != "vocab_size"}

    found = weights(config)

    assert (found.num_bytes, found.num_parameters) == (None, None)
    assert "vocab_size is missing" in found.source


def test_experts_that_are_not_counted_leave_the_weights_unknown() -> None:
    found = weights({**MIXTRAL, "num_local_experts": None})

    assert found.num_bytes is None


def test_a_vision_tower_is_estimated() -> None:
    vision = {"hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 128, "patch_size": 16}

    found = weights({"model_type": "llava", "text_config": LLAMA, "vision_config": vision})

    assert found.source == "estimated from config.json"
    assert (found.num_parameters or 0) > 8_030_261_248
    odd = weights({"model_type": "llava", "text_config": LLAMA, "vision_config": {"hidden_size": [1, 2]}})
    assert odd.num_parameters == 8_030_261_248


def test_an_unknown_weights_dtype_is_refused() -> None:
    with pytest.raises(ConfigError, match="unknown weights dtype 'int3'"):
        weights(LLAMA, weights_dtype="int3")


def write_safetensors(path: Path, tensors: dict[str, Any]) -> None:
    header = json.dumps({"__metadata__": {"format": "pt"}, **tensors}).encode()
    path.write_bytes(struct.pack("<Q", len(header)) + header)


def test_headers_are_summed_over_all_files(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"x": {"dtype": "BF16", "shape": [3, 4], "data_offsets": [0, 24]}})
    write_safetensors(tmp_path / "b.safetensors", {"y": {"dtype": "F32", "shape": [5], "data_offsets": [0, 20]}})

    assert stored_weights(tmp_path) == StoredWeights(44, 17, "safetensors headers")


def test_packed_tensors_are_not_counted_as_parameters(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "a.safetensors", {"x": {"dtype": "I32", "shape": [4], "data_offsets": [0, 16]}})

    assert stored_weights(tmp_path) == StoredWeights(16, None, "safetensors headers")


def test_the_index_speaks_for_files_that_are_not_here(tmp_path: Path) -> None:
    index = {"metadata": {"total_size": 1000}, "weight_map": {"x": "model-00001-of-00002.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")

    assert stored_weights(tmp_path) == StoredWeights(1000, None, "model.safetensors.index.json")


def test_an_index_without_sizes_says_nothing(tmp_path: Path) -> None:
    assert from_index({"metadata": {"total_size": "big"}}) is None
    assert stored_weights(tmp_path) is None


@pytest.mark.parametrize("data", [b"", b"\xff" * 8, struct.pack("<Q", 4) + b"{}", struct.pack("<Q", 9) + b'{"x": {}}'])
def test_a_broken_file_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "a.safetensors").write_bytes(data)

    with pytest.raises(ModelError, match=r"a\.safetensors is not a safetensors file"):
        stored_weights(tmp_path)


def test_stored_sizes_win_over_computed_ones() -> None:
    stored = StoredWeights(5_000_000_000, None, "model.safetensors.index.json")

    found = weights(LLAMA, stored=stored)

    assert (found.num_bytes, found.source) == (5_000_000_000, "model.safetensors.index.json")
    assert found.num_parameters == 8_030_261_248
    assert weights(LLAMA, stored=stored, weights_dtype="bf16").num_bytes == 2 * 8_030_261_248
