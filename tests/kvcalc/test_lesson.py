"""The numbers of a published lesson on LLM serving, exactly."""

import pytest

from servekit.kvcalc.kv_formats import parse_kv_dtype
from servekit.kvcalc.machine import MachineMemory
from servekit.kvcalc.memory import request_bytes
from servekit.kvcalc.model_shape import ModelShape, read_model_shape
from servekit.kvcalc.plan import Arrivals, Load, Model, make_plan, requests_at
from servekit.kvcalc.weights import weigh

GIB, MIB = 2**30, 2**20
SMALL = {
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "hidden_size": 896,
    "num_hidden_layers": 24,
    "num_attention_heads": 14,
    "num_key_value_heads": 2,
    "intermediate_size": 4864,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
    "max_position_embeddings": 32768,
}
LARGE = {
    **SMALL,
    "hidden_size": 1536,
    "num_hidden_layers": 28,
    "num_attention_heads": 12,
    "intermediate_size": 8960,
}
EXERCISE = {
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "hidden_size": 4096,
}


def model(config: dict[str, object]) -> Model:
    shape = read_model_shape(config)
    return Model("lesson", shape, weigh(shape))


def bf16_bytes(shape: ModelShape, num_tokens: int) -> int:
    return request_bytes(shape, parse_kv_dtype("bf16"), num_tokens=num_tokens)


@pytest.mark.parametrize(
    ("config", "parameters", "per_token", "at_2048"),
    [(SMALL, 494_032_768, 12_288, 24 * MIB), (LARGE, 1_543_714_304, 28_672, 56 * MIB)],
)
def test_bytes_and_parameters(config: dict[str, object], parameters: int, per_token: int, at_2048: int) -> None:
    found = model(config)

    assert found.weights.num_parameters == parameters
    assert bf16_bytes(found.shape, 1) == per_token
    assert bf16_bytes(found.shape, 2048) == at_2048


def test_sixteen_requests() -> None:
    assert 16 * bf16_bytes(model(SMALL).shape, 2048) == 384 * MIB
    assert 16 * bf16_bytes(model(LARGE).shape, 2048) == 896 * MIB


def test_without_grouped_queries() -> None:
    small = model({**SMALL, "num_key_value_heads": 14})
    large = model({**LARGE, "num_key_value_heads": 12})

    assert bf16_bytes(small.shape, 2048) == 168 * MIB
    assert bf16_bytes(large.shape, 2048) == 336 * MIB
    assert 16 * bf16_bytes(large.shape, 2048) == 5376 * MIB


MEASURED = [(1, 174, 2_138_112), (4, 178, 8_749_056), (16, 180, 35_389_440)]


@pytest.mark.parametrize(("batch", "tokens", "measured"), MEASURED)
def test_measured_bytes(batch: int, tokens: int, measured: int) -> None:
    assert batch * bf16_bytes(model(SMALL).shape, tokens) == measured


@pytest.mark.parametrize(
    ("config", "tokens", "bf16", "int8"),
    [
        (SMALL, 512, 1071, 2143),
        (SMALL, 2048, 267, 535),
        (SMALL, 8192, 66, 133),
        (LARGE, 512, 316, 632),
        (LARGE, 2048, 79, 158),
        (LARGE, 8192, 19, 39),
    ],
)
def test_requests_in_8_gib(config: dict[str, object], tokens: int, bf16: int, int8: int) -> None:
    plan = make_plan(model(config), Load(memory=MachineMemory(8 * GIB, "given")), "bf16")

    assert requests_at(plan, tokens, "bf16").requests == bf16
    assert requests_at(plan, tokens, "int8").requests == int8


def test_the_exercise() -> None:
    memory = MachineMemory(80 * GIB, "given")
    load = Load(
        memory=memory,
        kv_memory=20 * GIB,
        prompt_tokens=3896,
        output_tokens=200,
        arrivals=Arrivals(rate=6, ttft=0.4, tpot=0.025),
    )

    plan = make_plan(model(EXERCISE), load, "bf16")

    assert plan.terms.bytes_per_token == 128 * 1024
    assert plan.request_bytes == 512 * MIB
    assert plan.capacity.requests == 40
    assert plan.needed is not None
    assert plan.needed.seconds == pytest.approx(5.375)
    assert plan.needed.concurrency == pytest.approx(32.25)
    assert plan.fits is True


def test_the_exercise_without_grouped_queries() -> None:
    load = Load(memory=MachineMemory(80 * GIB, "given"), kv_memory=20 * GIB, num_tokens=4096)

    assert make_plan(model({**EXERCISE, "num_key_value_heads": 32}), load, "bf16").capacity.requests == 10
