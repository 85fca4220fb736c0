"""The two in-process experiments on a tiny model, and the arithmetic of the roofline. No time is asserted."""

import json
from pathlib import Path

import pytest
import torch

from servekit.bench import machine_ceilings, offline
from servekit.bench.machine_ceilings import measure_ceilings
from servekit.bench.offline import OfflineBench, Plan, run_offline
from servekit.bench.offline_memory import PeakMemory
from servekit.bench.offline_roofline import Ceilings, Work, decode_work, prefill_work, roofline
from servekit.cli.main import run
from servekit.config import EngineConfig
from servekit.engine.load import load_engine, open_model
from servekit.engine.spec.families import read_decoder_spec
from servekit.errors import ConfigError
from servekit.kvcalc.model_shape import read_model_shape
from servekit.kvcalc.weights import weigh
from servekit.store.resolve import find_model
from tests.blackbox.tiny import BYTES_PER_TOKEN, TinyChat, make_chatty
from tests.engine.native.kernels import needs_kernels, opened

CEILINGS = Ceilings(bytes_per_s=1e10, flops_per_s=1e11, dtype="float32")
CONFIG = EngineConfig(dtype="float32", kv_dtype="float32", device="cpu", threads=1)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyChat:
    return make_chatty(tmp_path_factory.mktemp("models") / "chatty")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Known ceilings instead of two seconds of measuring them."""
    monkeypatch.setattr(offline, "measure_ceilings", lambda *_: CEILINGS)


@pytest.mark.usefixtures("quick")
def test_both_experiments(tiny: TinyChat) -> None:
    said: list[str] = []
    plan = Plan(batches=(1, 4), prompt_tokens=20, output_tokens=5, prefill_lengths=(8, 33), repeats=2)

    report = run_offline(find_model(str(tiny.directory)), CONFIG, plan, said.append)

    assert [point.batch for point in report.decode] == [1, 4]
    for point in report.decode:
        # 20 prompt tokens and 4 of the answer are stored, in blocks of 16.
        assert point.kv_bytes == point.kv_bytes_formula == point.batch * 32 * BYTES_PER_TOKEN
        assert point.tokens_per_s == pytest.approx(point.batch * 5 / point.total_s)
        assert point.per_request_tokens_per_s == pytest.approx(1 / point.tpot_s)
        assert 0 < point.ttft_s < point.total_s
    assert [point.prompt_tokens for point in report.prefill] == [8, 33]
    assert all(point.tokens_per_s == pytest.approx(point.prompt_tokens / point.seconds) for point in report.prefill)
    assert (report.dtype, report.kv_dtype, report.threads) == ("float32", "float32", 1)
    assert "decoding, batch of 4" in said


@pytest.mark.usefixtures("quick")
def test_the_command(tiny: TinyChat, capsys: pytest.CaptureFixture[str]) -> None:
    args = ["bench", "offline", str(tiny.directory), "--batches", "2", "--prompt-tokens", "9", "--output-tokens", "3"]
    args += ["--prefill", "8", "--repeats", "1", "--dtype", "float32", "--threads", "1", "--quiet"]

    assert run([*args, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["decode"][0]["kv_bytes"] == found["decode"][0]["kv_bytes_formula"] > 0
    assert found["ceilings"]["ridge"] == 10.0
    assert found["plan"]["batches"] == [2]

    assert run(args) == 0
    captured = capsys.readouterr()
    assert "KV bytes of the tensors equal the formula's in every row" in captured.out
    assert captured.err == ""


def test_a_point_beyond_the_context_is_refused(tiny: TinyChat) -> None:
    with pytest.raises(ConfigError, match="context"):
        run_offline(find_model(str(tiny.directory)), CONFIG, Plan(prefill_lengths=(9000,)), lambda what: None)


def test_a_batch_beyond_the_pool_is_refused(tiny: TinyChat) -> None:
    model = open_model(find_model(str(tiny.directory)))
    config = EngineConfig(
        dtype="float32", device="cpu", threads=1, kv_dtype="float32", kv_memory=16 * 16 * BYTES_PER_TOKEN
    )
    bench = OfflineBench(model, load_engine(model, config))

    with pytest.raises(ConfigError, match="16 KV blocks, but the pool has 15"):
        bench.decode(4, Plan(prompt_tokens=50, output_tokens=14), CEILINGS)


@pytest.mark.parametrize("args", [["--batches", "0"], ["--prefill", "a,b"], ["--batches", ""]])
def test_a_wrong_list_is_named(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    assert run(["bench", "offline", "nowhere", *args]) == 2
    assert args[0] in capsys.readouterr().err


LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "torch_dtype": "bfloat16",
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "max_position_embeddings": 8192,
    "rms_norm_eps": 1e-5,
    "rope_theta": 100000,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
}


@pytest.mark.parametrize("tied", [True, False])
def test_a_decode_step_reads_what_the_calculator_says(tied: bool) -> None:
    config = {**LLAMA, "tie_word_embeddings": tied}
    spec, weights = read_decoder_spec(config), weigh(read_model_shape(config))
    norms = (2 * 30 + 1) * 576
    assert weights.num_parameters is not None
    matrices = weights.num_parameters - norms

    work = decode_work(spec, batch=4, context=100, weights_bytes=2 * matrices, kv_element_bytes=2)

    read = matrices - (0 if tied else 49152 * 576)  # an embedding apart from the head is only looked up
    per_token = 2 * 30 * 3 * 64
    assert work.num_bytes == 2 * read + 4 * 100 * per_token * 2
    assert work.flops == 4 * (2 * read + 4 * 30 * 9 * 64 * 100)


def test_prefill_grows_with_the_square_only_in_attention() -> None:
    spec = read_decoder_spec(LLAMA)

    def flops(tokens: int) -> float:
        return prefill_work(spec, tokens=tokens, weights_bytes=1, kv_element_bytes=2).flops

    head = 2 * 49152 * 576
    layers = (flops(1) - head - 4 * 30 * 576) / 1
    assert flops(1000) == pytest.approx(head + 1000 * layers + 4 * 30 * 576 * 1000 * 1001 / 2)


def test_the_roofline_names_the_longer_bound() -> None:
    slow_memory = roofline(Work(flops=1e9, num_bytes=1e9), 0.2, CEILINGS)
    slow_arithmetic = roofline(Work(flops=1e11, num_bytes=1e9), 2.0, CEILINGS)

    assert (slow_memory.limit, slow_memory.bound_s, slow_memory.share) == ("memory", 0.1, 0.5)
    assert [slow_memory.mbu, slow_memory.mfu] == pytest.approx([0.5, 0.05])
    assert (slow_arithmetic.limit, slow_arithmetic.mfu, slow_arithmetic.intensity) == ("compute", 0.5, 100.0)


def test_the_ceilings_are_rates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_ceilings, "_SECONDS", 0.0)
    monkeypatch.setattr(machine_ceilings, "_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(machine_ceilings, "_MATRIX", {"cpu": 32})

    found = measure_ceilings(torch.device("cpu"), torch.float32)

    assert found.bytes_per_s > 0
    assert found.flops_per_s > 0
    assert found.dtype == "float32"


@needs_kernels
def test_the_ceiling_of_the_kernels_is_their_own_product(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_ceilings, "_SECONDS", 0.0)
    monkeypatch.setattr(machine_ceilings, "_BYTES", {"cpu": 2**20})
    monkeypatch.setattr(machine_ceilings, "_MATRIX", {"cpu": 64})
    threads = torch.get_num_threads()
    with opened() as kernels:
        found = measure_ceilings(torch.device("cpu"), torch.float32, kernels, "int4")
    assert found.flops_per_s > 0
    assert found.dtype == "int4"
    assert torch.get_num_threads() == threads


@pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="the peak can be reset on Linux only")
def test_the_peak_of_memory_counts_from_its_restart() -> None:
    memory = PeakMemory("cpu")
    block = bytearray(b"x") * (200 * 2**20)
    before = memory.peak()
    del block
    memory.restart()
    after = memory.peak()

    assert before is not None
    assert after is not None
    assert after < before
