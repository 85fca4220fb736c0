"""What the files that sentence-transformers writes say, in both spellings, and what is refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest

from servekit.engine.spec.pooling import DenseSpec, read_embedding_spec
from servekit.errors import ModelError

Part = tuple[str, dict[str, Any]]


def write(directory: Path, *parts: Part, **files: Any) -> None:
    """A modules.json of `parts`, each a kind and its config, and more files by name."""
    modules = []
    for index, (kind, config) in enumerate(parts):
        path = f"{index}_{kind}" if index else ""
        modules.append({"idx": index, "name": str(index), "path": path, "type": f"sentence_transformers.models.{kind}"})
        (directory / path).mkdir(exist_ok=True)
        if index:
            (directory / path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (directory / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    for name, content in files.items():
        (directory / f"{name}.json").write_text(json.dumps(content), encoding="utf-8")


MEAN = ("Pooling", {"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False})
BERT = ("Transformer", dict[str, Any]())


def test_without_files_the_family_decides(tmp_path: Path) -> None:
    spec = read_embedding_spec(tmp_path, {}, default="last")
    assert (spec.pooling, spec.normalise, spec.max_tokens, spec.matryoshka) == ("last", True, None, None)
    assert spec.reason.startswith("last: the default")


def test_the_files_win(tmp_path: Path) -> None:
    write(
        tmp_path,
        BERT,
        MEAN,
        ("Dense", {"in_features": 8, "out_features": 4, "bias": False, "activation_function": "torch.nn.Identity"}),
        ("Normalize", {}),
        sentence_bert_config={"max_seq_length": 99, "do_lower_case": True},
        config_sentence_transformers={"prompts": {"query": "Q: ", "document": ""}, "default_prompt_name": "query"},
    )
    spec = read_embedding_spec(tmp_path, {"is_matryoshka": True}, default="last")
    assert (spec.pooling, spec.normalise, spec.max_tokens, spec.lower_case) == ("mean", True, 99, True)
    assert (spec.prompts, spec.default_prompt) == ({"query": "Q: ", "document": ""}, "Q: ")
    assert spec.dense == (DenseSpec("2_Dense", 8, 4, False, "identity"),)
    assert spec.matryoshka == ()
    assert spec.reason == "mean: 1_Pooling/config.json"


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_cls_token": True}, "cls"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode_max_tokens": True}, "max"),
        ({"pooling_mode": "lasttoken"}, "last"),
        ({"pooling_mode_weightedmean_tokens": True}, "weighted_mean"),
        ({"pooling_mode": "mean_sqrt_len_tokens"}, "mean_sqrt_len"),
        ({"pooling_mode": ["cls"]}, "cls"),
        ({}, "mean"),
    ],
)
def test_modes_in_both_spellings(tmp_path: Path, config: dict[str, Any], pooling: str) -> None:
    write(tmp_path, BERT, ("Pooling", config))
    assert read_embedding_spec(tmp_path, {}, default="mean").pooling == pooling


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ((BERT, ("Pooling", {"pooling_mode": "weightedmean", "include_prompt": False})), "weighted mean"),
        ((BERT, ("Pooling", {"pooling_mode_cls_token": True, "pooling_mode_max_tokens": True})), r"cls \+ max"),
        ((BERT, MEAN, ("FlexibleQuantizer", {})), "FlexibleQuantizer"),
        ((BERT, ("Dense", {"in_features": 8, "out_features": 4})), "Dense"),
        (
            (BERT, MEAN, ("Dense", {"in_features": 8, "out_features": 4, "activation_function": "torch.nn.ReLU"})),
            "ReLU",
        ),
        ((BERT,), "no Pooling"),
    ],
)
def test_what_is_not_offered_is_refused(tmp_path: Path, parts: tuple[Part, ...], message: str) -> None:
    write(tmp_path, *parts)
    with pytest.raises(ModelError, match=message):
        read_embedding_spec(tmp_path, {}, default="mean")


def test_a_part_outside_the_folder_is_refused(tmp_path: Path) -> None:
    modules = [{"path": "../elsewhere", "type": "sentence_transformers.models.Pooling"}]
    (tmp_path / "modules.json").write_text(json.dumps(modules), encoding="utf-8")
    with pytest.raises(ModelError, match="leads out"):
        read_embedding_spec(tmp_path, {}, default="mean")


@pytest.mark.parametrize(
    "settings", [{"prompts": ["a"]}, {"prompts": {"a": 1}}, {"prompts": {"a": "b"}, "default_prompt_name": "c"}]
)
def test_prompts_must_be_texts_by_name(tmp_path: Path, settings: dict[str, Any]) -> None:
    write(tmp_path, BERT, MEAN, config_sentence_transformers=settings)
    with pytest.raises(ModelError, match="prompt"):
        read_embedding_spec(tmp_path, {}, default="mean")
