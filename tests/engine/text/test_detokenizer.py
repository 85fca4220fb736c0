import random

import pytest

from servekit.engine.text.detokenizer import Detokenizer

TEXT = "é → 日本 😀 👨‍👩‍👧 আমার বাংলা end"


def detokenizer(tokens: list[bytes], **options: bool) -> Detokenizer:
    return Detokenizer(lambda token_id: tokens[token_id], **options)


def pieces(tokens: list[bytes], **options: bool) -> list[str]:
    """What each token shows, and at last what flush() shows."""
    subject = detokenizer(tokens, **options)
    return [*(subject.push(index) for index in range(len(tokens))), subject.flush()]


@pytest.mark.parametrize("size", [1, 2, 3, 5])
def test_characters_split_over_tokens_come_out_whole(size: int) -> None:
    data = TEXT.encode("utf-8")
    tokens = [data[start : start + size] for start in range(0, len(data), size)]
    shown = pieces(tokens)
    assert "".join(shown) == TEXT
    assert "\ufffd" not in "".join(shown)


def test_only_an_unfinished_character_is_held() -> None:
    assert pieces([b"a\xf0\x9f", b"\x98", b"\x80b"]) == ["a", "", "😀b", ""]
    assert pieces([b"\xe0\xa6", b"\x85"]) == ["", "অ", ""]


def test_bytes_that_can_no_longer_be_a_character_are_shown_at_once() -> None:
    assert pieces([b"\xff", b"a"]) == ["\ufffd", "a", ""]
    assert pieces([b"\xf0\x9f", b"a"]) == ["", "\ufffda", ""]
    assert pieces([b"\x80\x80"]) == ["\ufffd\ufffd", ""]
    assert pieces([b"\xc3", b"\xc3\xa9"]) == ["", "\ufffdé", ""]


def test_what_is_unfinished_at_the_end_becomes_one_replacement() -> None:
    assert pieces([b"ok\xf0\x9f\x98"]) == ["ok", "\ufffd"]
    assert pieces([b"ok"]) == ["ok", ""]


def test_a_leading_space_is_dropped_once() -> None:
    assert pieces([b" Hello", b" world"], strip_leading_space=True) == ["Hello", " world", ""]
    assert pieces([b"", b"  x"], strip_leading_space=True) == ["", " x", ""]
    assert pieces([b"x", b" y"], strip_leading_space=True) == ["x", " y", ""]
    assert pieces([b" Hello"]) == [" Hello", ""]


def test_random_bytes_are_what_a_whole_decode_gives() -> None:
    rng = random.Random(0)
    for _ in range(500):
        data = bytes(rng.choice(b"a\xc3\xa9\xf0\x9f\x98\x80\xe0\xff\x80") for _ in range(rng.randrange(40)))
        tokens, start = [], 0
        while start < len(data):
            end = start + rng.randrange(1, 4)
            tokens.append(data[start:end])
            start = end
        assert "".join(pieces(tokens)) == data.decode("utf-8", errors="replace")
