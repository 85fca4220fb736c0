"""Reading the JSON files of a model."""

import json
from pathlib import Path
from typing import Any

from servekit.errors import ModelError


def read_json(file: Path) -> dict[str, Any]:
    """A JSON object from a file of the model. Raises ModelError naming the file, not its folder."""
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ModelError(f"{file.name} cannot be read: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{file.name} must be a JSON object")
    return content
