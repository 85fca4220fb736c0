"""Why a prompt's beginning was, or was not, found in the prefix cache: from a memory of the last prompts."""

from collections import OrderedDict
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

MAX_PROMPTS = 64


class PrefixEnd(StrEnum):
    """Why the cached prefix of a prompt ends where it does."""

    WHOLE = "whole"  # all of it that can be cached is
    DIFFERENT = "different_token"  # no known prompt goes on in this way
    NOT_FULL = "block_not_full"  # one of the two ends there, within a block
    EVICTED = "evicted"  # known, but its blocks are gone or were never computed
    OTHER_SALT = "other_salt"  # known under another cache salt
    UNKNOWN = "never_seen"  # nothing that begins like it


@dataclass(frozen=True, slots=True)
class PrefixExplanation:
    """`num_shared_tokens` with the known prompt most like it; the tokens at which both part, None where one ends."""

    num_cached_tokens: int
    num_shared_tokens: int
    end: PrefixEnd
    given_token: int | None = None
    known_token: int | None = None


class PrefixHistory:
    """The last MAX_PROMPTS different prompts, with their salts."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prompts: OrderedDict[tuple[str, bytes], npt.NDArray[np.int64]] = OrderedDict()

    def record(self, prompt: tuple[int, ...], salt: str) -> None:
        """Remember a prompt that is going to be computed."""
        tokens = np.array(prompt, dtype=np.int64)
        key = (salt, tokens.tobytes())
        self._prompts[key] = tokens
        self._prompts.move_to_end(key)
        if len(self._prompts) > MAX_PROMPTS:
            self._prompts.popitem(last=False)

    def explain(self, prompt: tuple[int, ...], salt: str, num_cached_tokens: int, visible: str) -> PrefixExplanation:
        """Compare with what is remembered under salts that begin with `visible`; others belong to somebody else."""
        given = np.array(prompt, dtype=np.int64)
        own, known = self._most_alike(given, [key for key in self._prompts if key[0] == salt])
        other, _ = self._most_alike(
            given, [key for key in self._prompts if key[0] != salt and key[0].startswith(visible)]
        )
        block = self._block_size
        cacheable = (len(prompt) - 1) // block * block
        given_token = int(given[own]) if own < len(given) else None
        known_token = int(known[own]) if known is not None and own < len(known) else None
        if num_cached_tokens >= cacheable and num_cached_tokens:
            end = PrefixEnd.WHOLE
        elif other >= max(own, num_cached_tokens) + block:
            end = PrefixEnd.OTHER_SALT
        elif own >= num_cached_tokens + block and cacheable > num_cached_tokens:
            end = PrefixEnd.EVICTED
        elif own == 0:
            end = PrefixEnd.UNKNOWN
        elif given_token is not None and known_token is not None:
            end = PrefixEnd.DIFFERENT
        else:
            end = PrefixEnd.NOT_FULL
        return PrefixExplanation(num_cached_tokens, own, end, given_token, known_token)

    def _most_alike(
        self, given: npt.NDArray[np.int64], keys: list[tuple[str, bytes]]
    ) -> tuple[int, npt.NDArray[np.int64] | None]:
        best, alike = 0, None
        for key in keys:
            known = self._prompts[key]
            size = min(len(given), len(known))
            differs = given[:size] != known[:size]
            shared = int(differs.argmax()) if differs.any() else size
            if shared > best:
                best, alike = shared, known
        return best, alike
