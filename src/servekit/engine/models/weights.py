"""Where weights come from: one small protocol, and safetensors files behind it. Nothing here unpickles anything.

torch is imported only when a tensor is asked for, so that a model whose packed weights are kept starts without it.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, cast

import numpy as np
from safetensors import SafetensorError, safe_open

from servekit.engine.models.parameters import Shape
from servekit.engine.native.matrix import ByteArray, FloatArray
from servekit.errors import ModelError

if TYPE_CHECKING:
    import torch

Progress = Callable[[int, int], None]
"""Called with layers done and layers in all."""

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"


class _Slice(Protocol):
    def get_shape(self) -> list[int]: ...

    def get_dtype(self) -> str: ...


class _SafeFile(Protocol):
    """The part of safetensors' untyped file object that is used here."""

    def keys(self) -> list[str]: ...

    def get_slice(self, name: str) -> _Slice: ...

    def get_tensor(self, name: str) -> Any: ...


class WeightSource(Protocol):
    """A checkpoint: names and shapes without reading data, then one tensor at a time."""

    def shapes(self) -> Mapping[str, Shape]: ...

    def load(self, name: str) -> "torch.Tensor": ...

    def numbers(self, name: str) -> FloatArray:
        """The same as float32 on the host."""
        ...

    def stored(self, name: str) -> str:
        """ggml's name of the blocks a tensor is quantised in, such as Q4_1; "float" where it is not."""
        ...

    def blocks(self, name: str) -> ByteArray | None:
        """The rows of a quantised matrix as they are stored, bytes [rows, row bytes]; None where it is not."""
        ...

    def close(self) -> None: ...


class SourceRows:
    """A matrix of a weight source; nothing is read before it is asked for."""

    def __init__(self, source: WeightSource, name: str) -> None:
        rows, columns = source.shapes()[name]
        self.shape = (rows, columns)
        self.stored = source.stored(name)
        self._source = source
        self._name = name

    def numbers(self) -> FloatArray:
        """The matrix as float32."""
        return self._source.numbers(self._name)

    def blocks(self) -> ByteArray | None:
        """The source's own blocks, if it has them."""
        return self._source.blocks(self._name)


class SafetensorsSource:
    """A directory with model.safetensors, sharded or not, memory-mapped.

    Raises ModelError when a shard is missing or broken, a tensor is not where the index says, or only pickled weights
    are there.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._files: dict[str, _SafeFile] = {}
        self._in_torch: dict[str, _SafeFile] = {}
        self._headers: dict[str, dict[str, Any]] = {}
        self._where: dict[str, str] = {}
        index = _read_index(directory)
        names = sorted(set(index.values())) if index is not None else [_SINGLE]
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise ModelError(_explain_missing(directory, missing, index))
        for name in names:
            try:
                self._files[name] = _open(directory / name, "numpy")
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

    def load(self, name: str) -> "torch.Tensor":
        """One tensor in the dtype it is stored in."""
        file = self._where[name]
        if file not in self._in_torch:
            self._in_torch[file] = _open(self._directory / file, "pt")
        tensor: torch.Tensor = self._in_torch[file].get_tensor(name)
        if not tensor.dtype.is_floating_point:
            raise ModelError(f"tensor {name} is {tensor.dtype}, and servekit reads quantised weights from GGUF only")
        return tensor

    def numbers(self, name: str) -> FloatArray:
        """One tensor as float32, without torch for the usual dtypes."""
        file = self._where[name]
        dtype = self._files[file].get_slice(name).get_dtype()
        if dtype == "BF16":
            return self._widened(file, name)
        if dtype in ("F16", "F32"):
            return np.asarray(self._files[file].get_tensor(name), dtype=np.float32)
        numbers: FloatArray = self.load(name).float().contiguous().numpy()
        return numbers

    def _widened(self, file: str, name: str) -> FloatArray:
        """A bfloat16 tensor, read from the file itself, since numpy does not know the dtype. `safe_open` has checked
        the header: eight bytes of its length, then JSON that says where each tensor lies behind it."""
        with (self._directory / file).open("rb") as raw:
            header = int.from_bytes(raw.read(8), "little")
            if file not in self._headers:
                self._headers[file] = json.loads(raw.read(header))
            entry = self._headers[file][name]
            begin, end = entry["data_offsets"]
            raw.seek(8 + header + begin)
            halves = np.frombuffer(raw.read(end - begin), dtype="<u2")
        return (halves.astype(np.uint32) << 16).view(np.float32).reshape(entry["shape"])

    def stored(self, name: str) -> str:
        """Floats, all of them."""
        return "float"

    def blocks(self, name: str) -> ByteArray | None:
        """None: only floats are read."""
        return None

    def close(self) -> None:
        """Drop the memory maps."""
        self._files.clear()
        self._in_torch.clear()


def _open(path: Path, framework: str) -> _SafeFile:
    return cast(_SafeFile, safe_open(path, framework=framework))


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
