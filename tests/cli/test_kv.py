"""`servekit kv` as a user runs it: answers, JSON contract, exit codes, one line for every error."""

import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from servekit.cli.main import run
from tests.store.gguf_files import byte_level_vocabulary, write_gguf

MODELS = Path(__file__).parents[2] / "configs" / "models"
QWEN = str(MODELS / "Qwen2.5-0.5B-Instruct.json")
LLAMA = str(MODELS / "Llama-3.1-8B.json")

Captured = pytest.CaptureFixture[str]


@pytest.fixture(autouse=True)
def _plain_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setenv("NO_COLOR", "1")


def kv_json(capsys: Captured, *args: str) -> dict[str, Any]:
    assert run(["kv", *args, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


def refusal(capsys: Captured, *args: str, code: int = 2) -> str:
    """The error's lines, after checking that nothing was said on standard output."""
    assert run(["kv", *args]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("error: ")
    assert [line for line in captured.err.splitlines() if not line.startswith(("error: ", "hint: "))] == []
    return captured.err


def test_the_answer_comes_first(capsys: Captured) -> None:
    assert run(["kv", QWEN, "--memory", "8GiB", "--kv-dtype", "bf16"]) == 0

    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "267 requests of 2,048 tokens fit; limited by KV memory"
    assert max(len(line) for line in lines) <= 80


def test_the_json_contract(capsys: Captured) -> None:
    found = kv_json(capsys, QWEN, "--memory", "8GiB", "--tokens", "2048")

    assert found["model"] == "Qwen2.5-0.5B-Instruct"
    terms = ("dtype", "bytes_per_token", "bytes_per_request")
    assert {name: value for name, value in found["kv"].items() if name in terms or "_bytes_per_" in name} == {
        "dtype": "bfloat16",
        "bytes_per_token": 12_288,
        "indexer_bytes_per_token": 0,
        "window_bytes_per_request": 0,
        "state_bytes_per_request": 0,
        "cross_bytes_per_source_token": 0,
        "mtp_bytes_per_token": 0,
        "bytes_per_request": 24 * 2**20,
    }
    assert found["weights"] == {
        "bytes": 988_065_536,
        "parameters": 494_032_768,
        "active_parameters": 494_032_768,
        "dtype": "bfloat16",
        "source": "computed from config.json",
    }
    assert (found["capacity"]["requests"], found["capacity"]["limit"]) == (267, "kv_memory")
    assert found["assumed"] == []
    assert found["engine"]["block_bytes"] == 16 * 12_288


@pytest.mark.parametrize(
    ("name", "growth", "window", "state"),
    [
        ("Llama-3.1-8B", 131_072, 0, 0),
        ("gpt-oss-20b", 24_576, 3 * 2**20, 0),
        ("DeepSeek-V3", 70_272, 0, 0),
        ("Qwen3-Next-80B-A3B-Instruct", 24_576, 0, 77_266_944),
    ],
)
def test_sample_models(capsys: Captured, name: str, growth: int, window: int, state: int) -> None:
    kv = kv_json(capsys, str(MODELS / f"{name}.json"), "--kv-dtype", "bf16")["kv"]

    terms = (kv["bytes_per_token"], kv["window_bytes_per_request"], kv["state_bytes_per_request"])
    assert terms == (growth, window, state)


def test_standard_input(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    config = Path(LLAMA).read_bytes()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(config), encoding="ascii"))

    found = kv_json(capsys, "-", "--memory", "80GiB")

    assert (found["model"], found["kv"]["bytes_per_token"]) == ("standard input", 131_072)


def test_a_model_folder_brings_its_weights_and_kv_dtype(capsys: Captured, tmp_path: Path) -> None:
    folder = tmp_path / "Modèle → é 日"
    folder.mkdir()
    (folder / "config.json").write_text(Path(LLAMA).read_text(encoding="utf-8"), encoding="utf-8")
    index = {"metadata": {"total_size": 9_000_000_000}, "weight_map": {"x": "model-00001-of-00001.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index), encoding="utf-8")
    declared = {"quantization": {"kv_cache_quant_algo": "FP8"}}
    (folder / "hf_quant_config.json").write_text(json.dumps(declared), encoding="utf-8")

    for given in (folder, folder / "config.json"):
        found = kv_json(capsys, str(given), "--memory", "80GiB")
        assert found["model"] == folder.name
        assert found["weights"]["bytes"] == 9_000_000_000
        assert found["weights"]["source"] == "model.safetensors.index.json"
        assert (found["kv"]["dtype"], found["kv"]["bytes_per_token"]) == ("fp8", 65_536)


def test_a_gguf_file(capsys: Captured, tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "tiny.gguf", vocabulary=byte_level_vocabulary())

    found = kv_json(capsys, str(path), "--kv-dtype", "bf16", "--memory", "1GiB")

    assert found["model"] == "tiny"
    assert found["weights"]["bytes"] == path.stat().st_size
    assert found["weights"]["source"] == "size of the GGUF file"
    assert found["kv"]["bytes_per_token"] > 0


def test_neither_torch_nor_transformers_nor_numpy_is_imported() -> None:
    code = f"""
import sys
from servekit.cli.main import run
assert run(["kv", {QWEN!r}, "--memory", "8GiB"]) == 0
print([name for name in ("torch", "transformers", "numpy") if name in sys.modules], file=sys.stderr)
"""

    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)

    assert done.stderr == "[]\n"


def test_a_4_bit_checkpoint_keeps_16_bit_keys(capsys: Captured, tmp_path: Path) -> None:
    config = json.loads(Path(LLAMA).read_text(encoding="utf-8"))
    del config["torch_dtype"]
    config |= {"dtype": "bfloat16", "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 128}}
    path = tmp_path / "four.json"
    path.write_text(json.dumps(config), encoding="utf-8")

    assert kv_json(capsys, str(path))["kv"]["bytes_per_token"] == 131_072


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ('{"model_type": "llama", "num_hidden_layers": "32"}', "num_hidden_layers"),
        ('{"model_type": "martian"}', "model_type"),
        ("{}", "num_hidden_layers"),
        ("[]", "bad.json"),
        ("nonsense", "bad.json"),
        ('{"a": ' * 5000, "bad.json"),
        ("9" * 5000, "bad.json"),
    ],
)
def test_a_bad_file_is_one_line(capsys: Captured, tmp_path: Path, content: str, named: str) -> None:
    path = tmp_path / "bad.json"
    path.write_text(content, encoding="utf-8")

    assert named in refusal(capsys, str(path))


def test_what_is_not_there(capsys: Captured, tmp_path: Path) -> None:
    assert "missing.json" in refusal(capsys, str(tmp_path / "missing.json"))
    assert "no config.json" in refusal(capsys, str(tmp_path))
    assert "no CONFIG given" in refusal(capsys)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (["--kv-dtype", "int3"], "int3"),
        (["--weights-dtype", "int3"], "int3"),
        (["--memory", "lots"], "--memory"),
        (["--memory", "0"], "--memory"),
        (["--reserve", "100%"], "--reserve"),
        (["--reserve", "x%"], "--reserve"),
        (["--bandwidth", "fast"], "--bandwidth"),
        (["--bandwidth", "1TB/s", "--measure-bandwidth"], "--bandwidth"),
        (["--rate", "2"], "--ttft"),
        (["--rate", "nan", "--ttft", "1", "--tpot", "1"], "--rate"),
        (["--rate", "2", "--ttft", "1", "--tpot", "1"], "--output-tokens"),
        (["--tokens", "5", "--prompt-tokens", "5"], "--tokens"),
        (["--tp", "3"], "3 devices"),
        (["--assume", "mha"], "--assume"),
        (["--check", "ftp://x"], "--check"),
    ],
)
def test_an_option_that_cannot_be_honoured(capsys: Captured, options: list[str], named: str) -> None:
    assert named in refusal(capsys, LLAMA, *options)


