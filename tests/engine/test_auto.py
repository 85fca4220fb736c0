"""The choices that are left open: what is chosen from which facts, and the reason given."""

from dataclasses import replace
from typing import Any

import pytest

from servekit.config import EngineConfig
from servekit.engine.auto import (
    ComputeFacts,
    MemoryFacts,
    QuantizeFacts,
    check_rounding,
    resolve_compute,
    resolve_memory,
    resolve_quantize,
)
from servekit.errors import ConfigError


def _facts(linear: float = 1.0, attention: float = 1.0, head_dim: int = 64) -> ComputeFacts:
    return ComputeFacts(
        "cpu", threads=2, batched_tokens=256, linear_ratio=linear, attention_ratio=attention, head_dim=head_dim
    )


@pytest.mark.parametrize(
    ("dtype", "kv_dtype", "linear", "attention", "expected"),
    [
        ("auto", "auto", 0.4, 1.0, ("bfloat16", "bfloat16")),
        ("auto", "auto", 3.0, 1.0, ("float32", "float32")),
        ("auto", "auto", 3.0, 0.5, ("float32", "bfloat16")),
        ("auto", "auto", 0.9, 0.9, ("float32", "float32")),
        ("float32", "auto", 0.4, 0.4, ("float32", "float32")),
        ("bfloat16", "auto", 3.0, 3.0, ("bfloat16", "bfloat16")),
        ("float32", "bfloat16", 1.0, 1.0, ("float32", "bfloat16")),
        ("auto", "float32", 0.4, 0.4, ("bfloat16", "float32")),
    ],
)
def test_dtypes_follow_the_measurement(
    dtype: str, kv_dtype: str, linear: float, attention: float, expected: tuple[str, str]
) -> None:
    config, reasons = resolve_compute(
        EngineConfig(dtype=dtype, kv_dtype=kv_dtype, quantize="none"),  # type: ignore[arg-type]
        _facts(linear, attention),
        8192,
    )
    assert (config.dtype, config.kv_dtype) == expected
    assert ("dtype" in reasons, "kv_dtype" in reasons) == (dtype == "auto", kv_dtype == "auto")


@pytest.mark.parametrize(
    ("choices", "expected"),
    [
        ({}, ("bfloat16", "bfloat16")),
        ({"kv_dtype": "float32"}, ("bfloat16", "float32")),
        ({"dtype": "float32"}, ("float32", "float32")),
        ({"attention": "sdpa"}, ("float32", "float32")),
    ],
)
def test_kernels_that_are_quick_at_bfloat16_need_no_measurement(
    choices: dict[str, Any], expected: tuple[str, str]
) -> None:
    facts = replace(_facts(3.0, 3.0), bfloat16_kernels=True)
    config, _ = resolve_compute(EngineConfig(quantize="none", **choices), facts, 8192)
    assert (config.dtype, config.kv_dtype) == expected


def test_open_limits_come_from_model_and_machine() -> None:
    config, reasons = resolve_compute(EngineConfig(parallel=300), _facts(), 8192)
    assert (config.max_model_len, config.threads, config.max_num_batched_tokens) == (8192, 2, 300)
    assert reasons["max_model_len"] == "8192: the model's own context"


def test_given_limits_stay_and_need_no_reason() -> None:
    given = EngineConfig(
        max_model_len=100, threads=7, max_num_batched_tokens=64, dtype="float32", kv_dtype="float32", device="cpu"
    )
    assert resolve_compute(given, _facts(), 8192) == (given, {})


def test_kv_memory_is_what_the_slots_can_use_when_that_is_free() -> None:
    config = EngineConfig(parallel=4, max_model_len=100)
    resolved, reasons = resolve_memory(config, MemoryFacts(10**9, 0.25, bytes_per_token=1000, block_size=16))
    # 7 blocks of 16 hold 100 tokens; 4 sequences need 28, and one is the null block.
    assert (resolved.kv_memory, resolved.block_size) == (29 * 16 * 1000, 16)
    assert "all that 4 sequences of 100 tokens can use" in reasons["kv_memory"]


