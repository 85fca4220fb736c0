"""What is certain about calls of functions in a growing text, and the seam between its parsers and the API's shapes."""

from dataclasses import dataclass
from typing import Protocol

SPACE = " \n\r\t"


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """More of the answer's text."""

    text: str


@dataclass(frozen=True, slots=True)
class CallStart:
    """A call of the function `name` begins. Calls count from 0."""

    index: int
    name: str


@dataclass(frozen=True, slots=True)
class ArgumentsDelta:
    """More of the JSON text of a call's arguments."""

    index: int
    text: str


Delta = ContentDelta | CallStart | ArgumentsDelta


class CallParser(Protocol):
    """One choice's parser. What begins like a call and turns out to be none is content: no text is lost."""

    num_calls: int

    def push(self, text: str, /) -> list[Delta]:
        """What is certain now that `text` follows."""
        ...

    def finish(self) -> list[Delta]:
        """What was held back; the answer has ended."""
        ...


def num_certain(text: str, marker: str) -> int:
    """How much of `text` can be no part of a `marker` that is still coming, and no space before it."""
    size = next((n for n in range(min(len(marker) - 1, len(text)), 0, -1) if text.endswith(marker[:n])), 0)
    return len(text[: len(text) - size].rstrip(SPACE))
