"""Write what a GGUF file says about its model as the JSON files of a model folder, once.

Reading the tokenizer out of a GGUF file takes a second or more; reading tokenizer.json takes a tenth.
"""

import hashlib
import json
import os
import secrets
from pathlib import Path
from typing import Any

from servekit.errors import ModelError
from servekit.store.gguf_config import gguf_config, gguf_generation_config
from servekit.store.gguf_metadata import GgufFile
from servekit.store.paths import derived_dir, home_dir

# Raised whenever the content of the derived files changes, so that older ones are written again.
_FORMAT = 2
_MARKER = "derived.json"


def ensure_derived(gguf: Path, folder: Path) -> None:
    """Make sure `folder` holds the files derived from `gguf`: config, generation config, tokenizer and template.

    Each file appears whole or not at all, the marker last; two processes doing this at once write the same bytes.
    Raises ModelError for a model that cannot be read, or a folder that cannot be written.
    """
    if _is_current(folder):
        return
    # Imported here because reading a model that was derived before needs none of it.
    from servekit.store.gguf_tokenizer import gguf_chat_template, gguf_tokenizer, gguf_tokenizer_config

    with GgufFile(gguf) as file:
        contents = {
            "config.json": _json(gguf_config(file)),
            "generation_config.json": _json(gguf_generation_config(file)),
            "tokenizer.json": gguf_tokenizer(file).to_str(),
            "tokenizer_config.json": _json(gguf_tokenizer_config(file)),
        }
        if (template := gguf_chat_template(file)) is not None:
            contents["chat_template.jinja"] = template
    contents[_MARKER] = _json({"format": _FORMAT})
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in contents.items():
            _write(folder / name, text)
    except OSError as error:
        raise ModelError(
            f"{folder} cannot be written: {error.strerror}", hint="set SERVEKIT_HOME to a folder that can"
        ) from error


def derived_folder(gguf: Path) -> Path:
    """The store's folder for a GGUF file outside the store; another one once the file changes."""
    resolved, status = gguf.resolve(), gguf.stat()
    identity = f"{resolved}\n{status.st_size}\n{status.st_mtime_ns}"
    return derived_dir() / hashlib.sha256(identity.encode("utf-8", "surrogatepass")).hexdigest()[:32]


def packed_folder(directory: Path) -> Path:
    """Where weights packed from a model with its config.json in `directory` are kept.

    A folder of servekit's own keeps them itself; for one that belongs to somebody else there is one in the store.
    """
    directory = directory.resolve()
    if directory.is_relative_to(home_dir().resolve()):
        return directory
    return derived_dir() / hashlib.sha256(os.fsencode(directory)).hexdigest()[:32]


def _is_current(folder: Path) -> bool:
    try:
        with open(folder / _MARKER, encoding="utf-8") as file:
            return bool(json.load(file)["format"] == _FORMAT)
    except (OSError, ValueError, KeyError, TypeError):
        return False


def _write(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "x", encoding="utf-8", newline="") as file:
            file.write(text)
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def _json(value: dict[str, Any]) -> str:
    return json.dumps(value, ensure_ascii=False, indent=2)
