"""Sizes that lie beside a config.json: safetensors headers and the index. It reads headers only, never a weight.

Format: eight bytes of little-endian length, then that many bytes of JSON.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, Final

from servekit.errors import ModelError

INDEX_NAME: Final = "model.safetensors.index.json"
_MAX_HEADER: Final = 100 * 2**20
_PLAIN: Final = frozenset({"F64", "F32", "F16", "BF16"})


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """Bytes of the stored tensors, and their elements where those are not packed; `source` says where from."""

    num_bytes: int
    num_parameters: int | None
    source: str


def stored_weights(directory: Path) -> StoredWeights | None:
    """What the weight files of a model directory hold, from their headers when all are there, else from the index.

    None when the directory has neither. Raises ModelError for a file that is no safetensors file.
    """
    index = _read_index(directory / INDEX_NAME)
    names = sorted(set(index.get("weight_map", {}).values())) if index else []
    files = [directory / Path(name).name for name in names] or sorted(directory.glob("*.safetensors"))
    if files and all(file.is_file() for file in files):
        return _from_headers(files)
    return from_index(index) if index else None


def from_index(index: Mapping[str, Any]) -> StoredWeights | None:
    """The sizes that an index states about itself, or None when it does not."""
    metadata = index.get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, Mapping) else None
    if isinstance(size, bool) or not isinstance(size, int | float) or size <= 0:
        return None
    count = metadata.get("total_parameters") if isinstance(metadata, Mapping) else None
    count = count if isinstance(count, int) and not isinstance(count, bool) and count > 0 else None
    return StoredWeights(int(size), count, INDEX_NAME)


def _from_headers(files: list[Path]) -> StoredWeights:
    num_bytes, num_parameters, is_plain = 0, 0, True
    for file in files:
        for tensor in _header(file).values():
            begin, end = tensor["data_offsets"]
            num_bytes += end - begin
            num_parameters += prod(tensor["shape"])
            is_plain = is_plain and tensor["dtype"] in _PLAIN
    return StoredWeights(num_bytes, num_parameters if is_plain else None, "safetensors headers")


def _header(file: Path) -> dict[str, dict[str, Any]]:
    try:
        with open(file, "rb") as stream:
            length = int.from_bytes(stream.read(8), "little")
            if not 2 <= length <= _MAX_HEADER:
                raise ValueError(f"its header claims {length:,} bytes")
            data = stream.read(length)
        if len(data) < length:
            raise ValueError("it ends within its header")
        header = json.loads(data.decode("utf-8"))
        header.pop("__metadata__", None)
        for tensor in header.values():
            begin, end = tensor["data_offsets"]
            if not 0 <= begin <= end or tensor["dtype"] == "" or any(size < 0 for size in tensor["shape"]):
                raise ValueError("its header has an impossible tensor")
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"{file.name} is not a safetensors file: {error}") from error
    return dict(header)


def _read_index(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        with open(path, encoding="utf-8") as stream:
            index = json.load(stream)
        names = index.get("weight_map", {}).values()
        if not all(isinstance(name, str) for name in names):
            raise ValueError("weight_map must map to file names")
    except (OSError, ValueError, AttributeError) as error:
        raise ModelError(f"{path.name} cannot be read: {error}") from error
    return dict(index)
