"""The choices that are left open: what is chosen from which facts, and the reason given."""

import pytest

from servekit.config import EngineConfig
from servekit.engine.auto import ComputeFacts, MemoryFacts, resolve_compute, resolve_memory


def _facts(linear: float = 1.0, attention: float = 1.0) -> ComputeFacts:
    return ComputeFacts("cpu", threads=2, batched_tokens=256, linear_ratio=linear, attention_ratio=attention)


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
        EngineConfig(dtype=dtype, kv_dtype=kv_dtype),  # type: ignore[arg-type]
        _facts(linear, attention),
        8192,
    )
    assert (config.dtype, config.kv_dtype) == expected
    assert ("dtype" in reasons, "kv_dtype" in reasons) == (dtype == "auto", kv_dtype == "auto")


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
