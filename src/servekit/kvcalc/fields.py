"""Typed access to the fields of a config.json. It must not know any model family.

A field that is null counts as absent, because checkpoints write null for "use the default". Everything else that is
not of the expected type or size is refused with the field's full name, so that no absurd number is ever computed with.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from servekit.errors import ConfigError

MAX_LAYERS: Final = 10_000
MAX_SIZE: Final = 1 << 31
MAX_TOKENS: Final = 1 << 40


class MissingFieldError(ConfigError):
    """A field that is needed and absent, as opposed to one that is there and wrong."""


class Fields:
    """One level of a config.json, read by name; `prefix` (for example "text_config.") is kept for the messages.

    Every reader takes the spellings of one field, first match wins; two spellings that disagree are refused. What was
    not written in the file and had to be filled in is collected in `notes`, shared by all levels of one config.
    """

    def __init__(self, values: Mapping[str, Any], *, prefix: str = "", notes: list[str] | None = None) -> None:
        self.values = values
        self.prefix = prefix
        self.notes: list[str] = [] if notes is None else notes

    def has(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self.values.get(name) is not None

    def name_of(self, *names: str) -> str:
        """The full name of the spelling that is present, else of the first one."""
        return self.prefix + next((name for name in names if self.has(name)), names[0])

    def note(self, text: str) -> None:
        """Records once what was filled in for an absent field."""
        if text not in self.notes:
            self.notes.append(text)

    def sub(self, name: str) -> "Fields | None":
        """The object under `name`, or None when absent. Raises ConfigError when it is not an object."""
        value = self.values.get(name)
        if value is None:
            return None
        if not isinstance(value, Mapping):
            raise self.error(name, f"must be an object, not {describe(value)}")
        return Fields(value, prefix=f"{self.prefix}{name}.", notes=self.notes)

    def optional_integer(
        self, *names: str, low: int = 1, high: int = MAX_SIZE, zero_is_absent: bool = False
    ) -> int | None:
        """The first spelling that is present as an integer from `low` to `high`, or None when all are absent."""
        found: dict[str, int] = {}
        for name in names:
            value = self.values.get(name)
            if value is None or (zero_is_absent and value == 0 and not isinstance(value, bool)):
                continue
            if isinstance(value, bool) or not isinstance(value, int):
                raise self.error(name, f"must be an integer, not {describe(value)}")
            if not low <= value <= high:
                raise self.error(name, f"must be from {low} to {high}, not {describe(value)}")
            found[name] = value
        if len(set(found.values())) > 1:
            spelled = " but ".join(f"{name} {value}" for name, value in found.items())
            raise self.error(next(iter(found)), f"is spelled twice with different values: {spelled}")
        return next(iter(found.values()), None)

    def integer(self, *names: str, low: int = 1, high: int = MAX_SIZE) -> int:
        """Like `optional_integer`, but absent is an error that names every accepted spelling."""
        value = self.optional_integer(*names, low=low, high=high)
        if value is None:
            others = f" (or {', '.join(names[1:])})" if len(names) > 1 else ""
            error = self.error(names[0], f"is missing{others}")
            raise MissingFieldError(error.message, param=error.param)
        return value

    def flag(self, name: str, *, default: bool) -> bool:
        """A true or false field."""
        value = self.values.get(name)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(name, f"must be true or false, not {describe(value)}")
        return value

    def text(self, name: str) -> str | None:
        """A string field, or None when absent."""
        value = self.values.get(name)
        if value is not None and not isinstance(value, str):
            raise self.error(name, f"must be a string, not {describe(value)}")
        return value

    def texts(self, name: str) -> list[str] | None:
        """A list of strings, or None when absent."""
        return [str(item) for item in self._list(name, str)] if self.has(name) else None

    def ints(self, name: str, *, low: int = 0, high: int = MAX_SIZE) -> list[int] | None:
        """A list of integers from `low` to `high`, or None when absent."""
        if not self.has(name):
            return None
        items: list[int] = self._list(name, int)
        for item in items:
            if not low <= item <= high:
                raise self.error(name, f"holds {describe(item)}, which is not from {low} to {high}")
        return items

    def per_layer(self, name: str, items: Sequence[Any], num_layers: int) -> None:
        """Refuses a list that does not have one entry a layer."""
        if len(items) != num_layers:
            raise self.error(name, f"has {len(items)} entries for {num_layers} layers")

    def error(self, name: str, problem: str, *, hint: str | None = None) -> ConfigError:
        """The error that names the field; the caller raises it."""
        full = name if name.startswith(self.prefix) and self.prefix else f"{self.prefix}{name}"
        return ConfigError(f"config.json field {full} {problem}", hint=hint, param=full)

    def _list(self, name: str, kind: type) -> list[Any]:
        value = self.values[name]
        if not isinstance(value, list):
            raise self.error(name, f"must be a list, not {describe(value)}")
        for item in value:
            if not isinstance(item, kind) or (isinstance(item, bool) and kind is not bool):
                raise self.error(name, f"holds {describe(item)}, which is not {_kind_name(kind)}")
        return value


def describe(value: object) -> str:
    """A value as it may be shown in one line of an error."""
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list):
        return f"a list of {len(value)}"
    shown = repr(value)
    return shown if len(shown) <= 40 else f"{shown[:37]}..."


def _kind_name(kind: type) -> str:
    return {int: "an integer", str: "a string"}.get(kind, kind.__name__)
