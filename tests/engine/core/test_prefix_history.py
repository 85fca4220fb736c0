"""Why a cached prefix ends where it does, on exact tokens. Blocks have four."""

import pytest

from servekit.engine.core.prefix_history import MAX_PROMPTS, PrefixEnd, PrefixHistory

KNOWN = tuple(range(10))


@pytest.fixture
def history() -> PrefixHistory:
    history = PrefixHistory(4)
    history.record(KNOWN, "s")
    return history


@pytest.mark.parametrize(
    ("prompt", "salt", "num_cached", "end", "num_shared", "given", "known"),
    [
        (KNOWN, "s", 8, PrefixEnd.WHOLE, 10, None, None),
        ((*range(8), 50), "s", 8, PrefixEnd.WHOLE, 8, 50, 8),
        ((0, 1, 2, 3, 50, 51, 52, 53, 54), "s", 4, PrefixEnd.DIFFERENT, 4, 50, 4),
        ((0, 1, 2, 3, 4, 5, 50, 51, 52), "s", 4, PrefixEnd.DIFFERENT, 6, 50, 6),
        (KNOWN[:3], "s", 0, PrefixEnd.NOT_FULL, 3, None, 3),
        ((*KNOWN, 10, 11, 12), "s", 8, PrefixEnd.NOT_FULL, 10, 10, None),
        (KNOWN, "s", 0, PrefixEnd.EVICTED, 10, None, None),
        (KNOWN, "t", 0, PrefixEnd.OTHER_SALT, 0, 0, None),
        ((50, 51, 52, 53, 54), "s", 0, PrefixEnd.UNKNOWN, 0, 50, None),
    ],
)
def test_ends(
    history: PrefixHistory,
    prompt: tuple[int, ...],
    salt: str,
    num_cached: int,
    end: PrefixEnd,
    num_shared: int,
    given: int | None,
    known: int | None,
) -> None:
    found = history.explain(prompt, salt, num_cached, "")
    assert (found.end, found.num_shared_tokens, found.given_token, found.known_token) == (end, num_shared, given, known)


def test_what_others_asked_is_not_spoken_of(history: PrefixHistory) -> None:
    assert history.explain(KNOWN, "xt", 0, "x").end is PrefixEnd.UNKNOWN


def test_the_memory_is_bounded(history: PrefixHistory) -> None:
    for i in range(MAX_PROMPTS):
        history.record((100 + i, 1), "s")
    assert history.explain(KNOWN, "s", 0, "").end is PrefixEnd.UNKNOWN
