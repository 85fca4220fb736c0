from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty store of the test's own."""
    folder = tmp_path / "home"
    monkeypatch.setenv("SERVEKIT_HOME", str(folder))
    return folder
