"""Who waits, in which order, and when somebody may join those who run.

Owns the waiting line and the three batching policies. It must not know blocks, tokens or budgets.

    continuous   whoever is first in line joins as soon as there is room (iteration-level scheduling: Orca, OSDI '22)
    dynamic      when nothing runs, all who wait now (up to max_num_seqs) become a batch, which runs to completion
    static       the same, but the batch waits until it is full or its oldest member has waited `static_wait` seconds

The last two exist to be compared with the first.
"""

from collections.abc import Iterator
from heapq import heapify, heappop, heappush
from typing import Literal

from servekit.engine.core.sequence import Sequence

Policy = Literal["continuous", "dynamic", "static"]


class WaitingLine:
    """Sequences in the order of priority (lower first) and arrival. O(log n); leaving from the middle is O(1).

    A sequence that has left from the middle does not come back.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[int, int], Sequence]] = []
        self._members: set[Sequence] = set()

    def __len__(self) -> int:
        return len(self._members)

    def __iter__(self) -> Iterator[Sequence]:
        """All who wait, in no particular order."""
        return iter(self._members)

    def push(self, seq: Sequence) -> None:
        """Join the line at the place that the sequence's order gives it."""
        assert seq not in self._members, f"{seq} waits twice"
        self._members.add(seq)
        heappush(self._heap, (seq.order, seq))

    def peek(self) -> Sequence | None:
        """The first in line."""
        while self._heap and self._heap[0][1] not in self._members:
            heappop(self._heap)
        return self._heap[0][1] if self._heap else None

    def pop(self) -> Sequence:
        """Take the first in line, which must exist."""
        seq = self.peek()
        assert seq is not None, "nobody waits"
        heappop(self._heap)
        self._members.remove(seq)
        return seq

    def discard(self, seq: Sequence) -> None:
        """Leave the line from wherever the sequence stands; no-op when it is not in it."""
        if seq not in self._members:
            return
        self._members.remove(seq)
        # The heap entry stays until it comes to the front. Those behind a blocked head would pile up, so the heap is
        # rebuilt when most of it is dead: O(1) amortised.
        if len(self._heap) > 2 * len(self._members):
            self._heap = [entry for entry in self._heap if entry[1] in self._members]
            heapify(self._heap)


class Admission:
    """The line in front of the running sequences, and the policy that opens it.

    Under dynamic and static the members of a batch are fixed when it forms. Those that do not fit at once, and those
    preempted, wait in a second line that belongs to the batch; nobody else joins until the batch is done.
    """

    def __init__(self, policy: Policy, max_num_seqs: int, static_wait: float) -> None:
        self._max_num_seqs = max_num_seqs
        self._static_wait = static_wait if policy == "static" else None
        self._arrived = WaitingLine()
        self._batch = self._arrived if policy == "continuous" else WaitingLine()

    def __len__(self) -> int:
        return len(self._arrived) + (len(self._batch) if self._batch is not self._arrived else 0)

    def add(self, seq: Sequence) -> None:
        """A new sequence joins the line."""
        self._arrived.push(seq)

    def resume(self, seq: Sequence) -> None:
        """A preempted sequence goes back in line, still a member of the batch it ran in."""
        self._batch.push(seq)

    def discard(self, seq: Sequence) -> None:
        """The sequence no longer waits; no-op when it did not."""
        self._arrived.discard(seq)
        self._batch.discard(seq)

    def peek(self, now: float, num_running: int) -> Sequence | None:
        """Who may join next, if anybody may. Forms the next batch when it is time to."""
        if self._batch is not self._arrived and not self._batch and num_running == 0 and self._is_due(now):
            for _ in range(min(self._max_num_seqs, len(self._arrived))):
                self._batch.push(self._arrived.pop())
        return self._batch.peek()

    def pop(self) -> Sequence:
        """Take the sequence that `peek` has named."""
        return self._batch.pop()

    def deadline(self, num_running: int) -> float | None:
        """When the wait for a full batch ends, or None when nothing is being waited for."""
        if self._static_wait is None or num_running or self._batch or not self._arrived:
            return None
        if len(self._arrived) >= self._max_num_seqs:
            return None
        return min(seq.arrival_time for seq in self._arrived) + self._static_wait

    def _is_due(self, now: float) -> bool:
        deadline = self.deadline(0)
        return deadline is None or now >= deadline