def test_kv_memory_is_a_share_of_free_memory_otherwise() -> None:
    config = EngineConfig(parallel=4, max_model_len=100_000)
    resolved, reasons = resolve_memory(config, MemoryFacts(2**30, 0.25, bytes_per_token=1000, block_size=16))
    assert resolved.kv_memory == 2**28
    assert reasons["kv_memory"] == "256.0 MiB: 25% of the 1.0 GiB that are free"


@pytest.mark.parametrize(
    ("attention", "given", "expected"),
    [
        ("auto", {}, ("float32", "q8_0")),
        ("native", {"kv_dtype": "float32"}, ("float32", "float32")),
        ("sdpa", {}, ("float32", "float32")),
        ("auto", {"dtype": "float32"}, ("float32", "q8_0")),
        ("auto", {"quantize": "int8"}, ("float32", "bfloat16")),
        ("native", {"kv_dtype": "bfloat16"}, ("float32", "bfloat16")),
    ],
)
def test_quantised_weights_need_no_measurement(
    attention: str, given: dict[str, str], expected: tuple[str, str]
) -> None:
    config = EngineConfig(**{"quantize": "int4", "attention": attention, **given})  # type: ignore[arg-type]
    resolved, reasons = resolve_compute(config, _facts(0.1, 0.1), 8192)
    assert (resolved.dtype, resolved.kv_dtype) == expected
    assert {"dtype", "kv_dtype"} - reasons.keys() == given.keys() - {"quantize"}


@pytest.mark.parametrize(
    ("head_dim", "block_size", "expected", "why"),
    [
        (96, None, "q8_0", "half the bytes of bfloat16"),
        (64, 48, "q8_0", "half the bytes of bfloat16"),
        (80, None, "bfloat16", "q8_0 has a scale for every 32 numbers of a head, and a head has 80 here"),
        (64, 8, "bfloat16", "q8_0 keeps tiles of 16 tokens, and --block-size 8 was asked for"),
    ],
)
def test_keys_and_values_take_eight_bits_where_they_lie_in_them(
    head_dim: int, block_size: int | None, expected: str, why: str
) -> None:
    config = EngineConfig(quantize="int4", block_size=block_size)
    resolved, reasons = resolve_compute(config, _facts(head_dim=head_dim), 8192)
    assert resolved.kv_dtype == expected
    assert reasons["kv_dtype"].startswith(f"{expected}: ")
    assert why in reasons["kv_dtype"]


def _kernels(*stored: str, problem: str | None = None, device: str = "cpu") -> QuantizeFacts:
    return QuantizeFacts(device, problem, frozenset(stored))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "facts", "expected"),
    [
        ({}, _kernels("Q4_1"), "int4: the four-bit blocks of the file as they are"),
        ({}, _kernels("Q4_K"), "int4: the four-bit blocks of the file as they are"),
        (
            {},
            _kernels("Q4_K", "Q6_K"),
            "int4: the four-bit blocks of the file as they are, and what has more bits as int8",
        ),
        ({}, _kernels("Q8_0"), "int8: the file's own blocks have more than four bits"),
        ({}, _kernels("Q5_1", "Q6_K"), "int8: the file's own blocks have more than four bits"),
        ({}, _kernels("float"), "int8: half the bytes of bfloat16"),
        ({}, _kernels("float", "Q4_0"), "int8: half the bytes of bfloat16"),
        ({"attention": "native"}, _kernels("Q4_0"), "int4: the four-bit blocks of the file as they are"),
        ({"dtype": "float32"}, _kernels("Q4_0"), "none: --dtype float32 was asked for"),
        ({"attention": "sdpa"}, _kernels("Q4_0"), "none: --attention sdpa was asked for"),
        ({"quantize": "none"}, _kernels("Q4_0"), "none: asked for"),
        ({"quantize": "int8"}, _kernels("Q4_0"), "int8: asked for"),
        ({"quantize": "int4", "attention": "reference", "dtype": "float32"}, _kernels("float"), "int4: asked for"),
        (
            {},
            _kernels("Q4_0", problem="there are no kernels"),
            "none: there are no kernels; for int8 and int4, install a C compiler (gcc or clang), then servekit again "
            "from its sources",
        ),
        (
            {},
            _kernels("Q4_0", device="cuda"),
            "none: a cuda computes with the weights as they are unless told otherwise",
        ),
    ],
)
def test_weights_follow_the_file_and_what_runs_here(given: dict[str, str], facts: QuantizeFacts, expected: str) -> None:
    choice, why = resolve_quantize(EngineConfig(**given), facts)  # type: ignore[arg-type]
    assert why == expected
    assert choice == expected.split(":")[0]


