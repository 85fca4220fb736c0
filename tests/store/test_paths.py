from pathlib import Path

import pytest

from servekit.errors import ModelError
from servekit.store.paths import folder_name, home_dir, is_model_name, models_dir


def test_home_is_overridden_by_the_environment(home: Path) -> None:
    assert home_dir() == home
    assert models_dir() == home / "models"


def test_home_is_the_platform_folder_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SERVEKIT_HOME")
    assert home_dir().name == "servekit"
    assert home_dir().is_absolute()


def test_each_name_has_its_own_folder() -> None:
    assert folder_name("demo") == "demo"
    assert folder_name("Qwen/Qwen2.5-0.5B-Instruct") == "Qwen--Qwen2.5-0.5B-Instruct"


@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "a/../b",
        "/etc/passwd",
        "a\\b",
        "a\0",
        "a/b/c",
        ".hidden",
        "a--b",
        "-x",
        "a b",
        "é",
        "a\n",
    ],
)
def test_a_name_cannot_point_outside(name: str) -> None:
    assert not is_model_name(name)
    with pytest.raises(ModelError, match="is not a model name"):
        folder_name(name)


def test_a_long_name_is_cut_in_the_message() -> None:
    with pytest.raises(ModelError) as caught:
        folder_name("x" * 5_000_000)
    assert len(caught.value.message) < 200