def test_an_unknown_model_is_computed_when_asked_and_marked(capsys: Captured, tmp_path: Path) -> None:
    config = json.loads(Path(LLAMA).read_text(encoding="utf-8")) | {"model_type": "martian"}
    path = tmp_path / "martian.json"
    path.write_text(json.dumps(config), encoding="utf-8")

    assert "--assume gqa" in refusal(capsys, str(path))
    found = kv_json(capsys, str(path), "--assume", "gqa", "--memory", "80GiB")
    assert found["kv"]["bytes_per_token"] == 131_072
    assert found["assumed"] == ["model_type 'martian' is not known: full grouped-query attention on all layers"]


def test_what_was_asked_and_does_not_fit_is_status_1(capsys: Captured) -> None:
    assert run(["kv", QWEN, "--memory", "8GiB", "--requests", "267"]) == 0
    assert capsys.readouterr().out.startswith("267 requests of 2,048 tokens fit (267 would)")

    assert run(["kv", QWEN, "--memory", "8GiB", "--requests", "268"]) == 1
    captured = capsys.readouterr()
    assert captured.out.startswith("268 requests of 2,048 tokens do not fit (267 would)")
    assert captured.err.startswith("error: it does not fit")


def test_littles_law(capsys: Captured) -> None:
    load = ["--kv-memory", "20GiB", "--prompt-tokens", "3896", "--output-tokens", "200"]

    found = kv_json(capsys, LLAMA, *load, "--rate", "6", "--ttft", "0.4", "--tpot", "0.025")

    assert found["capacity"]["requests"] == 40
    assert found["little"]["seconds_per_request"] == pytest.approx(5.375)
    assert found["little"]["concurrency"] == pytest.approx(32.25)
    assert found["little"]["fits"] is True


