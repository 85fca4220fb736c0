"""Cross-encoders of every family with a head equal transformers, all pairs in one ragged batch."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servekit.config import EngineConfig
from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.device.cpu import CpuDevice
from servekit.engine.embedding_model import build_embedder
from servekit.engine.open_embedder import open_embedder
from servekit.errors import ModelError
from servekit.store.resolve import LocalModel
from tests.engine.encoder_families import make_encoder

_TOKENIZER = {
    "version": "1.0",
    "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"},
}
_HEAD = "AutoModelForSequenceClassification"


def _scores(directory: Path, inputs: list[EmbedInput]) -> torch.Tensor:
    (directory / "tokenizer.json").write_text(json.dumps(_TOKENIZER), encoding="utf-8")
    opened = open_embedder(LocalModel("tiny", directory, None, "test"))
    assert opened.embedding is None
    built = build_embedder(opened, EngineConfig(dtype="float32", threads=1), CpuDevice(), None)
    assert (built.embedder.is_scorer, built.props()["task"]) == (True, "score")
    return torch.from_numpy(built.embedder.runner.embed(inputs).get())


@torch.inference_mode()
@pytest.mark.parametrize(
    ("family", "config"),
    [
        ("bert", {}),
        ("bert", {"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}),
        ("xlm-roberta", {}),
        ("distilbert", {}),
        ("mpnet", {}),
        ("modernbert", {}),
        ("modernbert-biased", {"classifier_pooling": "mean", "classifier_bias": True}),
    ],
)
def test_scores_equal_transformers(tmp_path: Path, family: str, config: dict[str, Any]) -> None:
    tiny = make_encoder(family, tmp_path, head=_HEAD, num_labels=1, **config)
    rng = np.random.default_rng(1)
    texts = [rng.integers(3, 131, length).tolist() for length in (5, 30, 64, 100)]
    types = family == "bert"
    inputs = [EmbedInput(tuple(text), len(text) // 2 if types else None) for text in texts]
    expected = []
    for text in texts:
        second = [int(types and i >= len(text) // 2) for i in range(len(text))]
        more = {"token_type_ids": torch.tensor([second])} if types else {}
        logits = tiny.oracle(torch.tensor([text]), **more).logits[0]
        expected.append(logits if "sbert_ce_default_activation_function" in config else logits.sigmoid())
    torch.testing.assert_close(_scores(tmp_path, inputs), torch.stack(expected), atol=1e-4, rtol=0)


def test_a_classifier_of_several_labels_is_refused(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path, head=_HEAD, num_labels=3)
    with pytest.raises(ModelError, match="3 labels"):
        open_embedder(LocalModel("tiny", tmp_path, None, "test"))


def test_an_unknown_score_activation_is_refused(tmp_path: Path) -> None:
    make_encoder("bert", tmp_path, head=_HEAD, num_labels=1, sbert_ce_default_activation_function="torch.nn.Softplus")
    with pytest.raises(ModelError, match="Softplus"):
        open_embedder(LocalModel("tiny", tmp_path, None, "test"))
