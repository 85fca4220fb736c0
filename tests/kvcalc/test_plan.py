"""Budgets, capacities, draft models, and the bound of memory bandwidth."""

from dataclasses import replace
from fractions import Fraction

import pytest

from servekit.errors import ConfigError
from servekit.kvcalc.capacity import Limit
from servekit.kvcalc.explain import explain
from servekit.kvcalc.kv_formats import parse_kv_dtype
from servekit.kvcalc.machine import MachineMemory, machine_memory
from servekit.kvcalc.model_shape import read_model_shape
from servekit.kvcalc.plan import Arrivals, Load, Model, default_kv_dtype, make_plan
from servekit.kvcalc.roofline import decode_bound, touched_weight_bytes
from servekit.kvcalc.weights import weigh
from tests.kvcalc.published import ALL
from tests.kvcalc.test_weights import LLAMA, MIXTRAL

GIB = 2**30


def model(config: dict[str, object]) -> Model:
    shape = read_model_shape(config)
    return Model("model", shape, weigh(shape))


def load(memory: int, **more: object) -> Load:
    return replace(Load(memory=MachineMemory(memory, "given")), **more)  # type: ignore[arg-type]


def test_memory_divides_into_reserve_weights_and_kv() -> None:
    plan = make_plan(model(LLAMA), load(40 * GIB, num_tokens=4096), "bf16")

    assert plan.budget.reserve == 4 * GIB
    assert plan.budget.weights == 2 * 8_030_261_248
    assert plan.budget.kv == 36 * GIB - 2 * 8_030_261_248
    assert plan.capacity.requests == plan.budget.kv // (4096 * 131_072)
    assert plan.capacity.limit is Limit.KV_MEMORY


def test_a_reserve_in_bytes() -> None:
    assert make_plan(model(LLAMA), load(40 * GIB, reserve=GIB), "bf16").budget.reserve == GIB


def test_a_share_of_memory_is_rounded_up() -> None:
    assert make_plan(model(LLAMA), load(10 * GIB + 1, reserve=Fraction(1, 10)), "bf16").budget.reserve == GIB + 1


def test_weights_that_do_not_fit() -> None:
    plan = make_plan(model(LLAMA), load(8 * GIB), "bf16")

    assert (plan.capacity.requests, plan.capacity.limit) == (0, Limit.WEIGHTS)


def test_unknown_weights_give_no_number() -> None:
    plan = make_plan(model({**LLAMA, "vocab_size": None}), load(80 * GIB), "bf16")

    assert (plan.capacity.requests, plan.capacity.limit) == (None, Limit.UNKNOWN_WEIGHTS)


def test_an_encoder_keeps_nothing() -> None:
    config = {**ALL["BERT keeps nothing"][0], "vocab_size": 30522, "intermediate_size": 3072}

    plan = make_plan(model({**config, "max_position_embeddings": 512}), load(8 * GIB), "bf16")

    assert (plan.capacity.requests, plan.capacity.limit) == (None, Limit.NOTHING_KEPT)


def test_blocks_cost_the_null_block_too() -> None:
    request = 112 * 131_072
    kv_memory = 2 * request

    assert make_plan(model(LLAMA), load(GIB, kv_memory=kv_memory, num_tokens=112), "bf16").capacity.requests == 2
    rounded = load(GIB, kv_memory=kv_memory, num_tokens=112, block_size=16)
    assert make_plan(model(LLAMA), rounded, "bf16").capacity.requests == 1


def test_a_draft_model_takes_weights_and_keys() -> None:
    draft = model({**LLAMA, "num_hidden_layers": 1})

    plan = make_plan(model(LLAMA), load(40 * GIB, num_tokens=100), "bf16", draft=draft)

    assert plan.request_bytes == 100 * 131_072
    assert plan.device_request_bytes == 100 * (131_072 + 4_096)
    assert plan.budget.weights == 2 * 8_030_261_248 + (draft.weights.num_bytes or 0)


def test_two_devices_halve_weights_and_keys() -> None:
    plan = make_plan(model(LLAMA), load(40 * GIB, num_tokens=100, num_devices=2), "bf16")

    assert plan.budget.weights == 8_030_261_248
    assert plan.device_request_bytes == 100 * 65_536
    assert plan.terms.bytes_per_token == 131_072


