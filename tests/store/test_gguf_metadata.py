import struct
from pathlib import Path

import gguf
import numpy as np
import pytest

from servekit.errors import ModelError
from servekit.store.gguf_metadata import GgufFile
from tests.store.gguf_files import HIDDEN, byte_level_vocabulary, write_gguf


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", extra={"test.flag": True, "test.ratio": 0.5, "test.text": "→ é 日"})


def test_scalars_and_texts_are_read(path: Path) -> None:
    with GgufFile(path) as file:
        assert file.scalar("general.architecture") == "llama"
        assert file.scalar("llama.block_count") == 2
        assert file.scalar("test.flag") is True
        assert file.scalar("test.ratio") == 0.5
        assert file.scalar("test.text") == "→ é 日"
        assert file.scalar("test.absent") is None
        assert "test.flag" in file
        assert "test.absent" not in file


def test_arrays_are_read_when_asked_for(path: Path) -> None:
    vocabulary = byte_level_vocabulary()
    with GgufFile(path) as file:
        assert file.array("tokenizer.ggml.tokens") == vocabulary["tokens"]
        assert file.array("tokenizer.ggml.token_type") == vocabulary["types"]
        assert file.array("tokenizer.ggml.merges") == vocabulary["merges"]
        assert file.array("test.flag") is None
        assert file.scalar("tokenizer.ggml.tokens") is None


def test_tensors_agree_with_the_gguf_package(path: Path) -> None:
    reference = gguf.GGUFReader(path)
    with GgufFile(path) as file:
        assert list(file.tensors) == [tensor.name for tensor in reference.tensors]
        for tensor in reference.tensors:
            mine = file.tensors[tensor.name]
            assert mine.shape == tuple(reversed(tensor.shape.tolist()))
            assert mine.type_id == tensor.tensor_type.value
            assert mine.offset == tensor.data_offset
        found = file.tensors["output_norm.weight"]
        values = np.frombuffer(file.data, np.float32, HIDDEN, found.offset).copy()
    np.testing.assert_array_equal(values, next(t.data for t in reference.tensors if t.name == "output_norm.weight"))


def test_every_truncation_is_an_error_and_never_a_crash(path: Path, tmp_path: Path) -> None:
    content = path.read_bytes()
    with GgufFile(path) as file:
        data_start = min(tensor.offset for tensor in file.tensors.values())
    cut = tmp_path / "cut.gguf"
    for length in [0, 3, 4, 8, 23, 24, *range(25, data_start, 97)]:
        cut.write_bytes(content[:length])
        with pytest.raises(ModelError):
            GgufFile(cut)


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"PK\x03\x04" + bytes(100))
    with pytest.raises(ModelError, match=r"x\.gguf is not a GGUF file"):
        GgufFile(tmp_path / "x.gguf")


def test_a_missing_file_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be read"):
        GgufFile(tmp_path / "x.gguf")


@pytest.mark.parametrize(("version", "hint"), [(1, None), (4, None), (3 << 24, "big-endian files are not read")])
def test_other_versions_are_named(tmp_path: Path, version: int, hint: str | None) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<IQQ", version, 0, 0))
    with pytest.raises(ModelError, match=f"version {version}") as caught:
        GgufFile(tmp_path / "x.gguf")
    assert caught.value.hint == hint


@pytest.mark.parametrize(
    "header",
    [
        struct.pack("<QQ", 0, 1) + struct.pack("<Q", 2**63),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q1sIQ", 1, b"k", 8, 2**62),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 5, 2**60),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q1sIIQ", 1, b"k", 9, 8, 2**60),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q1sI", 1, b"k", 99),
        struct.pack("<QQ", 0, 1) + struct.pack("<Q1sI", 1, b"\xff", 4) + bytes(8),
        struct.pack("<QQ", 1, 0) + struct.pack("<Q1sI", 1, b"t", 2**31),
        struct.pack("<QQ", 2**62, 2**62),
    ],
)
def test_absurd_lengths_are_errors(tmp_path: Path, header: bytes) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF" + struct.pack("<I", 3) + header + bytes(64))
    with pytest.raises(ModelError):
        GgufFile(tmp_path / "x.gguf")
