import random

import pytest

from servekit.engine.text.stop_strings import StopStrings


def run(stops: list[str], chunks: list[str]) -> tuple[list[str], str | None]:
    """What each chunk shows up to the end or the match, flush() included, and the stop that matched."""
    subject = StopStrings(stops)
    shown = []
    for chunk in chunks:
        emit, matched = subject.push(chunk)
        shown.append(emit)
        if matched is not None:
            return shown, matched
    shown.append(subject.flush())
    return shown, subject.matched


def expected(stops: list[str], text: str) -> str:
    found = [start for stop in stops if (start := text.find(stop)) >= 0]
    return text[: min(found)] if found else text


def test_text_after_the_stop_in_one_piece_is_cut() -> None:
    assert run(["END"], ["before END after"]) == (["before "], "END")


def test_a_stop_across_pieces_never_leaks() -> None:
    assert run(["END"], ["a E", "N", "D b"]) == (["a ", "", ""], "END")


def test_only_a_beginning_of_a_stop_is_held() -> None:
    assert run(["\n\nUser:"], ["one\n", "two", "\n\n", "Us", "ers"]) == (
        ["one", "\ntwo", "", "", "\n\nUsers", ""],
        None,
    )


def test_what_is_held_at_the_end_is_shown() -> None:
    assert run(["END"], ["x EN"]) == (["x ", "EN"], None)


def test_a_beginning_that_fails_keeps_its_own_tail() -> None:
    assert run(["aab"], ["aa", "ab"]) == (["", "a"], "aab")
    assert run(["abab!"], ["abab", "ab!"]) == (["", "ab"], "abab!")


@pytest.mark.parametrize(
    ("stops", "chunks", "shown", "matched"),
    [
        (["lo", "world"], ["hello world"], ["hel"], "lo"),
        (["b", "ab"], ["xab"], ["x"], "ab"),
        (["a", "abc"], ["xabc"], ["x"], "a"),
        # The shorter is complete first, but the longer began before it.
        (["cd", "bcde"], ["abcd", "e"], ["a", ""], "bcde"),
        # ... unless that one does not come about.
        (["cd", "bcde"], ["abcd", "x"], ["a", "b"], "cd"),
        (["cd", "bcde"], ["abcd"], ["a", "b"], "cd"),
    ],
)
def test_of_several_the_earliest_start_wins(
    stops: list[str], chunks: list[str], shown: list[str], matched: str
) -> None:
    assert run(stops, chunks) == (shown, matched)


def test_no_stops_hold_nothing() -> None:
    assert run([], ["a", "b"]) == (["a", "b", ""], None)


def test_any_division_into_pieces_gives_the_same_text() -> None:
    rng = random.Random(1)
    for _ in range(3000):
        stops = ["".join(rng.choices("ab→", k=rng.randrange(1, 5))) for _ in range(rng.randrange(1, 4))]
        text = "".join(rng.choices("ab→", k=rng.randrange(16)))
        chunks, start = [], 0
        while start < len(text):
            end = start + rng.randrange(1, 5)
            chunks.append(text[start:end])
            start = end
        shown, matched = run(stops, chunks)
        assert "".join(shown) == expected(stops, text), (stops, chunks)
        assert (matched is not None) == any(stop in text for stop in stops)


def test_what_is_held_is_always_a_beginning_of_a_stop() -> None:
    rng = random.Random(2)
    for _ in range(300):
        stop = "".join(rng.choices("ab", k=rng.randrange(2, 6)))
        subject, text, shown = StopStrings([stop]), "", ""
        for _ in range(20):
            char = rng.choice("abc")
            text += char
            emit, matched = subject.push(char)
            shown += emit
            if matched is not None:
                break
            held = text[len(shown) :]
            assert stop.startswith(held)
            assert not any(stop.startswith(text[start:]) for start in range(len(shown)))
