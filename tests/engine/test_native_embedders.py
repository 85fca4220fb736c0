"""Embedding models on the CPU kernels, alone and beside a model that writes."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from servekit.config import EngineConfig
from servekit.engine.batch import Batch
from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.device.cpu import CpuDevice
from servekit.engine.embed_runner import ModelEmbedRunner
from servekit.engine.embed_split import SplitEmbedRunner
from servekit.engine.embedding_model import build_embedder, runs_on_kernels
from servekit.engine.load import load_engine, open_model
from servekit.engine.load_embedding import load_embedding_engine
from servekit.engine.open_embedder import OpenEmbedder, open_embedder
from servekit.errors import ConfigError
from servekit.store.resolve import LocalModel, find_model
from tests.engine.encoder_families import make_encoder
from tests.engine.families import make_tiny
from tests.engine.native.kernels import needs_kernels, opened

_TOKENIZER = {"version": "1.0", "added_tokens": [], "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}}
_BFLOAT16 = EngineConfig(dtype="bfloat16", threads=1, device="cpu")


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("SERVEKIT_HOME", str(tmp_path / "home"))
    threads = torch.get_num_threads()
    yield
    torch.set_num_threads(threads)


def _open(directory: Path, family: str) -> OpenEmbedder:
    directory.mkdir()
    if family in ("bert", "modernbert", "mpnet"):
        make_encoder(family, directory)
    else:
        make_tiny(family, directory)
    (directory / "tokenizer.json").write_text(json.dumps(_TOKENIZER), encoding="utf-8")
    return open_embedder(LocalModel(family, directory, None, "test"))


def _inputs() -> list[EmbedInput]:
    rng = np.random.default_rng(0)
    return [EmbedInput(tuple(rng.integers(3, 131, length).tolist())) for length in (1, 7, 40, 64, 100)]


@needs_kernels
@pytest.mark.parametrize("family", ["bert", "modernbert", "qwen3", "gemma3"])
def test_vectors_point_where_torchs_point(tmp_path: Path, family: str) -> None:
    first = _open(tmp_path / "model", family)
    torchs = build_embedder(first, replace(_BFLOAT16, dtype="float32"), CpuDevice(), None)
    again = open_embedder(first.files)
    with opened() as kernels:
        native = build_embedder(again, _BFLOAT16, CpuDevice(), None, kernels=kernels)
        assert native.props()["attention"] == f"native: {kernels.isa} kernels"
        found = native.embedder.runner.embed(_inputs()).get()
    expected = torchs.embedder.runner.embed(_inputs()).get()
    assert (np.sum(found * expected, axis=1) > 0.995).all()


def test_which_models_run_on_which_kernels(tmp_path: Path) -> None:
    bert, mpnet, qwen = (_open(tmp_path / family, family) for family in ("bert", "mpnet", "qwen3"))
    assert runs_on_kernels(bert.spec, _BFLOAT16, "avx512bf16")
    assert runs_on_kernels(qwen.spec, _BFLOAT16, "avx512bf16")
    assert not runs_on_kernels(mpnet.spec, _BFLOAT16, "avx512bf16")
    assert not runs_on_kernels(bert.spec, _BFLOAT16, "avx2")
    assert not runs_on_kernels(bert.spec, replace(_BFLOAT16, dtype="float32"), "avx512bf16")
    assert not runs_on_kernels(bert.spec, replace(_BFLOAT16, attention="sdpa"), "avx512bf16")
    for model in (bert, mpnet, qwen):
        model.source.close()


def test_quantised_bits_are_refused_for_a_server_that_only_embeds(tmp_path: Path) -> None:
    model = _open(tmp_path / "model", "bert")
    with pytest.raises(ConfigError, match="--quantize int8: models that only embed") as caught:
        load_embedding_engine(model, EngineConfig(quantize="int8"))
    assert caught.value.param == "quantize"


def test_an_embedding_step_gets_torchs_threads_and_gives_them_back() -> None:
    during: list[int] = []

    def hidden_states(batch: Batch) -> torch.Tensor:
        during.append(torch.get_num_threads())
        return torch.zeros(batch.num_tokens, 4)

    torch.set_num_threads(1)
    runner = SplitEmbedRunner(ModelEmbedRunner(hidden_states, lambda hidden, _: hidden, CpuDevice()), 3)
    runner.embed(_inputs()[:1]).get()
    runner.close()
    assert torch.get_num_threads() == 1
    assert during == [3]


def test_torchs_threads_come_back_from_a_step_that_fails() -> None:
    def fails(_: Batch) -> torch.Tensor:
        raise RuntimeError("no")

    torch.set_num_threads(1)
    runner = SplitEmbedRunner(ModelEmbedRunner(fails, lambda hidden, _: hidden, CpuDevice()), 3)
    with pytest.raises(RuntimeError):
        runner.embed(_inputs()[:1])
    runner.close()
    assert torch.get_num_threads() == 1


@needs_kernels
@pytest.mark.parametrize("family", ["bert", "mpnet"])
def test_an_embedding_model_beside_one_on_the_kernels(tmp_path: Path, family: str) -> None:
    embedder = _open(tmp_path / "embedder", family)
    directory = tmp_path / "writer"
    directory.mkdir()
    make_tiny("llama", directory)
    (directory / "tokenizer.json").write_text(json.dumps(_TOKENIZER), encoding="utf-8")
    config = EngineConfig(device="cpu", threads=2, kv_memory=400_000)
    loaded = load_engine(open_model(find_model(str(directory))), config, embedder=embedder)
    assert loaded.config.quantize == "int8"
    assert loaded.embedding is not None
    assert torch.get_num_threads() == 1
    vectors = loaded.embedding.embedder.runner.embed(_inputs()).get()
    assert vectors.shape == (5, 64)
    assert np.isfinite(vectors).all()
    loaded.runner.close()
    loaded.embedding.embedder.runner.close()
