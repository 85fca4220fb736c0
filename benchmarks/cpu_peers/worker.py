"""One system under test in a process of its own: JSON lines in, times out.

It runs in the environments of the peers, so it needs the standard library only, and must not know servekit.
"""

import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

Tokens = list[list[int]]
"""Token ids by sequence."""


@dataclass(frozen=True, slots=True)
class Run:
    """One batch from submission to end: seconds until every sequence had its first token, and its last."""

    first_s: float
    last_s: float
    tokens: Tokens


class System(Protocol):
    """What is measured. `version` names the package and its version."""

    @property
    def version(self) -> str: ...

    def run(self, prompts: Tokens, num_tokens: int) -> Run:
        """Prefill the whole batch, then decode it together: greedy, `num_tokens` each, whatever the end token says."""
        ...


class Stopwatch:
    """Seconds since it was made, at the first token and at the last one."""

    def __init__(self) -> None:
        self._began = time.perf_counter()
        self._first: float | None = None

    def tick(self) -> None:
        """Every sequence has one more token. Only the first call counts; call it after each step all the same."""
        if self._first is None:
            self._first = time.perf_counter() - self._began

    def stop(self, tokens: Sequence[Sequence[int]]) -> Run:
        """After the last step; `tokens` is what was generated."""
        last = time.perf_counter() - self._began
        assert self._first is not None, "no token was made"
        return Run(self._first, last, [list(map(int, row)) for row in tokens])


def serve(load: Callable[[], System]) -> None:
    """Load, then answer one line for each line until standard input ends.

    A line in is {"prompts", "num_tokens"}; a line out is a Run, the first one {"version", "load_s"}. Whatever a peer's
    native code prints goes to standard error, so that the answers stay whole.
    """
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    began = time.perf_counter()
    system = load()
    ready = {"version": system.version, "load_s": time.perf_counter() - began}
    print(json.dumps(ready), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        run = system.run(asked["prompts"], asked["num_tokens"])
        print(json.dumps(asdict(run)), file=answers, flush=True)
