"""Where weights come from: one small protocol, and safetensors files behind it. Nothing here unpickles anything."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol, cast

import torch
from safetensors import SafetensorError, safe_open

from servekit.engine.layers.linear import ByteArray
from servekit.engine.models.parameters import Shape
from servekit.errors import ModelError

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...


class _SafeFile(Protocol):
    """The part of safetensors' untyped file object that is used here."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Slice: ...

    def get_tensor(self, name: str) -> torch.Tensor: ...


class WeightSource(Protocol):
    """A checkpoint: names and shapes without reading data, then one tensor at a time."""

    def shapes(self) -> Mapping[str, Shape]: ...

    def load(self, name: str) -> torch.Tensor: ...

    def stored(self, name: str) -> str:
        """ggml's name of the blocks a tensor is quantised in, such as Q4_1; "float" where it is not."""
        ...

    def blocks(self, name: str) -> ByteArray | None:
        """The rows of a quantised matrix as they are stored, bytes [rows, row bytes]; None where it is not."""
        ...

    def close(self) -> None: ...


class SafetensorsSource:
    """A directory with model.safetensors, sharded or not, memory-mapped.

    Raises ModelError when a shard is missing or broken, a tensor is not where the index says, or only pickled weights
    are there.
    """

    def __init__(self, directory: Path) -> None:
        self._files: dict[str, _SafeFile] = {}
        self._where: dict[str, str] = {}
        index = _read_index(directory)
        names = sorted(set(index.values())) if index is not None else [_SINGLE]
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelError(_explain_missing(directory, missing, index))
        for name in names:
            try:
                self._files[name] = cast(_SafeFile, safe_open(directory / name, framework="pt"))
            except (SafetensorError, OSError) as error:
                raise ModelError(f"{name} is not a readable safetensors file: {error}") from None
            for tensor in self._files[name].keys():  # noqa: SIM118 - not a dict
                if tensor in self._where:
                    raise ModelError(f"tensor {tensor} is in both {self._where[tensor]} and {name}")
                self._where[tensor] = name
        astray = [tensor for tensor, name in (index or {}).items() if self._where.get(tensor) != name]
        if astray:
            raise ModelError(f"{_INDEX} names tensors that its files do not have: {', '.join(sorted(astray)[:6])}")

    def shapes(self) -> Mapping[str, Shape]:
        """Every tensor's shape, from the headers."""
        return {name: tuple(self._files[file].get_slice(name).get_shape()) for name, file in self._where.items()}

    def load(self, name: str) -> torch.Tensor:
        """One tensor in the dtype it is stored in."""
        tensor = self._files[self._where[name]].get_tensor(name)
        if not tensor.dtype.is_floating_point:
            raise ModelError(f"tensor {name} is {tensor.dtype}, and servekit reads quantised weights from GGUF only")
        return tensor

    def stored(self, name: str) -> str:
        """Floats, all of them."""
        return "float"

    def blocks(self, name: str) -> ByteArray | None:
        """None: only floats are read."""
        return None

    def close(self) -> None:
        """Drop the memory maps."""
        self._files.clear()


def _read_index(directory: Path) -> dict[str, str] | None:
    file = directory / _INDEX
    if not file.is_file():
        return None
    try:
        weight_map = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(f"{_INDEX} cannot be read: {error!r}") from None
    names = weight_map.values() if isinstance(weight_map, dict) else [None]
    # A shard is a file beside the index: a path that leads elsewhere is not a checkpoint's business.
    if not all(isinstance(name, str) and name.endswith(".safetensors") and Path(name).name == name for name in names):
        raise ModelError(f"{_INDEX}: weight_map must map tensor names to .safetensors files beside it")
    return dict(weight_map)


def _explain_missing(directory: Path, missing: list[str], index: dict[str, str] | None) -> str:
    if index is not None:
        return f"{len(missing)} of {len(set(index.values()))} weight files are missing: {', '.join(missing)}"
    pickled = sorted(file.name for pattern in ("*.bin", "*.pt", "*.pth") for file in directory.glob(pattern))
    if pickled:
        return f"there is no safetensors file in the model's folder, and {pickled[0]} could run code when it is read"
    return "there is no safetensors file in the model's folder"
