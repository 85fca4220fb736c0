"""EmbeddingSpec: how a model's hidden states become embeddings, from the files that sentence-transformers writes.

`modules.json` names the parts in order, each with a folder of its own; `sentence_bert_config.json` limits the length;
`config_sentence_transformers.json` has the prompts. It must not know tensors.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from servekit.engine.spec.json_files import parse_json, read_json_if_there
from servekit.errors import ModelError

Pooling = Literal["cls", "mean", "last", "max", "weighted_mean", "mean_sqrt_len"]

_MODES: Mapping[str, Pooling] = {
    "cls": "cls",
    "mean": "mean",
    "lasttoken": "last",
    "max": "max",
    "weightedmean": "weighted_mean",
    "mean_sqrt_len_tokens": "mean_sqrt_len",
}
_OLD_MODES: Mapping[str, str] = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_lasttoken": "lasttoken",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
}
_ACTIVATIONS: Mapping[str, Literal["identity", "tanh"]] = {"Identity": "identity", "Tanh": "tanh"}


@dataclass(frozen=True, slots=True)
class DenseSpec:
    """A linear layer behind the pooling, with its weights in `folder`."""

    folder: str
    in_features: int
    out_features: int
    has_bias: bool
    activation: Literal["identity", "tanh"]


@dataclass(frozen=True, slots=True)
class EmbeddingSpec:
    """Pool, then the dense layers, then unit length if `normalise`.

    `prompts` stand before texts by name, `default_prompt` when no name is given. `max_tokens` is the files' own limit,
    special tokens included. `matryoshka` lists the sizes to which a vector may be cut (arXiv:2205.13147); empty for
    any size, None when the files do not say that it may be cut. Where not `includes_prompt`, a prompt's tokens and the
    special ones before them are read, but not pooled. `reason` says where the pooling comes from.
    """

    pooling: Pooling
    normalise: bool
    reason: str
    dense: tuple[DenseSpec, ...] = ()
    prompts: Mapping[str, str] = field(default_factory=dict)
    default_prompt: str | None = None
    max_tokens: int | None = None
    lower_case: bool = False
    includes_prompt: bool = True
    matryoshka: tuple[int, ...] | None = None


def has_embedding_files(directory: Path) -> bool:
    """Whether the folder says of itself that it holds an embedding model."""
    return (directory / "modules.json").is_file()


def read_embedding_spec(directory: Path, config: Mapping[str, Any], *, default: Pooling) -> EmbeddingSpec:
    """What the files in `directory` ask for; without them `default` pooling and unit length.

    Raises ModelError for a part or a mode that is not offered.
    """
    texts = read_json_if_there(directory / "config_sentence_transformers.json")
    prompts = texts.get("prompts") or {}
    if not isinstance(prompts, Mapping) or not all(isinstance(text, str) for text in prompts.values()):
        raise ModelError("config_sentence_transformers.json: prompts must map names to texts")
    default_prompt = texts.get("default_prompt_name")
    if default_prompt is not None and default_prompt not in prompts:
        raise ModelError(f"config_sentence_transformers.json: there is no prompt {default_prompt!r}")
    shared: dict[str, Any] = {
        "prompts": dict(prompts),
        "default_prompt": prompts.get(default_prompt),
        "matryoshka": _matryoshka(config, texts),
    }
    if not has_embedding_files(directory):
        reason = f"{default}: the default of this family, since the model has no modules.json"
        return EmbeddingSpec(pooling=default, normalise=True, reason=reason, **shared)
    return _read_modules(directory, shared)


def _read_modules(directory: Path, shared: dict[str, Any]) -> EmbeddingSpec:
    modules = _read_list(directory / "modules.json")
    pooling: Pooling | None = None
    reason, normalise, includes_prompt, dense = "", False, True, []
    limits: Mapping[str, Any] = {}
    for module in modules:
        kind, folder = str(module.get("type", "")).rsplit(".", 1)[-1], str(module.get("path", ""))
        if ".." in Path(folder).parts or Path(folder).is_absolute():
            raise ModelError(f"modules.json: {folder!r} leads out of the model's folder")
        if kind == "Transformer":
            limits = read_json_if_there(directory / folder / "sentence_bert_config.json")
        elif kind == "Pooling":
            config = read_json_if_there(directory / folder / "config.json")
            pooling = _read_mode(config, folder)
            includes_prompt = config.get("include_prompt") is not False
            reason = f"{pooling}: {folder}/config.json"
        elif kind == "Dense" and pooling is not None and not normalise:
            dense.append(_read_dense(read_json_if_there(directory / folder / "config.json"), folder))
        elif kind == "Normalize" and pooling is not None:
            normalise = True
        else:
            raise ModelError(f"modules.json: the part {kind!r} at this place is not offered by servekit")
    if pooling is None:
        raise ModelError("modules.json: there is no Pooling among its parts")
    max_tokens = limits.get("max_seq_length")
    if max_tokens is not None and (not isinstance(max_tokens, int) or max_tokens < 1):
        raise ModelError(f"sentence_bert_config.json: max_seq_length must be a positive number, not {max_tokens!r}")
    return EmbeddingSpec(
        pooling=pooling,
        normalise=normalise,
        reason=reason,
        dense=tuple(dense),
        max_tokens=max_tokens,
        lower_case=limits.get("do_lower_case") is True,
        includes_prompt=includes_prompt,
        **shared,
    )


def _read_mode(config: Mapping[str, Any], folder: str) -> Pooling:
    """The one mode that is on, in either spelling."""
    named = config.get("pooling_mode")
    if named is not None:
        modes = list(named) if isinstance(named, list) else [named]
    else:
        modes = [mode for key, mode in _OLD_MODES.items() if config.get(key)] or ["mean"]
    if len(modes) != 1 or modes[0] not in _MODES:
        raise ModelError(
            f"{folder}/config.json: the pooling {' + '.join(map(str, modes))} is not offered by servekit",
            hint=f"it pools by one of {', '.join(_MODES)}",
        )
    if _MODES[modes[0]] == "weighted_mean" and config.get("include_prompt") is False:
        raise ModelError(
            f"{folder}/config.json: a weighted mean without the prompt's tokens is not offered by servekit"
        )
    return _MODES[modes[0]]


def _read_dense(config: Mapping[str, Any], folder: str) -> DenseSpec:
    activation = str(config.get("activation_function", "Tanh")).rsplit(".", 1)[-1]
    sizes = [config.get(name) for name in ("in_features", "out_features")]
    if activation not in _ACTIVATIONS or config.get("use_residual") or not all(isinstance(n, int) for n in sizes):
        raise ModelError(f"{folder}/config.json: this dense layer ({activation}) is not offered by servekit")
    return DenseSpec(folder, int(sizes[0] or 0), int(sizes[1] or 0), config.get("bias", True), _ACTIVATIONS[activation])


def _matryoshka(config: Mapping[str, Any], texts: Mapping[str, Any]) -> tuple[int, ...] | None:
    """Sizes under `matryoshka_dimensions`, or any with `is_matryoshka`, in either file."""
    for source in (texts, config):
        sizes = source.get("matryoshka_dimensions")
        if isinstance(sizes, list) and sizes and all(isinstance(size, int) and size > 0 for size in sizes):
            return tuple(sorted(sizes))
        if source.get("is_matryoshka") is True:
            return ()
    return None


def _read_list(file: Path) -> list[dict[str, Any]]:
    content = parse_json(file)
    if not isinstance(content, list) or not all(isinstance(item, dict) for item in content):
        raise ModelError(f"{file.name} must be a JSON list of objects")
    return content
