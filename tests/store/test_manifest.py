import hashlib
from pathlib import Path

import pytest

from servekit.errors import ModelError, NotFoundError
from servekit.store.manifest import describe, list_models, read_manifest, remove_model
from servekit.store.paths import folder_name, models_dir, partial_dir


def add_model(name: str, content: bytes = b"weights") -> Path:
    folder = models_dir() / folder_name(name)
    folder.mkdir(parents=True)
    (folder / "model.gguf").write_bytes(content)
    describe(folder, [folder / "model.gguf"], name=name, source="test", licence="MIT").write(folder)
    return folder


def test_what_is_written_is_read_back() -> None:
    folder = add_model("demo", b"abc")
    manifest = read_manifest(folder)
    assert (manifest.name, manifest.source, manifest.licence, manifest.size) == ("demo", "test", "MIT", 3)
    assert manifest.files[0].sha256 == hashlib.sha256(b"abc").hexdigest()
    assert manifest.pulled_at.endswith("+00:00")


def test_an_empty_store_lists_nothing() -> None:
    assert list_models() == []


def test_models_are_listed_by_name_without_what_is_in_progress() -> None:
    add_model("org/b")
    add_model("demo")
    partial_dir().mkdir()
    (models_dir() / "not-a-model").mkdir()
    assert [manifest.name for manifest in list_models()] == ["demo", "org/b"]


def test_removing_frees_the_folder() -> None:
    folder = add_model("org/b", b"12345")
    assert remove_model("org/b") == 5
    assert not folder.exists()
    assert list_models() == []
    assert list(partial_dir().iterdir()) == []


def test_removing_what_is_not_there_names_what_is() -> None:
    add_model("demo")
    with pytest.raises(NotFoundError) as caught:
        remove_model("other")
    assert caught.value.hint == "pulled models: demo"


@pytest.mark.parametrize("name", ["..", "../demo", ".", ".partial", "/"])
def test_removing_cannot_leave_the_store(name: str, tmp_path: Path) -> None:
    add_model("demo")
    with pytest.raises(ModelError):
        remove_model(name)
    assert [manifest.name for manifest in list_models()] == ["demo"]


def test_a_damaged_record_is_a_clear_error() -> None:
    folder = add_model("demo")
    (folder / "manifest.json").write_text("{", encoding="utf-8")
    with pytest.raises(ModelError, match="cannot be read"):
        read_manifest(folder)
