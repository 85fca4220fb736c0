"""Which token came when, where the server only says how many there were. It must not know HTTP."""

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

_PIECES = re.compile(r"\s*[^\W\d_]+|\s?\d{1,3}|\s?[^\w\s]+|\s+")
_BYTES_PER_TOKEN = 8


def estimate_tokens(text: str) -> int:
    """A guess without the model's tokenizer: words, groups of digits and marks, long words in parts of eight bytes."""
    return sum(-(-len(piece.strip().encode("utf-8")) // _BYTES_PER_TOKEN) or 1 for piece in _PIECES.findall(text))


CountTokens = Callable[[str], int]


def cumulative_tokens(chars: Sequence[int], known: Sequence[int | None], total: int) -> list[int]:
    """Tokens so far after each chunk of `chars` characters, ending with `total`.

    `known` has what the server itself said of a chunk, if it did so for all of them. Otherwise every chunk has one
    token, and what is left is spread in proportion to the characters.
    """
    exact = [count for count in known if count is not None]
    if len(exact) == len(chars) and all(a <= b for a, b in pairwise(exact)):
        return [*exact[:-1], max(exact[-1], total)] if exact else []
    spare, all_chars = max(0, total - len(chars)), sum(chars) or 1
    cumulative, so_far = [], 0
    for position, count in enumerate(chars, start=1):
        so_far += count
        cumulative.append(min(position, total) + round(spare * so_far / all_chars))
    return cumulative
