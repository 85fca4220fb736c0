"""The record beside each pulled model: its source and what each file should be. It must not know how to pull."""

import json
import shutil
import tempfile
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path

from servekit.errors import ModelError, NotFoundError
from servekit.store.checksum import sha256_of
from servekit.store.paths import folder_name, models_dir, partial_dir

MANIFEST = "manifest.json"


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file as it was fetched; `path` is relative to the model's folder, `size` in bytes."""

    path: str
    sha256: str
    size: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """One pulled model; `pulled_at` is UTC in ISO 8601."""

    name: str
    source: str
    licence: str | None
    pulled_at: str
    files: tuple[ModelFile, ...]

    @property
    def size(self) -> int:
        """Bytes of all fetched files."""
        return sum(file.size for file in self.files)

    def write(self, folder: Path) -> None:
        """Write the record into `folder`."""
        with open(folder / MANIFEST, "w", encoding="utf-8") as file:
            json.dump(asdict(self), file, ensure_ascii=False, indent=2)


def describe(folder: Path, paths: Iterable[Path], *, name: str, source: str, licence: str | None) -> Manifest:
    """The manifest of the files `paths` under `folder`; reads each once for its checksum."""
    files = tuple(
        ModelFile(path.relative_to(folder).as_posix(), sha256_of(path), path.stat().st_size) for path in sorted(paths)
    )
    return Manifest(name, source, licence, datetime.now(UTC).isoformat(timespec="seconds"), files)


def read_manifest(folder: Path) -> Manifest:
    """The record in `folder`. Raises ModelError when it is missing or damaged."""
    try:
        with open(folder / MANIFEST, encoding="utf-8") as file:
            data = json.load(file)
        files = tuple(ModelFile(entry["path"], entry["sha256"], entry["size"]) for entry in data["files"])
        return Manifest(data["name"], data["source"], data["licence"], data["pulled_at"], files)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"the record of the model in {folder} cannot be read: {error}",
            hint="remove the folder and pull the model again",
        ) from error


def list_models() -> list[Manifest]:
    """Every pulled model, by name. Folders without a record are not servekit's and are passed over."""
    folder = models_dir()
    if not folder.is_dir():
        return []
    records = [path.parent for path in folder.glob(f"*/{MANIFEST}") if not path.parent.name.startswith(".")]
    return sorted((read_manifest(path) for path in records), key=lambda manifest: manifest.name)


def remove_model(name: str) -> int:
    """Delete a pulled model and return the bytes its fetched files took.

    Raises NotFoundError when it was never pulled, ModelError when `name` is not a model name.
    """
    folder = models_dir() / folder_name(name)
    if not (folder / MANIFEST).is_file():
        known = ", ".join(manifest.name for manifest in list_models()) or "none"
        raise NotFoundError(f"there is no pulled model named {name!r}", hint=f"pulled models: {known}")
    size = read_manifest(folder).size
    partial_dir().mkdir(parents=True, exist_ok=True)
    # Renaming first makes the model disappear at once, whatever interrupts the deletion.
    grave = Path(tempfile.mkdtemp(prefix="removed.", dir=partial_dir()))
    folder.rename(grave / folder.name)
    shutil.rmtree(grave)
    return size
