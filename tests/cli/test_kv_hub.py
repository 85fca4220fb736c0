"""A hub id that was not pulled: only small files are fetched, and an error is one line."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from servekit.cli.kv_hub import fetch_files
from servekit.errors import ModelError


class FakeHub:
    """A hub with one repository whose files lie in a folder; remembers what was asked for."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.fetched: list[tuple[str, str | None]] = []

    def model_info(self, repo_id: str, *, timeout: float | None) -> SimpleNamespace:
        siblings = [SimpleNamespace(rfilename=path.name) for path in self.folder.iterdir()]
        return SimpleNamespace(sha="abc", siblings=siblings)

    def hf_hub_download(self, repo_id: str, filename: str, *, revision: str | None) -> str:
        self.fetched.append((filename, revision))
        return str(self.folder / filename)


class Offline(FakeHub):
    """A hub that cannot be reached."""

    def model_info(self, repo_id: str, *, timeout: float | None) -> SimpleNamespace:
        raise OSError("no route to host\nsecond line")


def test_only_the_wanted_files_that_exist_are_fetched(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({}), encoding="utf-8")
    (tmp_path / "model.safetensors").write_bytes(b"")
    hub = FakeHub(tmp_path)

    found = fetch_files("org/name", ("config.json", "model.safetensors.index.json"), hub)

    assert found == {"config.json": tmp_path / "config.json"}
    assert hub.fetched == [("config.json", "abc")]


def test_an_unreachable_hub_is_one_line(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot be fetched from the hub: no route to host$") as caught:
        fetch_files("org/name", ("config.json",), Offline(tmp_path))

    assert "\n" not in caught.value.message
