"""What `servekit kv` promises is what the engine allocates, to the byte, for every family and KV dtype it runs."""

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, models

from servekit.cli.main import run
from servekit.config import EngineConfig
from servekit.engine.load import LoadedEngine, load_engine, open_model
from servekit.errors import ConfigError
from servekit.store.resolve import find_model
from tests.blackbox.server import running_server
from tests.blackbox.tiny import TinyChat, make_chatty
from tests.engine.families import FAMILIES, make_tiny
from tests.engine.native.kernels import needs_kernels

_KV_MEMORY = 300_000


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    make_tiny(request.param, directory)
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(directory / "tokenizer.json"))
    return directory


def _load(directory: Path, **config: Any) -> LoadedEngine:
    settings: dict[str, Any] = {"dtype": "float32", "device": "cpu", "threads": 1, "kv_memory": _KV_MEMORY}
    return load_engine(open_model(find_model(str(directory))), EngineConfig(**{**settings, **config}))


def _report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    assert run(["kv", *arguments, "--json"]) == 0
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


@pytest.mark.parametrize("block_size", [8, 16])
@pytest.mark.parametrize("kv_dtype", ["float32", "bfloat16"])
def test_the_pool_is_what_the_command_says(
    directory: Path, kv_dtype: str, block_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    loaded = _load(directory, kv_dtype=kv_dtype, block_size=block_size)
    options = ("--kv-memory", str(_KV_MEMORY), "--kv-dtype", kv_dtype, "--block-size", str(block_size))
    engine = _report(capsys, str(directory), *options)["engine"]
    assert loaded.props()["kv"] == {**engine, "dtype": kv_dtype}
    assert loaded.kv_bytes == engine["kv_bytes"] == engine["num_blocks"] * engine["block_bytes"] <= _KV_MEMORY
    spec_bytes = {"float32": 4, "bfloat16": 2}[kv_dtype]
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    heads, head_dim = config["num_key_value_heads"], config.get("head_dim") or 16
    assert engine["bytes_per_token"] == config["num_hidden_layers"] * 2 * heads * head_dim * spec_bytes


@needs_kernels
@pytest.mark.parametrize("block_size", [16, 48])
def test_the_pool_in_eight_bits_is_what_the_command_says(
    directory: Path, block_size: int, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    heads, head_dim = config["num_key_value_heads"], config.get("head_dim") or 16
    settings: dict[str, Any] = {"quantize": "int8", "kv_dtype": "q8_0", "block_size": block_size}
    if head_dim % 32:
        with pytest.raises(ConfigError, match=f"a head has {head_dim} here"):
            _load(directory, **settings)
        return
    loaded = _load(directory, **settings)
    options = ("--kv-memory", str(_KV_MEMORY), "--kv-dtype", "q8_0", "--block-size", str(block_size))
    engine = _report(capsys, str(directory), *options)["engine"]
    assert loaded.props()["kv"] == {**engine, "dtype": "q8_0"}
    assert loaded.kv_bytes == engine["kv_bytes"] == engine["num_blocks"] * engine["block_bytes"] <= _KV_MEMORY
    assert engine["bytes_per_token"] == config["num_hidden_layers"] * 2 * heads * head_dim // 32 * 34
    loaded.runner.close()


def test_check_compares_a_plan_with_a_running_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tiny: TinyChat = make_chatty(tmp_path / "model")
    with running_server(tiny.directory, "--kv-memory", "1MiB") as server:
        props = server.get("/props")
        # Where there are kernels, their pool is the same as torch's.
        assert props["config"]["attention"] == ("native" if props["kernels"]["available"] else "sdpa")
        assert run(["kv", "--check", server.url]) == 0
        assert run(["kv", str(tiny.directory), "--check", server.url]) == 0
        assert run(["kv", str(tiny.directory), "--check", server.url, "--kv-memory", "1MiB"]) == 0
        capsys.readouterr()
        # Another memory than the server was given: the answer is no, and it says where.
        assert run(["kv", str(tiny.directory), "--check", server.url, "--kv-memory", "2MiB"]) == 1
        assert "num_blocks" in capsys.readouterr().out
