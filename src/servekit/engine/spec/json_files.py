"""Reading the JSON files of a model. Errors name the file, not its folder."""

import json
from pathlib import Path
from typing import Any

from servekit.errors import ModelError


def parse_json(file: Path) -> Any:
    """Whatever the file holds. Raises ModelError when it cannot be read as JSON."""
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file.name} cannot be read: {error}") from None


def read_json(file: Path) -> dict[str, Any]:
    """The object in a file that must be there. Raises ModelError."""
    content = parse_json(file)
    if not isinstance(content, dict):
        raise ModelError(f"{file.name} does not hold an object")
    return content


def read_json_if_there(file: Path) -> dict[str, Any]:
    """The object in a file that a model may do without; empty then. Raises ModelError."""
    return read_json(file) if file.is_file() else {}
