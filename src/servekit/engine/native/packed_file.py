"""PackedWeights on disk: written once, read at every later start. It must not know models or where the file lies.

A file is MAGIC, the length of the header and its CRC-32, the header as JSON, and the arrays, each at a multiple of 64
bytes with a CRC-32 of its own. `identity` says what the weights were made from; a file of another identity is foreign.
"""

import contextlib
import json
import mmap
import os
import secrets
import struct
import sys
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from servekit.engine.native.matrix import ALIGNMENT, ByteArray, FloatArray, PackedMatrix, packed_bytes, padded_channels
from servekit.engine.native.weights import PackedWeights

LAYOUT = 1
"""Raised whenever the layout of panels or the way they are chosen changes, so that older files are packed again."""

_MAGIC = b"SKPACKED"
_HEAD = struct.Struct("<8sQI")
_MAX_HEADER = 64 * 2**20

Identity = Mapping[str, Any]
"""What JSON keeps as it is: texts, whole numbers, lists."""


class DamagedFileError(Exception):
    """A packed file that cannot be used, and why. It never leaves the loader: the weights are packed again."""


def write_packed(path: Path, identity: Identity, weights: PackedWeights) -> None:
    """Write the file so that it appears whole or not at all. Raises OSError, leaving nothing behind."""
    path.parent.mkdir(parents=True, exist_ok=True)
    header, arrays = _lay_out(identity, weights)
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(_HEAD.pack(_MAGIC, len(header), zlib.crc32(header)))
            file.write(header)
            for array in arrays:
                file.write(b"\0" * (-file.tell() % ALIGNMENT))
                file.write(array)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def read_packed(path: Path, identity: Identity, threads: int) -> PackedWeights:
    """Read the file and check every byte of it, `threads` arrays at a time.

    It is read into large pages where the system has them, and not mapped: a step walks through all weights, and with
    pages of 4 KiB it waits for their addresses. Raises DamagedFileError in words for a file that is cut short, changed,
    or made from something else; FileNotFoundError when there is none.
    """
    data = _read_whole(path)
    header, start = _read_header(data)
    if header.get("identity") != dict(identity):
        raise DamagedFileError("it was made from other weights or by another version")
    try:
        reader = _Reader(data, start)
        matrices = {name: reader.matrix(entry) for name, entry in header["matrices"].items()}
        vectors = {name: reader.floats(entry, tuple(entry["shape"])) for name, entry in header["vectors"].items()}
        errors = {str(name): float(error) for name, error in header["errors"].items()}
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedFileError(f"its table of contents cannot be read: {error!r}") from error
    reader.check(threads)
    return PackedWeights(matrices, vectors, errors)


def _large_pages(size: int) -> mmap.mmap:
    """Memory of its own: what is shared, Python's default, gets small pages."""
    if sys.platform == "win32":
        return mmap.mmap(-1, size)
    memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if sys.platform == "linux":
        with contextlib.suppress(OSError):  # a kernel without large pages says so
            memory.madvise(mmap.MADV_HUGEPAGE)
    return memory


def _read_whole(path: Path) -> mmap.mmap:
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size < _HEAD.size:
            raise DamagedFileError("it is cut short")
        memory = _large_pages(size)
        with memoryview(memory) as whole:
            position = 0
            while position < size and (count := file.readinto(whole[position:])):
                position += count
        if position < size:
            raise DamagedFileError("it is cut short")
        return memory


@dataclass(frozen=True, slots=True)
class _Piece:
    array: ByteArray
    checksum: int


class _Reader:
    """Arrays of a file in memory. Those that were taken are checked together at the end."""

    def __init__(self, data: mmap.mmap, start: int) -> None:
        self._bytes = np.frombuffer(data, np.uint8)
        self._start = start
        self._taken: list[_Piece] = []

    def matrix(self, entry: Mapping[str, Any]) -> PackedMatrix:
        format_, n, k = int(entry["format"]), int(entry["n"]), int(entry["k"])
        if n < 1 or k < 1:
            raise ValueError(f"a matrix of {n} x {k}")
        packed = self._take(entry, packed_bytes(format_, n, k))
        bias = None if entry["bias"] is None else self.floats(entry["bias"], (padded_channels(n),))
        return PackedMatrix(format_, n, k, packed, bias)

    def floats(self, entry: Mapping[str, Any], shape: tuple[int, ...]) -> FloatArray:
        return self._take(entry, int(np.prod(shape)) * 4).view(np.float32).reshape(shape)

    def check(self, threads: int) -> None:
        with ThreadPoolExecutor(threads) as pool:  # zlib lets others run
            sums = pool.map(zlib.crc32, [piece.array for piece in self._taken])
            if any(found != piece.checksum for found, piece in zip(sums, self._taken, strict=True)):
                raise DamagedFileError("its contents do not fit their checksums")

    def _take(self, entry: Mapping[str, Any], num_bytes: int) -> ByteArray:
        first = self._start + int(entry["offset"])
        if first % ALIGNMENT or first < self._start or first + num_bytes > len(self._bytes):
            raise ValueError("an array lies outside the file")
        array = self._bytes[first : first + num_bytes]
        self._taken.append(_Piece(array, int(entry["crc32"])))
        return array


def _lay_out(identity: Identity, weights: PackedWeights) -> tuple[bytes, list[memoryview]]:
    """The header, and the arrays in the order in which they follow it; offsets count from its padded end."""
    arrays: list[memoryview] = []
    position = 0

    def place(array: ByteArray | FloatArray) -> dict[str, Any]:
        nonlocal position
        view = np.ascontiguousarray(array).reshape(-1).view(np.uint8).data
        entry = {"offset": position, "crc32": zlib.crc32(view)}
        position += -(-view.nbytes // ALIGNMENT) * ALIGNMENT
        arrays.append(view)
        return entry

    matrices = {
        name: {
            "format": matrix.format,
            "n": matrix.n,
            "k": matrix.k,
            **place(matrix.packed),
            "bias": None if matrix.bias is None else place(matrix.bias),
        }
        for name, matrix in weights.matrices.items()
    }
    vectors = {name: {"shape": list(vector.shape), **place(vector)} for name, vector in weights.vectors.items()}
    contents = {"identity": dict(identity), "matrices": matrices, "vectors": vectors, "errors": weights.errors}
    return json.dumps(contents).encode(), arrays


def _read_header(data: mmap.mmap) -> tuple[dict[str, Any], int]:
    """The header, and where the arrays begin."""
    magic, length, checksum = _HEAD.unpack_from(data)
    if magic != _MAGIC:
        raise DamagedFileError("it is no file of packed weights")
    if length > _MAX_HEADER or _HEAD.size + length > len(data):
        raise DamagedFileError("it is cut short")
    text = data[_HEAD.size : _HEAD.size + length]
    if zlib.crc32(text) != checksum:
        raise DamagedFileError("its table of contents does not fit its checksum")
    header = json.loads(text)
    if not isinstance(header, dict):
        raise DamagedFileError("its table of contents cannot be read")
    end = _HEAD.size + length
    return header, end + -end % ALIGNMENT
