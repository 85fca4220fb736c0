"""Where models live on this machine, and how a model's name becomes a folder. It must not know what is in a folder.

`SERVEKIT_HOME` overrides the platform's user data folder.
"""

import os
import re
from pathlib import Path

from platformdirs import user_data_path

from servekit.errors import ModelError

_NAME_PART = r"[A-Za-z0-9](?:[A-Za-z0-9._]|-(?!-)){0,95}"
_NAME = re.compile(rf"{_NAME_PART}(?:/{_NAME_PART})?")


def home_dir() -> Path:
    """The folder that holds everything servekit keeps; it need not exist yet."""
    override = os.environ.get("SERVEKIT_HOME")
    return Path(override).expanduser() if override else user_data_path("servekit", appauthor=False)


def models_dir() -> Path:
    """The folder with one folder for each pulled model."""
    return home_dir() / "models"


def partial_dir() -> Path:
    """The folder for pulls in progress; on the same file system as the models, so that a rename is atomic."""
    return models_dir() / ".partial"


def derived_dir() -> Path:
    """The folder for files derived from models that lie outside the store."""
    return home_dir() / "derived"


def is_model_name(text: str) -> bool:
    """Whether `text` has the form NAME or ORG/NAME: no other separator, no leading dot, no `--`."""
    return _NAME.fullmatch(text) is not None


def folder_name(name: str) -> str:
    """The one folder name for a model name; `--` stands for the slash, and no name may contain it.

    Raises ModelError for anything that is not a model name, so that none can point outside the models folder.
    """
    if not is_model_name(name):
        raise ModelError(
            f"{name[:100]!r} is not a model name",
            hint="a name is NAME or ORG/NAME of letters, digits, dots, dashes and underscores",
        )
    return name.replace("/", "--")