@pytest.mark.parametrize(
    ("given", "facts", "param", "message"),
    [
        (
            {"quantize": "int8"},
            _kernels(problem="there are no kernels"),
            "quantize",
            "--quantize int8: there are no kernels",
        ),
        ({"quantize": "int4"}, _kernels(device="cuda"), "quantize", "for CPUs, not for cuda"),
        ({"quantize": "int4", "dtype": "bfloat16"}, _kernels(), "quantize", "--dtype bfloat16 was asked for"),
        ({"attention": "native"}, _kernels(problem="there are no kernels"), "attention", "there are no kernels"),
        ({"attention": "native", "quantize": "none"}, _kernels(), "attention", "--quantize none was asked for"),
        ({"attention": "native", "dtype": "float32"}, _kernels("float"), "attention", "--dtype float32 was asked for"),
    ],
)
def test_what_cannot_be_is_refused_by_name(
    given: dict[str, str], facts: QuantizeFacts, param: str, message: str
) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_quantize(EngineConfig(**given), facts)  # type: ignore[arg-type]
    assert caught.value.param == param


@pytest.mark.parametrize(("quick", "quantize"), [(True, "none"), (True, "auto"), (False, "none")])
def test_native_attention_over_bfloat16_needs_kernels_that_are_quick_at_it(quick: bool, quantize: str) -> None:
    config = EngineConfig(attention="native", dtype="bfloat16", quantize=quantize)  # type: ignore[arg-type]
    facts = QuantizeFacts("cpu", None, frozenset({"float"}), bfloat16=quick)
    if quick:
        assert resolve_quantize(config, facts)[0] == "none"
    else:
        with pytest.raises(ConfigError, match="--quantize none was asked for"):
            resolve_quantize(config, facts)


def test_rounding_decides_what_nobody_chose() -> None:
    config = EngineConfig()
    assert check_rounding(config, "int4", "int4: why", ("", 0.0)) == ("int4", "int4: why; nothing is rounded")
    assert check_rounding(config, "int8", "int8: why", ("3.qkv", 0.0062)) == (
        "int8",
        "int8: why; rounding changes no matrix by more than 0.62%",
    )
    assert check_rounding(config, "int8", "int8: why", ("3.qkv", 0.0123)) == (
        "none",
        "none: int8 would change matrix 3.qkv by 1.23%, and auto allows 1%",
    )
    with pytest.raises(ConfigError, match=r"3\.qkv by 1\.23%") as caught:
        check_rounding(EngineConfig(attention="native"), "int8", "int8: why", ("3.qkv", 0.0123))
    assert caught.value.hint == "ask for --quantize int8"


@pytest.mark.parametrize("quantize", ["none", "int8", "fp8"])
def test_a_gpu_quantises_what_it_is_told_to(quantize: str) -> None:
    choice, why = resolve_quantize(EngineConfig(quantize=quantize), _kernels("Q4_0", device="cuda"))  # type: ignore[arg-type]
    assert (choice, why) == (quantize, f"{quantize}: asked for")


@pytest.mark.parametrize(
    ("given", "device", "message"),
    [
        ({"quantize": "int4"}, "cuda", "--quantize int4 is for CPUs, not for cuda"),
        ({"attention": "native"}, "cuda", "--attention native is for CPUs, not for cuda"),
        ({"quantize": "fp8"}, "cpu", "--quantize fp8 is for GPUs"),
    ],
)
def test_formats_of_the_other_kind_of_device_are_refused(given: dict[str, str], device: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve_quantize(EngineConfig(**given), _kernels("Q4_0", device=device))  # type: ignore[arg-type]