def test_the_engine_pool_is_planned_where_it_applies() -> None:
    plan = make_plan(model(LLAMA), load(40 * GIB), "bf16")

    assert plan.pool is not None
    assert plan.pool.block_bytes == 16 * 131_072
    hybrid = ALL["LFM2: the convolution's columns"][0]
    assert make_plan(model(hybrid), load(40 * GIB, kv_memory=GIB), "bf16").pool is None


def test_arrivals_that_do_not_fit() -> None:
    asked = load(GIB, kv_memory=10 * 100 * 131_072, num_tokens=100, output_tokens=51, arrivals=Arrivals(10, 1.0, 0.01))

    plan = make_plan(model(LLAMA), asked, "bf16")

    assert plan.needed is not None
    assert plan.needed.concurrency == pytest.approx(15.0)
    assert plan.fits is False


def test_arrivals_need_the_length_of_an_answer() -> None:
    with pytest.raises(ConfigError, match="--rate needs --output-tokens"):
        make_plan(model(LLAMA), load(GIB, arrivals=Arrivals(1, 1, 1)), "bf16")


def test_more_tokens_than_the_context_are_remarked() -> None:
    config = {**LLAMA, "max_position_embeddings": 2048}

    plan = make_plan(model(config), load(40 * GIB, num_tokens=4096), "bf16")

    assert plan.warnings == ("4,096 tokens are more than the model's context of 2,048",)


def test_the_source_of_an_encoder_decoder_is_its_prompt() -> None:
    t5 = model(ALL["T5-small: d_kv, num_heads, num_decoder_layers"][0])

    plan = make_plan(t5, load(GIB, kv_memory=GIB, prompt_tokens=100, output_tokens=10), "bf16")

    assert (plan.num_tokens, plan.source_tokens) == (10, 100)
    assert plan.request_bytes == 110 * 12_288


def test_the_kv_dtype_follows_the_checkpoint() -> None:
    declared = {"quant_method": "fp8", "kv_cache_scheme": {"num_bits": 8, "type": "float"}}

    assert default_kv_dtype(read_model_shape(LLAMA)) == "bfloat16"
    assert default_kv_dtype(read_model_shape({**LLAMA, "quantization_config": declared})) == "fp8"


def test_a_step_reads_the_weights_once_and_every_request() -> None:
    embedding = 2 * 128256 * 4096
    weights = weigh(read_model_shape(LLAMA))

    bound = decode_bound(weights, batch=4, request_bytes=1000, bandwidth=1e12)

    assert bound is not None
    assert (bound.weight_bytes, bound.kv_bytes) == (2 * 8_030_261_248 - embedding, 4000)
    assert bound.tokens_per_second == pytest.approx(4 * 1e12 / (bound.weight_bytes + 4000))


def test_one_token_reads_its_own_experts_and_many_read_all() -> None:
    weights = weigh(read_model_shape(MIXTRAL))
    experts, lookup = weights.part_bytes["experts"], weights.part_bytes["embedding"]

    assert touched_weight_bytes(weights, 1) == pytest.approx((weights.num_bytes or 0) - lookup - experts * 3 / 4, abs=1)
    assert touched_weight_bytes(weights, 1000) == pytest.approx((weights.num_bytes or 0) - lookup, abs=1)


def test_formulas_are_written_as_on_paper() -> None:
    steps = {
        name: [step.formula for step in explain(read_model_shape(ALL[name][0]), parse_kv_dtype("bf16"))]
        for name in ("Qwen2.5-1.5B", "DeepSeek-V3", "gpt-oss-20b", "LFM2: the convolution's columns")
    }

    assert steps == {
        "Qwen2.5-1.5B": ["28 layers x 2 x 2 KV heads x 128 x 2 B"],
        "DeepSeek-V3": ["61 layers x 576 (latent, not doubled) x 2 B"],
        "gpt-oss-20b": [
            "12 layers x 2 x 8 KV heads x 64 x 2 B",
            "12 layers x 2 x 8 KV heads x 64 x 2 B x 128 tokens",
        ],
        "LFM2: the convolution's columns": [
            "6 layers x 2 x 8 KV heads x 64 x 2 B",
            "10 layers x [(2,048 channels x 2) x 2 B]",
        ],
    }


def test_steps_sum_to_the_terms() -> None:
    for config, expected in ALL.values():
        shape = read_model_shape(config)
        total = sum((step.num_bytes for step in explain(shape, parse_kv_dtype("bf16"))), Fraction(0))
        assert total == Fraction(sum(Fraction(term) for term in expected))


def test_this_machine_has_memory() -> None:
    assert machine_memory().num_bytes > 2**20
