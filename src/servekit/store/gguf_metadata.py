"""Read the header of a GGUF file: key-value metadata and the list of tensors. It must not know what either means.

Format: the GGUF specification, versions 2 and 3, little-endian. The file is memory-mapped and arrays are decoded only
when asked for. This is a reader of our own because gguf.GGUFReader builds one array object for each token and merge:
2.2 s for the 98 MB demo file, against 16 ms here.
"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from servekit.errors import ModelError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_STRING, _ARRAY = 8, 9
_SCALARS = {
    code: struct.Struct("<" + letter)
    for code, letter in {
        0: "B",
        1: "b",
        2: "H",
        3: "h",
        4: "I",
        5: "i",
        6: "f",
        7: "?",
        10: "Q",
        11: "q",
        12: "d",
    }.items()
}
_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_MAX_DIMENSIONS = 4

Scalar = bool | int | float | str


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """One tensor: `shape` is row-major, `type_id` is ggml's number of the storage type, `offset` is in the file."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True, slots=True)
class _Array:
    """Where an array lies: element type, element count, offset of the first element."""

    type_id: int
    count: int
    offset: int


class GgufFile:
    """An open GGUF file.

    Raises ModelError when the file is missing, is not GGUF of a known version, or ends too early.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._values: dict[str, Scalar | _Array] = {}
        self.tensors: dict[str, GgufTensor] = {}
        try:
            with open(path, "rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as error:
            raise ModelError(f"{path.name} cannot be read: {error}") from error
        try:
            self._read_header()
        except (struct.error, OverflowError, UnicodeDecodeError) as error:
            self.close()
            raise ModelError(f"{path.name} is damaged: its header ends too early or holds no text") from error
        except ModelError:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Unmap the file; arrays that views were taken of keep it open until they are gone."""
        self._map.close()

    @property
    def data(self) -> mmap.mmap:
        """The whole file."""
        return self._map

    def __contains__(self, key: str) -> bool:
        return key in self._values

    def scalar(self, key: str) -> Any:
        """The number, truth value or string under `key`, or None when there is none or it is an array."""
        value = self._values.get(key)
        return None if isinstance(value, _Array) else value

    def array(self, key: str) -> list[Any] | None:
        """The elements of the array under `key`, or None when there is none or it is not an array."""
        value = self._values.get(key)
        if not isinstance(value, _Array):
            return None
        if value.type_id == _STRING:
            return self._strings(value)
        layout = _SCALARS.get(value.type_id)
        if layout is None:
            raise ModelError(f"{self.path.name}: {key} is an array of arrays, which is not read")
        return list(struct.unpack_from(f"<{value.count}{layout.format[1:]}", self._map, value.offset))

    def _strings(self, array: _Array) -> list[Any]:
        texts, position, data = [], array.offset, self._map
        try:
            for _ in range(array.count):
                end = position + 8 + _U64.unpack_from(data, position)[0]
                texts.append(data[position + 8 : end].decode("utf-8"))
                position = end
        except UnicodeDecodeError as error:
            raise ModelError(f"{self.path.name} is damaged: a text at byte {position} is not UTF-8") from error
        return texts

    def _read_header(self) -> None:
        if self._map[:4] != _MAGIC:
            raise ModelError(f"{self.path.name} is not a GGUF file")
        (version,) = _U32.unpack_from(self._map, 4)
        if version not in _VERSIONS:
            hint = "big-endian files are not read" if version & 0xFFFF == 0 else None
            raise ModelError(f"{self.path.name} is GGUF version {version}; versions 2 and 3 are read", hint=hint)
        num_tensors, num_values = struct.unpack_from("<QQ", self._map, 8)
        position = 24
        for _ in range(num_values):
            key, position = self._read_string(position)
            (type_id,) = _U32.unpack_from(self._map, position)
            self._values[key], position = self._read_value(type_id, position + 4)
        found = []
        for _ in range(num_tensors):
            name, position = self._read_string(position)
            (num_dimensions,) = _U32.unpack_from(self._map, position)
            if num_dimensions > _MAX_DIMENSIONS:
                self._fail(f"tensor {name} has {num_dimensions} dimensions")
            *dimensions, type_id, offset = struct.unpack_from(f"<{num_dimensions}QIQ", self._map, position + 4)
            position += 16 + 8 * num_dimensions
            found.append((name, tuple(reversed(dimensions)), type_id, offset))
        alignment = self.scalar("general.alignment") or 32
        start = (position + alignment - 1) // alignment * alignment
        for name, shape, type_id, offset in found:
            if name in self.tensors:
                self._fail(f"tensor {name} appears twice")
            if start + offset >= len(self._map):
                self._fail(f"tensor {name} lies past the end of the file; is the download complete?")
            self.tensors[name] = GgufTensor(name, shape, type_id, start + offset)

    def _read_string(self, position: int) -> tuple[str, int]:
        end = position + 8 + _U64.unpack_from(self._map, position)[0]
        if end > len(self._map):
            self._fail("a text runs past the end of the file")
        return self._map[position + 8 : end].decode("utf-8"), end

    def _read_value(self, type_id: int, position: int) -> tuple[Scalar | _Array, int]:
        if type_id == _STRING:
            return self._read_string(position)
        if type_id == _ARRAY:
            element_type, count = struct.unpack_from("<IQ", self._map, position)
            array = _Array(element_type, count, position + 12)
            return array, self._end_of(array)
        layout = self._layout(type_id)
        return layout.unpack_from(self._map, position)[0], position + layout.size

    def _end_of(self, array: _Array) -> int:
        position, data, size = array.offset, self._map, len(self._map)
        if array.type_id != _STRING:
            position += array.count * self._layout(array.type_id).size
        else:
            unpack = _U64.unpack_from
            for _ in range(array.count):
                position += 8 + unpack(data, position)[0]
        if position > size:
            self._fail("an array runs past the end of the file")
        return position

    def _layout(self, type_id: int) -> struct.Struct:
        layout = _SCALARS.get(type_id)
        if layout is None:
            self._fail(f"value type {type_id} is unknown")
        return layout

    def _fail(self, what: str) -> NoReturn:
        raise ModelError(f"{self.path.name} is damaged: {what}")
