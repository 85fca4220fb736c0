"""Checkpoints that must be refused, and the spellings that must all be read alike."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from servekit.engine.models.parameters import check_parameters
from servekit.engine.models.weights import SafetensorsSource
from servekit.engine.spec.families import read_decoder_spec
from servekit.errors import ModelError
from tests.engine.families import make_tiny
from tests.engine.stepping import Stepper, load_decoder

_INDEX = "model.safetensors.index.json"


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    return config


def _rewrite(directory: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def _write_config(directory: Path, **changes: Any) -> None:
    config = {**_config(directory), **changes}
    (directory / "config.json").write_text(json.dumps(config), encoding="utf-8")


def _refusal(directory: Path) -> str:
    with pytest.raises(ModelError) as caught:
        load_decoder(directory)
    assert caught.value.exit_code == 2
    return caught.value.message


def _greedy(directory: Path, prompt: list[int]) -> list[int]:
    stepper = Stepper(load_decoder(directory))
    stepper.add("a", prompt, max_tokens=16, ignore_eos=True)
    return stepper.drain()["a"]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    make_tiny("llama", tmp_path).oracle.save_pretrained(tmp_path, max_shard_size="60KB")
    (tmp_path / "model.safetensors").unlink(missing_ok=True)
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    return tmp_path


def test_shards_give_the_same_model_as_one_file(tmp_path: Path, sharded: Path) -> None:
    tiny = make_tiny("llama", tmp_path / "whole")
    assert _greedy(sharded, [3, 4, 5]) == tiny.greedy([3, 4, 5], 16)


def test_a_missing_shard_is_named(sharded: Path) -> None:
    gone = sorted(sharded.glob("*.safetensors"))[1]
    gone.unlink()
    total = len(set(json.loads((sharded / _INDEX).read_text(encoding="utf-8"))["weight_map"].values()))
    assert _refusal(sharded) == f"1 of {total} weight files are missing: {gone.name}"


def test_a_truncated_shard_is_named(sharded: Path) -> None:
    file = sorted(sharded.glob("*.safetensors"))[0]
    file.write_bytes(file.read_bytes()[:-100])
    assert _refusal(sharded).startswith(f"{file.name} is not a readable safetensors file")


@pytest.mark.parametrize("shard", ["../evil.safetensors", "/etc/x.safetensors", "model.bin", 3])
def test_an_index_that_leads_elsewhere_is_refused(sharded: Path, shard: object) -> None:
    index = json.loads((sharded / _INDEX).read_text(encoding="utf-8"))
    index["weight_map"][next(iter(index["weight_map"]))] = shard
    (sharded / _INDEX).write_text(json.dumps(index), encoding="utf-8")
    assert "must map tensor names to .safetensors files beside it" in _refusal(sharded)


def test_pickled_weights_alone_are_refused(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    assert "pytorch_model.bin could run code" in _refusal(tmp_path)


def test_missing_unknown_and_misshapen_tensors_are_listed(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)

    def change(tensors: dict[str, torch.Tensor]) -> None:
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.mystery"] = torch.zeros(1)
        tensors["model.norm.weight"] = torch.zeros(63)

    _rewrite(tmp_path, change)
    assert _refusal(tmp_path) == (
        "the checkpoint does not fit its config.json: "
        "1 tensors missing (model.layers.1.mlp.up_proj.weight); "
        "1 tensors not known (model.layers.0.mystery); "
        "1 tensors of the wrong shape (model.norm.weight is [63], not [64])"
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.float64])
def test_numbers_are_what_load_gives(tmp_path: Path, dtype: torch.dtype) -> None:
    """In files of mixed dtypes, and for a tensor without elements or dimensions too."""
    values = torch.randn(7, 9, generator=torch.Generator().manual_seed(3))
    tensors = {
        "a": values.to(dtype),
        "b": values[0].clone(),
        "c": values[1].to(dtype).clone(),
        "d": torch.tensor(2.5).to(dtype),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    source = SafetensorsSource(tmp_path)
    for name, tensor in tensors.items():
        assert source.numbers(name).dtype == np.float32
        np.testing.assert_array_equal(source.numbers(name), tensor.float().numpy())
        assert torch.equal(source.load(name), tensor)


def test_rotary_tables_of_old_exports_are_ignored(tmp_path: Path) -> None:
    tiny = make_tiny("llama", tmp_path)
    _rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}))
    assert _greedy(tmp_path, [9, 8, 7]) == tiny.greedy([9, 8, 7], 16)


def test_a_quantised_checkpoint_is_refused_by_name(tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    _write_config(tmp_path, quantization_config={"quant_method": "gptq"})
    assert "quantization_config is set" in _refusal(tmp_path)


class TestTiedHead:
    """The output head may be the embedding, or not, or both be there."""

    def test_tied_without_a_stored_head(self, tmp_path: Path) -> None:
        tiny = make_tiny("llama", tmp_path)
        assert "lm_head.weight" not in SafetensorsSource(tmp_path).shapes()
        assert _greedy(tmp_path, [5]) == tiny.greedy([5], 16)

    def test_untied_without_a_stored_head_is_refused(self, tmp_path: Path) -> None:
        make_tiny("llama", tmp_path)
        _write_config(tmp_path, tie_word_embeddings=False)
        assert "1 tensors missing (lm_head.weight)" in _refusal(tmp_path)

    def test_tied_with_another_head_stored_follows_the_config_and_warns(self, tmp_path: Path) -> None:
        tiny = make_tiny("llama", tmp_path)
        _rewrite(tmp_path, lambda tensors: tensors.update({"lm_head.weight": torch.ones(131, 64)}))
        (warning,) = check_parameters(read_decoder_spec(_config(tmp_path)), SafetensorsSource(tmp_path).shapes())
        assert "lm_head.weight is not used" in warning
        assert _greedy(tmp_path, [5]) == tiny.greedy([5], 16)

    @pytest.mark.parametrize(("family", "tied"), [("llama", False), ("qwen2", False), ("gemma2", True)])
    def test_a_missing_key_means_the_familys_default(self, family: str, tied: bool, tmp_path: Path) -> None:
        make_tiny(family, tmp_path)
        config = _config(tmp_path)
        config.pop("tie_word_embeddings", None)
        assert read_decoder_spec(config).tie_embeddings is tied


class TestRopeSpellings:
    """The same embedding has been written in four ways."""

    _NUMBERS: ClassVar = {"factor": 4.0, "original_max_position_embeddings": 64}

    @pytest.mark.parametrize(
        "fields",
        [
            {"rope_theta": 5e4, "rope_scaling": {"type": "yarn", **_NUMBERS}},
            {"rope_theta": 5e4, "rope_scaling": {"rope_type": "yarn", **_NUMBERS}},
            {"rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **_NUMBERS}},
            {
                "rope_theta": 5e4,
                "rope_scaling": {"type": "yarn", **_NUMBERS},
                "rope_parameters": {"rope_type": "yarn", "rope_theta": 5e4, **_NUMBERS},
            },
        ],
        ids=["type", "rope_type", "rope_parameters", "both"],
    )
    def test_give_the_same_logits_past_the_original_length(self, fields: dict[str, Any], tmp_path: Path) -> None:
        tiny = make_tiny("llama", tmp_path, rope_parameters={"rope_type": "yarn", "rope_theta": 5e4, **self._NUMBERS})
        config = {name: value for name, value in _config(tmp_path).items() if not name.startswith("rope_")}
        (tmp_path / "config.json").write_text(json.dumps({**config, **fields}), encoding="utf-8")
        prompt = [3 + i % 120 for i in range(200)]
        assert _greedy(tmp_path, prompt) == tiny.greedy(prompt, 16)

    @pytest.mark.parametrize(
        ("fields", "message"),
        [
            ({"rope_scaling": {"rope_type": "zzz"}}, "rope type 'zzz' is not known"),
            ({"rope_scaling": {"type": "llama3", "factor": 8.0}}, "needs low_freq_factor, high_freq_factor"),
            (
                {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_parameters": {"rope_type": "default"}},
                "rope_scaling and rope_parameters contradict each other",
            ),
            ({"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e6}}, "rope_theta is given twice"),
            ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is not offered"),
        ],
    )
    def test_what_cannot_be_honoured_is_named(self, fields: dict[str, Any], message: str, tmp_path: Path) -> None:
        make_tiny("llama", tmp_path)
        config = {name: value for name, value in _config(tmp_path).items() if not name.startswith("rope_")}
        (tmp_path / "config.json").write_text(json.dumps({**config, **fields}), encoding="utf-8")
        assert message in _refusal(tmp_path)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "mamba"}, "model_type 'mamba' is not one servekit can run"),
        ({"model_type": None}, "model_type None is not one"),
        ({"hidden_size": None}, "hidden_size must be a positive whole number, not None"),
        ({"num_hidden_layers": "4"}, "num_hidden_layers must be a positive whole number, not '4'"),
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not a multiple of 3 KV heads"),
        ({"head_dim": 15}, "head_dim 15 is odd"),
        ({"hidden_act": "mish"}, "hidden_act 'mish' is not known"),
        ({"rms_norm_eps": "small"}, "rms_norm_eps must be a number, not 'small'"),
    ],
)
def test_a_config_that_cannot_work_is_named_by_field(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    make_tiny("llama", tmp_path)
    _write_config(tmp_path, **changes)
    assert message in _refusal(tmp_path)
