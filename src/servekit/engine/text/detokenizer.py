"""Token ids to text, one token at a time. It must not know tokenizers or stop strings."""

import codecs
from collections.abc import Callable


class Detokenizer:
    """Append-only text of a growing token sequence.

    `visible_bytes` gives the bytes that a token adds to the text, none for special tokens. Only an unfinished UTF-8
    sequence is held back (at most 3 bytes); bytes that can no longer become one turn into U+FFFD at once, as the
    Unicode standard recommends (one for each maximal subpart, section 3.9). Constant time for each token.

    `strip_leading_space`: the first space of the text is one that the tokenizer put there, and is dropped.
    """

    def __init__(self, visible_bytes: Callable[[int], bytes], *, strip_leading_space: bool = False) -> None:
        self._visible_bytes = visible_bytes
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = strip_leading_space

    def push(self, token_id: int) -> str:
        """The text that is certain now that `token_id` follows; may be empty."""
        data = self._visible_bytes(token_id)
        if self._at_start and data:
            self._at_start = False
            data = data.removeprefix(b" ")
        return self._decoder.decode(data)

    def flush(self) -> str:
        """The text of what was held back; the sequence has ended."""
        return self._decoder.decode(b"", final=True)
