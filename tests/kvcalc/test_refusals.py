"""What cannot be read with certainty is refused by name, or computed and marked as assumed."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from servekit.errors import ConfigError
from servekit.kvcalc.kv_formats import parse_kv_dtype
from servekit.kvcalc.memory import kv_terms
from servekit.kvcalc.model_shape import read_model_shape
from servekit.kvcalc.weights import weigh
from tests.kvcalc.published import ALL

LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}
LATENT: dict[str, Any] = {**LLAMA, "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", "32"),
        ("num_hidden_layers", -1),
        ("num_hidden_layers", 10**9),
        ("num_hidden_layers", 32.5),
        ("num_hidden_layers", True),
        ("num_attention_heads", 0),
        ("num_key_value_heads", 3),
        ("num_key_value_heads", [8]),
        ("hidden_size", 4095),
        ("hidden_size", {"a": 1}),
        ("head_dim", -64),
        ("model_type", "zzz"),
        ("model_type", 5),
        ("torch_dtype", "complex64"),
        ("layer_types", ["full_attention"]),
        ("layer_types", ["spectral_attention"] * 32),
        ("layer_types", ["linear_attention"] * 32),
        ("text_config", [1]),
        ("quantization_config", "fp8"),
        ("num_kv_shared_layers", 32),
        ("max_position_embeddings", "long"),
        ("sliding_window", "wide"),
        ("n_layer", 31),
    ],
)
def test_an_absurd_field_is_named(field: str, value: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        read_model_shape({**LLAMA, field: value})

    known_by = "num_hidden_layers" if field == "n_layer" else field
    assert known_by in caught.value.message
    assert "\n" not in caught.value.message


@pytest.mark.parametrize("field", ["num_hidden_layers", "num_attention_heads", "hidden_size"])
def test_a_missing_field_is_named(field: str) -> None:
    config = {name: value for name, value in LLAMA.items() if name != field}

    with pytest.raises(ConfigError, match=f"{field}.* is missing"):
        read_model_shape(config)


def test_mla_is_never_taken_for_grouped_heads() -> None:
    with pytest.raises(ConfigError, match="kv_lora_rank is missing"):
        read_model_shape({**LATENT, "kv_lora_rank": None})


def test_an_empty_config_is_refused() -> None:
    with pytest.raises(ConfigError, match="num_hidden_layers is missing"):
        read_model_shape({})


def test_a_nested_field_is_named_with_its_level() -> None:
    with pytest.raises(ConfigError, match=r"field text_config\.hidden_size must be an integer, not 'x'"):
        read_model_shape({"model_type": "llava", "text_config": {**LLAMA, "hidden_size": "x"}})


def test_an_unknown_model_type_is_computed_only_when_asked_and_marked() -> None:
    shape = read_model_shape({**LLAMA, "model_type": "zzz"}, assume="gqa")

    assert kv_terms(shape, parse_kv_dtype("bf16")).bytes_per_token == 131_072
    assert shape.assumed == ("model_type 'zzz' is not known: full grouped-query attention on all layers",)


def test_an_unknown_layer_type_is_computed_only_when_asked_and_marked() -> None:
    config = {**LLAMA, "layer_types": ["spectral_attention"] * 31 + ["full_attention"]}

    shape = read_model_shape(config, assume="gqa")

    assert kv_terms(shape, parse_kv_dtype("bf16")).bytes_per_token == 131_072
    assert shape.assumed == ("layer_types 'spectral_attention': full grouped-query attention",)


def test_assume_changes_nothing_for_a_known_model() -> None:
    assert read_model_shape(LATENT, assume="gqa") == read_model_shape(LATENT)


def test_the_architecture_stands_in_for_a_missing_model_type() -> None:
    config = {name: value for name, value in LLAMA.items() if name != "model_type"}

    shape = read_model_shape({**config, "architectures": ["LlamaForCausalLM"]})

    assert (shape.model_type, shape.assumed) == ("llama", ())
    assert "model_type is absent: llama, from architectures" in shape.notes


def test_without_type_and_architecture_the_result_is_marked() -> None:
    config = {name: value for name, value in LLAMA.items() if name != "model_type"}

    assert read_model_shape(config).assumed != ()


def test_without_type_a_recurrent_model_is_refused() -> None:
    config = {**LLAMA, "mamba_d_state": 128}
    del config["model_type"]

    with pytest.raises(ConfigError, match="model_type is missing, and mamba_d_state cannot be read without it"):
        read_model_shape(config)


def test_what_was_filled_in_is_said() -> None:
    shape = read_model_shape({**LLAMA, "num_key_value_heads": None})

    assert "num_key_value_heads is absent: one for each of the 32 query heads" in shape.notes


def test_mutated_configs_are_refused_by_name_or_answered() -> None:
    rng = random.Random(20)
    changes: list[Callable[[], Any]] = [
        lambda: None,
        lambda: -rng.randrange(1, 10**6),
        lambda: "many",
        lambda: 10 ** rng.choice([9, 30, 300]),
        lambda: {"deep": {"deeper": [1]}},
        lambda: [None, 1, "x"],
        lambda: 3.5,
        lambda: True,
        lambda: "",
    ]
    refused = 0
    for _ in range(300):
        config, _ = rng.choice(list(ALL.values()))
        level = rng.choice([config, *(value for value in config.values() if isinstance(value, dict))])
        field = rng.choice(list(level))
        mutated = dict(level)
        if rng.random() < 0.2:
            del mutated[field]
        else:
            mutated[field] = rng.choice(changes)()
        whole = mutated if level is config else {k: mutated if v is level else v for k, v in config.items()}
        error = refusal(whole)
        refused += error is not None
        assert error is None or error.param, error
    assert 100 < refused < 300


def refusal(config: dict[str, Any]) -> ConfigError | None:
    """The error that a config is refused with, or None when it is answered; nothing else may be raised."""
    try:
        shape = read_model_shape(config)
        kv_terms(shape, parse_kv_dtype("bf16"))
        weigh(shape)
    except ConfigError as error:
        return error
    return None
