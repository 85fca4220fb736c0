"""From what the user typed to a config.json and what lies beside it: a file, folder, GGUF, pulled name or hub id."""

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from servekit.errors import ModelError, NotFoundError
from servekit.kvcalc.checkpoint import INDEX_NAME, StoredWeights, from_index, stored_weights

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_QUANTIZATION_NAME = "hf_quant_config.json"


@dataclass(frozen=True, slots=True)
class ConfigSource:
    """A model's config.json, the quantisation file beside it, and the sizes of its stored weights, where known."""

    name: str
    config: Mapping[str, Any]
    quantization: Mapping[str, Any] | None = None
    stored: StoredWeights | None = None


def read_source(text: str) -> ConfigSource:
    """Reads `-` (standard input), a path, a pulled name or a hub id, in this order; only the last uses the network.

    Raises NotFoundError when there is nothing under that name, ModelError when it is there but not readable.
    """
    if text == "-":
        return ConfigSource("standard input", parse_config(sys.stdin.buffer.read(), "standard input"))
    path = Path(text).expanduser()
    if path.suffix == ".gguf" and path.is_file():
        return _from_gguf(path, path.stem)
    if path.is_file():
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
        beside = path.parent if path.name == "config.json" else None
        return _from_file(path, name or path.stem, beside)
    if path.is_dir():
        return _from_directory(path, path.resolve().name)
    if path.suffix in (".json", ".gguf") or text.startswith((".", "/", "~")):
        raise NotFoundError(f"there is no file or folder {text}")
    return _from_store(text)


def parse_config(data: bytes, name: str) -> dict[str, Any]:
    """One JSON object. Raises ModelError naming the file when it is anything else."""
    try:
        config = json.loads(data.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise ModelError(f"{name} is not JSON: {str(error) or 'nested too deeply'}") from error
    if not isinstance(config, dict):
        raise ModelError(f"{name} must hold a JSON object, not {type(config).__name__}")
    return config


def _from_file(path: Path, name: str, beside: Path | None) -> ConfigSource:
    config = _read(path)
    if beside is None:
        return ConfigSource(name, config)
    quantization = beside / _QUANTIZATION_NAME
    return ConfigSource(name, config, _read(quantization) if quantization.is_file() else None, stored_weights(beside))


def _from_directory(directory: Path, name: str) -> ConfigSource:
    config = directory / "config.json"
    if config.is_file():
        return _from_file(config, name, directory)
    gguf = sorted(directory.glob("*.gguf"))
    if len(gguf) == 1:
        return _from_gguf(gguf[0], name)
    raise NotFoundError(f"{directory} holds no config.json")


def _from_gguf(path: Path, name: str) -> ConfigSource:
    from servekit.store.gguf_config import gguf_config
    from servekit.store.gguf_metadata import GgufFile

    with GgufFile(path) as file:
        config = gguf_config(file)
    return ConfigSource(name, config, None, StoredWeights(path.stat().st_size, None, "size of the GGUF file"))


def _from_store(text: str) -> ConfigSource:
    from servekit.store.resolve import find_model

    try:
        model = find_model(text)
    except NotFoundError:
        if not _HUB_ID.fullmatch(text):
            raise
        return _from_hub(text)
    if model.weights is not None:
        return _from_gguf(model.weights, model.name)
    return _from_directory(model.directory, model.name)


def _from_hub(name: str) -> ConfigSource:
    from servekit.cli.kv_hub import fetch_files

    files = fetch_files(name, ("config.json", INDEX_NAME, _QUANTIZATION_NAME))
    if "config.json" not in files:
        raise NotFoundError(f"the hub's {name} has no config.json")
    found = {file: _read(path) for file, path in files.items()}
    index = found.get(INDEX_NAME)
    stored = from_index(index) if index is not None else None
    return ConfigSource(name, found["config.json"], found.get(_QUANTIZATION_NAME), stored)


def _read(path: Path) -> dict[str, Any]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise ModelError(f"{path} cannot be read: {error.strerror or error}") from error
    return parse_config(data, str(path))
