"""Which sequences of a ragged batch are padded together, so that one kernel call serves many without much waste.

It must not know tensors: lengths in, row numbers out.
"""

from dataclasses import dataclass

from servekit.engine.host_batch import IntArray

SMALL_CONTEXT = 256
"""Below this many keys, padding costs less than another kernel call would."""
SMALL_QUERY = 64
"""Prefill chunks up to this many tokens share a call; longer ones keep the cores busy on their own."""


@dataclass(frozen=True, slots=True)
class Group:
    """Rows of the batch in ascending order, and the lengths that they are padded to."""

    rows: tuple[int, ...]
    query_len: int
    context_len: int


def group_rows(query_lens: IntArray, context_lens: IntArray) -> list[Group]:
    """Decodes, short prefills and long ones apart; within a group contexts differ by a factor of two at most.

    So the number of groups grows with the logarithm of the spread of lengths, not with the number of sequences.
    """
    queries, contexts = query_lens.tolist(), context_lens.tolist()
    groups: list[Group] = []
    for rows in _by_kind(queries):
        rows.sort(key=lambda row: -contexts[row])
        first = 0
        for i in range(1, len(rows) + 1):
            longest = contexts[rows[first]]
            if i < len(rows) and (longest <= SMALL_CONTEXT or 2 * contexts[rows[i]] >= longest):
                continue
            members = sorted(rows[first:i])
            groups.append(Group(tuple(members), max(queries[row] for row in members), longest))
            first = i
    return groups


def _by_kind(queries: list[int]) -> list[list[int]]:
    decodes = [row for row, query in enumerate(queries) if query == 1]
    short = [row for row, query in enumerate(queries) if 1 < query <= SMALL_QUERY]
    long = [[row] for row, query in enumerate(queries) if query > SMALL_QUERY]
    return [rows for rows in (decodes, short, *long) if rows]
