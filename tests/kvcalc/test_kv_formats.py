"""KV dtypes with their overheads, byte for byte."""

import pytest

from servekit.errors import ConfigError
from servekit.kvcalc.caches import AttentionCache, IndexerCache
from servekit.kvcalc.kv_formats import KV_DTYPES, parse_kv_dtype
from servekit.kvcalc.model_shape import read_model_shape

LAYER = AttentionCache(num_kv_heads=8, key_dim=128, value_dim=128)
LATENT = AttentionCache(num_kv_heads=1, key_dim=576, value_dim=0, is_latent=True)
ELEMENTS = 2 * 8 * 128


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("fp32", ELEMENTS * 4),
        ("bf16", ELEMENTS * 2),
        ("fp16", ELEMENTS * 2),
        ("fp8", ELEMENTS),
        ("int8", ELEMENTS),
        ("fp8_per_token_head", ELEMENTS + 2 * 8 * 4),
        ("int8_per_token_head", ELEMENTS + 2 * 8 * 4),
        ("mxfp8", ELEMENTS + ELEMENTS // 32),
        ("nvfp4", ELEMENTS // 2 + ELEMENTS // 16),
        ("q8_0", ELEMENTS * 34 // 32),
        ("q5_1", ELEMENTS * 3 // 4),
        ("q5_0", ELEMENTS * 11 // 16),
        ("q4_1", ELEMENTS * 5 // 8),
        ("q4_0", ELEMENTS * 18 // 32),
        ("iq4_nl", ELEMENTS * 18 // 32),
        ("q8_0/q4_0", 1024 * 34 // 32 + 1024 * 18 // 32),
    ],
)
def test_bytes_of_one_token_in_one_layer(name: str, expected: int) -> None:
    assert parse_kv_dtype(name).entry_bytes(LAYER) == expected


def test_a_row_that_does_not_fill_its_last_block_pays_for_it() -> None:
    assert parse_kv_dtype("q8_0").entry_bytes(AttentionCache(1, 40, 40)) == 2 * 2 * 34


def test_the_latent_is_stored_once() -> None:
    assert parse_kv_dtype("bf16").entry_bytes(LATENT) == 1152
    assert parse_kv_dtype("fp8").entry_bytes(LATENT) == 576
    assert parse_kv_dtype("fp8_ds_mla").entry_bytes(LATENT) == 656


@pytest.mark.parametrize(("name", "cache"), [("fp8_ds_mla", LAYER), ("int8_per_token_head", LATENT)])
def test_a_format_that_a_cache_cannot_have_is_refused(name: str, cache: AttentionCache) -> None:
    with pytest.raises(ConfigError, match=name):
        parse_kv_dtype(name).entry_bytes(cache)


def test_scaled_indexer_keys_do_not_follow_the_kv_dtype() -> None:
    for name in ("bf16", "fp8"):
        assert parse_kv_dtype(name).entry_bytes(IndexerCache(128, is_scaled_fp8=True)) == 132


@pytest.mark.parametrize("name", ["int7", "", "bf16/bf16/bf16", "fp8_ds_mla/bf16"])
def test_an_unknown_dtype_is_refused(name: str) -> None:
    with pytest.raises(ConfigError):
        parse_kv_dtype(name)


def test_every_alias_is_a_format() -> None:
    assert {KV_DTYPES[name].name for name in ("fp32", "f32", "bf16", "fp16", "f16", "half", "fp8_e4m3")} == {
        "float32",
        "bfloat16",
        "float16",
        "fp8",
    }


LLAMA = {"model_type": "llama", "num_hidden_layers": 1, "num_attention_heads": 8, "hidden_size": 512}


@pytest.mark.parametrize(
    ("declaration", "expected"),
    [
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}, "fp8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": {"num_bits": 8, "type": "int"}}, "int8"),
        ({"quant_method": "compressed-tensors", "kv_cache_scheme": None}, None),
        ({"quant_method": "modelopt", "kv_cache_quant_algo": "FP8"}, "fp8"),
        ({"quant_method": "fp8"}, None),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, None),
    ],
)
def test_the_declared_kv_dtype(declaration: dict[str, object], expected: str | None) -> None:
    assert read_model_shape({**LLAMA, "quantization_config": declaration}).declared_kv_dtype == expected


def test_the_declared_kv_dtype_of_a_file_beside() -> None:
    beside = {"quantization": {"quant_algo": "NVFP4", "kv_cache_quant_algo": "FP8"}}

    assert read_model_shape(LLAMA, quantization=beside).declared_kv_dtype == "fp8"


def test_an_unknown_declaration_is_refused() -> None:
    scheme = {"kv_cache_scheme": {"num_bits": 3, "type": "float"}}

    with pytest.raises(ConfigError, match=r"kv_cache_scheme\.num_bits declares an unknown KV cache scheme"):
        read_model_shape({**LLAMA, "quantization_config": scheme})
