"""Bytes of requests and of the engine's pool."""

import pytest

from servekit.errors import ConfigError
from servekit.kvcalc.kv_formats import parse_kv_dtype
from servekit.kvcalc.memory import kv_block_bytes, kv_terms, plan_pool, request_bytes
from servekit.kvcalc.model_shape import ModelShape, read_model_shape
from tests.kvcalc.published import ALL

BF16 = parse_kv_dtype("bf16")


def shape_of(name: str) -> ModelShape:
    return read_model_shape(ALL[name][0])


def test_gemma3_below_and_above_its_window() -> None:
    text = {
        "hidden_size": 2560,
        "num_hidden_layers": 34,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 1024,
        "sliding_window_pattern": 6,
    }
    vision = {"hidden_size": 1152, "num_hidden_layers": 27, "num_attention_heads": 16}
    shape = read_model_shape({"model_type": "gemma3", "text_config": text, "vision_config": vision})

    assert request_bytes(shape, BF16, num_tokens=8192) == 289_406_976
    assert request_bytes(shape, BF16, num_tokens=512) == 71_303_168


def test_mla_at_a_long_context() -> None:
    assert request_bytes(shape_of("DeepSeek-V3"), BF16, num_tokens=32_768) == 2_302_672_896


def test_the_state_is_paid_once() -> None:
    shape = shape_of("Qwen3-Next-80B: an interval instead of layer_types, fp32 state")

    assert request_bytes(shape, BF16, num_tokens=100) == 77_266_944 + 100 * 24_576


def test_cross_attention_is_paid_by_source_token() -> None:
    shape = shape_of("T5-small: d_kv, num_heads, num_decoder_layers")

    assert request_bytes(shape, BF16, num_tokens=10, source_tokens=100) == 110 * 12_288


def test_compressed_keys_are_paid_by_whole_entries() -> None:
    shape = shape_of("DeepSeek-V4: ratios longer than the layers")
    window, sparse, heavy = 43 * 512 * 2, 21 * (512 + 128) * 2, 20 * 512 * 2

    assert request_bytes(shape, BF16, num_tokens=5) == 5 * window + 2 * sparse + heavy


def test_blocks_round_up_and_windows_do_too() -> None:
    shape = shape_of("gpt-oss-20b")

    assert request_bytes(shape, BF16, num_tokens=17, block_size=16) == 24 * 2048 * 32
    assert request_bytes(shape, BF16, num_tokens=1000, block_size=256) == 12 * 2048 * (1024 + 256)


@pytest.mark.parametrize(("dtype", "size"), [("float32", 4), ("bfloat16", 2), ("float16", 2), ("bf16", 2)])
def test_a_block_holds_all_layers(dtype: str, size: int) -> None:
    shape = shape_of("Qwen2.5-0.5B: the window is switched off")

    assert kv_block_bytes(shape, block_size=16, kv_dtype=dtype) == 16 * 24 * 2 * 2 * 64 * size


def test_the_pool_pays_for_sliding_layers_in_full() -> None:
    shape = shape_of("gpt-oss-20b")

    assert kv_block_bytes(shape, block_size=16, kv_dtype="bf16") == 16 * 24 * 2048
    assert kv_terms(shape, BF16).bytes_per_token == 12 * 2048


def test_the_pool_reserves_one_block() -> None:
    shape = shape_of("Qwen2.5-0.5B: the window is switched off")
    block_bytes = 16 * 12_288

    plan = plan_pool(shape, kv_memory=101 * block_bytes + 5, block_size=16, kv_dtype="bf16", max_model_len=500)

    assert (plan.block_bytes, plan.bytes_per_token) == (block_bytes, 12_288)
    assert (plan.num_blocks, plan.kv_bytes, plan.num_tokens) == (101, 101 * block_bytes, 1600)
    assert (plan.max_model_len, plan.max_seqs_at_context) == (500, 100 // 32)


def test_a_small_pool_shortens_the_context() -> None:
    shape = shape_of("Qwen2.5-0.5B: the window is switched off")

    plan = plan_pool(shape, kv_memory=3 * 16 * 12_288, block_size=16, kv_dtype="bf16", max_model_len=32_768)

    assert (plan.max_model_len, plan.max_seqs_at_context) == (32, 1)


def test_one_block_is_not_enough() -> None:
    shape = shape_of("Qwen2.5-0.5B: the window is switched off")

    with pytest.raises(ConfigError, match=r"300,000 bytes of KV memory hold 1 blocks of 196,608 .* \(393,216 bytes\)"):
        plan_pool(shape, kv_memory=300_000, block_size=16, kv_dtype="bf16", max_model_len=100)


def test_a_model_without_keys_has_no_pool() -> None:
    with pytest.raises(ConfigError, match="keeps no keys and values"):
        plan_pool(shape_of("BERT keeps nothing"), kv_memory=2**30, block_size=16, kv_dtype="bf16", max_model_len=512)
