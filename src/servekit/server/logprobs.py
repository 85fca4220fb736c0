"""Log-probabilities in the two shapes of the API. It must not know how they were computed.

JSON has no infinity, so an impossible token's log-probability is written as LOWEST_LOGPROB.
"""

import codecs
from collections.abc import Sequence
from typing import Any

from servekit.engine.core.request import TokenLogprob
from servekit.server.state import TokenNames

LOWEST_LOGPROB = -9999.0


def chat_logprobs(logprobs: Sequence[TokenLogprob], names: TokenNames) -> dict[str, Any]:
    """`{"content": [...]}` with one entry a token; the bytes of all entries join to the text."""
    return {
        "content": [
            {
                **_chat_token(entry.token_id, entry.logprob, names),
                "top_logprobs": [_chat_token(token_id, logprob, names) for token_id, logprob in entry.top],
            }
            for entry in logprobs
        ],
        "refusal": None,
    }


def _chat_token(token_id: int, logprob: float, names: TokenNames) -> dict[str, Any]:
    return {
        "token": names.token_text(token_id),
        "logprob": finite(logprob),
        "bytes": list(names.visible_bytes(token_id)),
    }


class CompletionLogprobs:
    """The older shape: parallel lists. Keeps the character offset of one choice over its chunks."""

    def __init__(self, names: TokenNames) -> None:
        self._names = names
        self._offset = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def fields(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any]:
        """Lists of equal length: tokens, token_logprobs, top_logprobs (the chosen token is among them), text_offset."""
        return {
            "tokens": [self._names.token_text(entry.token_id) for entry in logprobs],
            "token_logprobs": [finite(entry.logprob) for entry in logprobs],
            "top_logprobs": [self._top(entry) for entry in logprobs],
            "text_offset": [self._advance(entry.token_id) for entry in logprobs],
        }

    def _top(self, entry: TokenLogprob) -> dict[str, float]:
        top: dict[str, float] = {}
        # Two ids may print alike (parts of characters): the likelier one, which comes first, keeps the name.
        for token_id, logprob in (*entry.top, (entry.token_id, entry.logprob)):
            top.setdefault(self._names.token_text(token_id), finite(logprob))
        return top

    def _advance(self, token_id: int) -> int:
        """Where the character stands that the token's first byte belongs to, which may have begun before the token."""
        piece = self._names.visible_bytes(token_id)
        if not piece:
            return self._offset
        self._offset += len(self._decoder.decode(piece[:1]))
        is_open = bool(self._decoder.getstate()[0])
        start = self._offset if is_open else self._offset - 1
        self._offset += len(self._decoder.decode(piece[1:]))
        return start


def finite(logprob: float) -> float:
    """The value itself, or LOWEST_LOGPROB for -inf, NaN and anything below."""
    return logprob if logprob > LOWEST_LOGPROB else LOWEST_LOGPROB
