"""Find stop strings in streamed text. It must not know tokens."""

from collections.abc import Sequence


class StopStrings:
    """Cuts a text, given in pieces, before the stop string that starts first.

    However the text is split into pieces, what is emitted in all is the text up to the earliest place where a stop
    string starts (of two that start there, the shorter counts). Held back is only a tail that is the beginning of a
    stop string. A match is reported once no longer stop string that began before it can still complete.

    `matched` is the stop string found so far, also by flush(). Knuth, Morris and Pratt's automaton for each stop
    string: constant amortised time for each character.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        assert all(stops), "stop strings are checked where a request is parsed"
        self._automata = [_Automaton(stop) for stop in sorted(set(stops), key=len)]
        self._first_chars = {stop[0] for stop in stops}
        self._held = ""
        self._position = 0
        self._found: tuple[int, str] | None = None
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; give what may be shown now, and the stop string when one is certain (then it is over)."""
        assert self.matched is None, "the text goes on after a stop string"
        if not self._held and self._first_chars.isdisjoint(text):
            self._position += len(text)
            return text, None
        held_start = self._position - len(self._held)
        self._held += text
        for char in text:
            self._position += 1
            for automaton in self._automata:
                if automaton.advance(char):
                    start = self._position - len(automaton.stop)
                    if self._found is None or start < self._found[0]:
                        self._found = (start, automaton.stop)
            if self._found is not None and self._found[0] <= self._open_start():
                start, self.matched = self._found
                return self._held[: start - held_start], self.matched
        num_certain = self._open_start() - held_start
        emit, self._held = self._held[:num_certain], self._held[num_certain:]
        return emit, None

    def flush(self) -> str:
        """What was held back and may be shown, now that the text has ended; `matched` says whether that was a stop."""
        held, self._held = self._held, ""
        if self._found is None:
            return held
        start, self.matched = self._found
        return held[: start - (self._position - len(held))]

    def _open_start(self) -> int:
        """Where the earliest stop string that may still complete would start."""
        return self._position - max((automaton.length for automaton in self._automata), default=0)


class _Automaton:
    """How much of one stop string the text ends with."""

    def __init__(self, stop: str) -> None:
        self.stop = stop
        self.length = 0
        self._fallback = [0] * (len(stop) + 1)
        for index in range(1, len(stop)):
            self._fallback[index + 1] = self._after(self._fallback[index], stop[index])

    def advance(self, char: str) -> bool:
        """Take one character; whether the text now ends with the whole stop string."""
        self.length = self._after(self.length, char)
        if self.length < len(self.stop):
            return False
        self.length = self._fallback[self.length]
        return True

    def _after(self, length: int, char: str) -> int:
        while length and self.stop[length] != char:
            length = self._fallback[length]
        return length + (self.stop[length] == char)
