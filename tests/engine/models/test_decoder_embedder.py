"""Decoders as embedders equal transformers: a causal one, and the two kinds that attend both ways."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from servekit.config import EngineConfig
from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.device.cpu import CpuDevice
from servekit.engine.embedding_model import BuiltEmbedder, build_embedder
from servekit.engine.load import open_model
from servekit.engine.open_embedder import open_embedder
from servekit.errors import ModelError
from servekit.store.resolve import LocalModel
from tests.engine.families import TinyModel, make_tiny

_LENGTHS = (1, 7, 40, 64, 100)


def _files(directory: Path) -> LocalModel:
    return LocalModel("tiny", directory, None, "test")


def _build(directory: Path) -> BuiltEmbedder:
    (directory / "tokenizer.json").write_text(_TOKENIZER, encoding="utf-8")
    config = EngineConfig(dtype="float32", threads=1)
    return build_embedder(open_embedder(_files(directory)), config, CpuDevice(), None)


_TOKENIZER = json.dumps(
    {
        "version": "1.0",
        "added_tokens": [],
        "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
    }
)


def _texts() -> list[list[int]]:
    rng = np.random.default_rng(0)
    return [rng.integers(3, 131, length).tolist() for length in _LENGTHS]


def _bidirectional(tiny: TinyModel, ids: list[int]) -> torch.Tensor:
    masks = {"full_attention": torch.zeros(1, 1, len(ids), len(ids))}
    hidden: torch.Tensor = tiny.oracle.model(torch.tensor([ids]), attention_mask=masks).last_hidden_state[0]
    return hidden


def _check(built: BuiltEmbedder, expected: list[torch.Tensor]) -> None:
    vectors = built.embedder.runner.embed([EmbedInput(tuple(ids)) for ids in _texts()]).get()
    unit = torch.nn.functional.normalize(torch.stack(expected), dim=-1)
    torch.testing.assert_close(torch.from_numpy(vectors), unit, atol=1e-4, rtol=0)


@torch.inference_mode()
def test_a_causal_decoder_gives_its_last_token(tmp_path: Path) -> None:
    tiny = make_tiny("qwen3", tmp_path)
    built = _build(tmp_path)
    assert built.props()["pooling"]["pooling"] == "last"
    _check(built, [tiny.oracle.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in _texts()])


@torch.inference_mode()
def test_gemma_that_sees_both_ways_gives_the_mean(tmp_path: Path) -> None:
    tiny = make_tiny("gemma3", tmp_path, use_bidirectional_attention=True)
    _check(_build(tmp_path), [tiny.oracle.model(torch.tensor([i])).last_hidden_state[0].mean(0) for i in _texts()])


@torch.inference_mode()
@pytest.mark.parametrize("change", [{"is_causal": False}, {"model_type": "bidirectional_pplx_qwen3"}])
def test_qwen_without_its_causal_mask_gives_the_mean(tmp_path: Path, change: dict[str, object]) -> None:
    tiny = make_tiny("qwen3", tmp_path)
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text(encoding="utf-8")), **change}), encoding="utf-8")
    _check(_build(tmp_path), [_bidirectional(tiny, ids).mean(0) for ids in _texts()])


def test_a_model_that_sees_both_ways_does_not_write(tmp_path: Path) -> None:
    make_tiny("gemma3", tmp_path, use_bidirectional_attention=True)
    with pytest.raises(ModelError, match="both ways"):
        open_model(_files(tmp_path))


def test_a_checkpoint_saved_without_its_head_is_read(tmp_path: Path) -> None:
    tiny = make_tiny("qwen3", tmp_path)
    tiny.oracle.model.save_pretrained(tmp_path)
    built = _build(tmp_path)
    with torch.inference_mode():
        _check(built, [tiny.oracle.model(torch.tensor([ids])).last_hidden_state[0, -1] for ids in _texts()])
