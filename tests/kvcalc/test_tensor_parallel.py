"""What one of several devices keeps."""

import pytest

from servekit.errors import ConfigError
from servekit.kvcalc.kv_formats import parse_kv_dtype
from servekit.kvcalc.memory import KvTerms, kv_terms
from servekit.kvcalc.model_shape import read_model_shape
from tests.kvcalc.published import ALL


def terms(name: str, num_devices: int) -> KvTerms:
    return kv_terms(read_model_shape(ALL[name][0]).per_device(num_devices), parse_kv_dtype("bf16"))


@pytest.mark.parametrize(("num_devices", "expected"), [(1, 131_072), (4, 32_768), (8, 16_384), (16, 16_384)])
def test_heads_divide_and_then_replicate(num_devices: int, expected: int) -> None:
    assert terms("Mixtral: window null", num_devices).bytes_per_token == expected


def test_the_latent_and_the_indexer_are_on_every_device() -> None:
    one = terms("DeepSeek-V3.2: indexer keys on every layer", 8)

    assert one.bytes_per_token == 70_272
    assert one.indexer_bytes_per_token == 8_052


def test_states_divide_but_a_single_group_is_extended() -> None:
    one = terms("Granite-4.0-H-Small", 4)

    assert one.state_bytes == 36 * ((2048 + 2 * 128) * 3 * 2 + 32 * 64 * 128 * 2)


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="8 KV heads cannot be divided over 3 devices"):
        terms("Mixtral: window null", 3)


def test_state_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ConfigError, match="heads cannot be divided over 32 devices"):
        terms("Qwen3-Next-80B: an interval instead of layer_types, fp32 state", 32)
