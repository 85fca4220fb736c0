"""Text out of the content of other APIs: a string, or a list of typed parts. It must not know which API."""

from collections.abc import Collection, Mapping
from typing import Any

from servekit.errors import InputError, UnsupportedError


def joined_text(content: Any, path: str, *, kinds: Collection[str], noun: str) -> str:
    """The texts of all parts as one. `kinds` are the types that hold text, `noun` is what the API calls its parts.

    Raises InputError for what is no content, UnsupportedError for parts of other types; `path` is their place.
    """
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError(f"{path} must be text or a list of {noun}", param=path)
    for part in content:
        if not isinstance(part, dict) or part.get("type") not in kinds:
            raise UnsupportedError(f"{path}: only text {noun} are supported here", param=path)
    return "".join(text_field(part, "text", path) for part in content)


def text_field(part: Mapping[str, Any], name: str, path: str) -> str:
    """A field that must be text. Raises InputError naming it."""
    value = part.get(name)
    if not isinstance(value, str):
        raise InputError(f"{path}.{name} must be text", param=f"{path}.{name}")
    return value
