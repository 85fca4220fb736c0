"""How a pull reports how far it is. It must not know who watches."""

from typing import Protocol


class Progress(Protocol):
    """Called as bytes arrive: what is being worked on, bytes done, and bytes in all when known."""

    def __call__(self, what: str, done: int, total: int | None) -> None: ...


def silent(what: str, done: int, total: int | None) -> None:
    """The progress that nobody watches."""
