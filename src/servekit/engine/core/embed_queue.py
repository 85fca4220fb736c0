"""Which texts are embedded next: first come, first served under a token budget.

A text is never cut, since its tokens see each other both ways; a request is, between its texts. After its turn a
request that has texts left goes to the end of the line, so that a small one waits for one chunk of each large one
before it, and no longer. It must not know what a vector is.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EmbedInput:
    """One text, or a pair whose second text begins at token `second_start`.

    The first `num_unpooled` tokens are read and do not count in the vector: a prompt, where the model leaves it out.
    """

    token_ids: tuple[int, ...]
    second_start: int | None = None
    num_unpooled: int = 0


@dataclass(frozen=True, slots=True)
class EmbedRequest:
    """Texts that are answered together. `arrival_time` is in seconds of time.monotonic()."""

    request_id: str
    inputs: tuple[EmbedInput, ...]
    arrival_time: float


@dataclass(frozen=True, slots=True)
class EmbedChunk:
    """The texts of one request that go into one step: `rows` are their places in the request."""

    request: EmbedRequest
    rows: tuple[int, ...]

    @property
    def inputs(self) -> list[EmbedInput]:
        """The texts themselves, in the order of `rows`."""
        return [self.request.inputs[row] for row in self.rows]


class EmbedQueue:
    """The line of requests. Within a request the short texts go first, since texts of a length pack best."""

    def __init__(self) -> None:
        self._line: deque[_Open] = deque()

    def __len__(self) -> int:
        return len(self._line)

    def add(self, request: EmbedRequest) -> None:
        """Put a request, which must have texts, at the end of the line."""
        assert request.inputs, f"request {request.request_id} has no texts"
        self._line.append(_Open(request))

    def remove(self, request_id: str) -> None:
        """Forget a request; one that is not there has been taken whole already."""
        self._line = deque(entry for entry in self._line if entry.request.request_id != request_id)

    def take(self, budget: int, *, at_least_one: bool = False) -> list[EmbedChunk]:
        """The texts of the next step, at most `budget` tokens; with `at_least_one` the first goes whatever it takes.

        Nobody overtakes the first in line when its next text does not fit.
        """
        chunks: list[EmbedChunk] = []
        while self._line:
            entry = self._line[0]
            rows = entry.take(budget, at_least_one=at_least_one and not chunks)
            if not rows:
                break
            chunks.append(EmbedChunk(entry.request, tuple(rows)))
            budget -= sum(len(entry.request.inputs[row].token_ids) for row in rows)
            self._line.popleft()
            if entry.rest:
                self._line.append(entry)
                break
        return chunks

    def take_all(self) -> list[EmbedRequest]:
        """Empty the line; what was in it."""
        requests = [entry.request for entry in self._line]
        self._line.clear()
        return requests


class _Open:
    """A request with the places of its texts that have not been taken, longest first."""

    def __init__(self, request: EmbedRequest) -> None:
        self.request = request
        self.rest = sorted(range(len(request.inputs)), key=lambda row: -len(request.inputs[row].token_ids))

    def take(self, budget: int, *, at_least_one: bool) -> Sequence[int]:
        rows: list[int] = []
        while self.rest:
            num_tokens = len(self.request.inputs[self.rest[-1]].token_ids)
            if num_tokens > budget and (rows or not at_least_one):
                break
            budget -= num_tokens
            rows.append(self.rest.pop())
        return rows
