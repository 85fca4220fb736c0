"""Packed weights on disk: the same numbers back, and nothing taken from a file that is not whole and its own."""

import json
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from servekit.engine.native import structs
from servekit.engine.native.matrix import PackedMatrix, aligned, aligned_empty, packed_bytes
from servekit.engine.native.packed_file import DamagedFileError, read_packed, write_packed
from servekit.engine.native.weights import PackedWeights

_IDENTITY = {"layout": 1, "files": [["model.gguf", 12, 34]]}


def _matrix(format_: int, n: int, k: int, *, has_bias: bool) -> PackedMatrix:
    packed = aligned_empty(packed_bytes(format_, n, k))
    packed[:] = np.random.default_rng(n).integers(0, 256, packed.shape, dtype=np.uint8)
    return PackedMatrix(format_, n, k, packed, aligned(np.arange(-(-n // 16) * 16)) if has_bias else None)


@pytest.fixture
def weights() -> PackedWeights:
    return PackedWeights(
        matrices={
            "0.qkv": _matrix(structs.Q4, 40, 70, has_bias=True),
            "embedding": _matrix(structs.Q8, 131, 64, has_bias=False),
        },
        vectors={"final_norm": aligned(np.arange(7)), "0.qk_norm": aligned(np.ones((3, 5)))},
        errors={"0.qkv": 0.0725},
    )


@pytest.fixture
def file(tmp_path: Path, weights: PackedWeights) -> Path:
    path = tmp_path / "folder" / "packed.bin"
    write_packed(path, _IDENTITY, weights)
    return path


def test_everything_comes_back_aligned(file: Path, weights: PackedWeights) -> None:
    found = read_packed(file, _IDENTITY, threads=2)
    assert found.errors == weights.errors
    assert found.worst() == ("0.qkv", 0.0725)
    assert found.matrices.keys() == weights.matrices.keys()
    for name, matrix in weights.matrices.items():
        other = found.matrices[name]
        assert (other.format, other.n, other.k, other.nbytes) == (matrix.format, matrix.n, matrix.k, matrix.nbytes)
        np.testing.assert_array_equal(other.packed, matrix.packed)
        assert other.packed.ctypes.data % 64 == 0
        assert (other.bias is None) == (matrix.bias is None)
        if matrix.bias is not None and other.bias is not None:
            np.testing.assert_array_equal(other.bias, matrix.bias)
    for name, vector in weights.vectors.items():
        np.testing.assert_array_equal(found.vectors[name], vector)
        assert found.vectors[name].ctypes.data % 64 == 0


def test_only_the_file_itself_is_left(file: Path) -> None:
    assert list(file.parent.iterdir()) == [file]


def test_what_was_read_outlives_the_file(file: Path, weights: PackedWeights) -> None:
    found = read_packed(file, _IDENTITY, threads=1)
    file.unlink()
    np.testing.assert_array_equal(found.matrices["embedding"].packed, weights.matrices["embedding"].packed)


def test_a_file_of_another_identity_is_foreign(file: Path) -> None:
    for identity in ({**_IDENTITY, "layout": 2}, {**_IDENTITY, "files": [["model.gguf", 12, 35]]}, {}):
        with pytest.raises(DamagedFileError, match="made from other weights"):
            read_packed(file, identity, threads=1)


def test_a_missing_file_is_told_apart(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        read_packed(tmp_path / "none", _IDENTITY, threads=1)


@pytest.mark.parametrize("length", [0, 1, 19, 20, 300])
def test_a_file_cut_short_is_damaged(file: Path, length: int) -> None:
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(DamagedFileError):
        read_packed(file, _IDENTITY, threads=1)


def test_a_missing_last_byte_is_noticed(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(DamagedFileError, match="outside the file"):
        read_packed(file, _IDENTITY, threads=1)


def test_every_changed_byte_that_is_read_is_noticed(file: Path) -> None:
    """All bytes but the zeros between arrays, in steps that hit each array many times."""
    whole = file.read_bytes()
    unchanged = 0
    for place in range(0, len(whole), 13):
        changed = bytearray(whole)
        changed[place] ^= 0x40
        file.write_bytes(changed)
        try:
            read_packed(file, _IDENTITY, threads=1)
        except DamagedFileError:
            continue
        assert whole[place] == 0
        unchanged += 1
    assert unchanged < 0.05 * len(whole) / 13


def _with_header(change: Callable[[dict[str, Any]], None], whole: bytes) -> bytes:
    """The file with another table of contents, under a checksum that fits."""
    length = int(struct.unpack_from("<8sQI", whole)[1])
    header = json.loads(whole[20 : 20 + length])
    change(header)
    text = json.dumps(header).encode()
    text += b" " * (length - len(text))
    assert len(text) == length
    head: bytes = struct.pack("<8sQI", b"SKPACKED", length, zlib.crc32(text))
    return b"".join((head, text, whole[20 + length :]))


@pytest.mark.parametrize(
    ("field", "value"), [("offset", 1), ("offset", -64), ("n", 0), ("n", 4096), ("k", "x"), ("format", 9)]
)
def test_a_table_of_contents_that_lies_is_damaged(file: Path, field: str, value: object) -> None:
    def change(header: dict[str, Any]) -> None:
        header["matrices"]["embedding"][field] = value
        header["errors"] = {}

    file.write_bytes(_with_header(change, file.read_bytes()))
    with pytest.raises(DamagedFileError):
        read_packed(file, _IDENTITY, threads=1)


def test_a_write_that_fails_leaves_nothing_and_the_old_file(
    file: Path, weights: PackedWeights, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = file.read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("servekit.engine.native.packed_file.os.fsync", full)
    with pytest.raises(OSError, match="No space left"):
        write_packed(file, {"layout": 7}, weights)
    assert list(file.parent.iterdir()) == [file]
    assert file.read_bytes() == before
