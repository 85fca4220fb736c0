"""LazyResult: a value that a device may still be computing. Whoever holds it decides when to wait."""

from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

T_co = TypeVar("T_co", covariant=True)
T = TypeVar("T")
S = TypeVar("S")


class LazyResult(Protocol[T_co]):
    """`ready()` never blocks; `get()` waits once and then keeps the value."""

    def ready(self) -> bool: ...

    def get(self) -> T_co: ...


class Ready(Generic[T]):
    """A result that is there already: what a device without its own queue returns."""

    def __init__(self, value: T) -> None:
        self._value = value

    def ready(self) -> bool:
        """Always."""
        return True

    def get(self) -> T:
        """The value."""
        return self._value


class Deferred(Generic[T]):
    """A result behind an event: `done` asks without blocking, `wait` blocks, `read` turns host buffers into the value.

    The closures keep the pinned buffers and device tensors alive until the value has been read.
    """

    def __init__(self, done: Callable[[], bool], wait: Callable[[], None], read: Callable[[], T]) -> None:
        self._done = done
        self._wait = wait
        self._read = read
        self._value: list[T] = []

    def ready(self) -> bool:
        """Whether `get()` would return at once."""
        return bool(self._value) or self._done()

    def get(self) -> T:
        """Wait for the device, then read the host copy once."""
        if not self._value:
            self._wait()
            self._value.append(self._read())
        return self._value[0]


class Mapped(Generic[S, T]):
    """What `convert` makes of a result, once it is there."""

    def __init__(self, result: LazyResult[S], convert: Callable[[S], T]) -> None:
        self._result = result
        self._convert = convert
        self._value: list[T] = []

    def ready(self) -> bool:
        """Whether `get()` would return at once."""
        return self._result.ready()

    def get(self) -> T:
        """Wait for the result, then convert it once."""
        if not self._value:
            self._value.append(self._convert(self._result.get()))
        return self._value[0]