def test_the_table_of_lengths_and_dtypes(capsys: Captured) -> None:
    found = kv_json(capsys, QWEN, "--memory", "8GiB", "--kv-dtype", "bf16,int8", "--table")

    assert found["table"][:3] == [
        {"tokens": 512, "requests": {"bf16": 1071, "int8": 2143}},
        {"tokens": 2048, "requests": {"bf16": 267, "int8": 535}},
        {"tokens": 8192, "requests": {"bf16": 66, "int8": 133}},
    ]
    assert found["other_kv_dtypes"][0]["bytes_per_token"] == 6_144

    assert run(["kv", QWEN, "--memory", "8GiB", "--kv-dtype", "bf16,int8", "--table"]) == 0
    rows = [line.split() for line in capsys.readouterr().out.split("Requests that fit")[1].splitlines()]
    assert ["2,048", "267", "535"] in rows
    assert ["8,192", "66", "133"] in rows


def test_the_steps_as_on_paper(capsys: Captured) -> None:
    assert run(["kv", QWEN, "--memory", "8GiB", "--explain"]) == 0

    steps = " ".join(capsys.readouterr().out.split("Step by step")[1].split())
    assert "24 layers x 2 x 2 KV heads x 64 x 2 B = 12,288 B per token" in steps
    assert "2,048 x 12,288 = 25,165,824 B" in steps
    assert "8,589,934,592 - 858,993,460 reserve - 988,065,536 weights = 6,742,875,596 B" in steps
    assert "6,742,875,596 / 25,165,824, rounded down = 267" in steps


def test_several_models_side_by_side(capsys: Captured) -> None:
    assert run(["kv", QWEN, LLAMA, "--memory", "80GiB", "--compare"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("Side by side, requests of 2,048 tokens")
    assert max(len(line) for line in out.splitlines()) <= 80

    found = kv_json(capsys, QWEN, LLAMA, "--memory", "80GiB")
    assert [model["model"] for model in found["models"]] == ["Qwen2.5-0.5B-Instruct", "Llama-3.1-8B"]


def test_tensor_parallelism_replicates_when_heads_run_out(capsys: Captured) -> None:
    found = kv_json(capsys, LLAMA, "--memory", "80GiB", "--tp", "16")

    assert found["kv"]["bytes_per_token"] == 131_072
    assert found["tensor_parallel"]["kv_bytes_per_token_per_device"] == 16_384
    assert found["tensor_parallel"]["kv_replication"] == 2.0


def test_a_draft_model_takes_memory(capsys: Captured) -> None:
    alone = kv_json(capsys, LLAMA, "--memory", "80GiB")["capacity"]
    drafted = kv_json(capsys, LLAMA, "--memory", "80GiB", "--draft", QWEN)

    assert drafted["capacity"]["weights_bytes"] == alone["weights_bytes"] + 988_065_536
    assert drafted["capacity"]["requests"] < alone["requests"]
    assert drafted["draft"]["model"] == "Qwen2.5-0.5B-Instruct"


def test_the_bound_of_bandwidth(capsys: Captured) -> None:
    bound = kv_json(capsys, LLAMA, "--memory", "80GiB", "--bandwidth", "1TB/s")["roofline"][0]

    assert bound["weight_bytes_per_step"] == 2 * 8_030_261_248 - 2 * 128_256 * 4_096
    assert bound["tokens_per_second"] == pytest.approx(
        1e12 / (bound["weight_bytes_per_step"] + bound["kv_bytes_per_step"])
    )


def test_a_terminal_without_unicode(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stream)

    assert run(["kv", QWEN, "--memory", "8GiB"]) == 0

    stream.seek(0)
    assert "# weights 942.3 MiB  x reserve 819.2 MiB  = KV 6.3 GiB  . free" in stream.read()
