"""Keep text that a client sends from becoming control tokens. It must not know templates or tokenizers.

Before a template runs, every control token's spelling inside client text is put between two noncharacters; after it
ran, they tell a spelling that a client wrote from one that the template wrote. U+FDD0 and U+FDD1 are noncharacters
(the Unicode standard, section 23.7): no interchanged text needs them, so those that a client sends become U+FFFD.
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

_OPEN, _CLOSE = "\ufdd0", "\ufdd1"
_CLEAN = {ord(_OPEN): "\ufffd", ord(_CLOSE): "\ufffd"}


class ForgedTokens:
    """Marks and finds control token spellings; `spellings` are the texts of all control tokens."""

    def __init__(self, spellings: Iterable[str]) -> None:
        # Longest first: one token may begin with another.
        ordered = sorted({spelling for spelling in spellings if spelling}, key=len, reverse=True)
        alternatives = "|".join(map(re.escape, ordered)) or r"(?!)"
        self._spelling = re.compile(alternatives)
        self._mark = re.compile(f"{_OPEN}({alternatives}){_CLOSE}|[{_OPEN}{_CLOSE}]")

    def mark(self, value: Any) -> Any:
        """A copy of plain data with every spelling inside its strings marked; keys of mappings too."""
        if isinstance(value, str):
            return self._spelling.sub(
                rf"{_OPEN}\g<0>{_CLOSE}", value.translate(_CLEAN) if not value.isascii() else value
            )
        if isinstance(value, Mapping):
            return {self.mark(key): self.mark(item) for key, item in value.items()}
        if isinstance(value, list | tuple):
            return [self.mark(item) for item in value]
        return value

    def split(self, rendered: str) -> list[tuple[str, bool]] | None:
        """The rendered text as (text, whether a client forged it) in order, or None when nothing was forged.

        A mark that a template tore from its spelling is dropped, but still divides the text.
        """
        if _OPEN not in rendered and _CLOSE not in rendered:
            return None
        # re.split gives text and captured spelling in turns, None for a lone mark.
        parts = self._mark.split(rendered)
        return [(part, index % 2 == 1) for index, part in enumerate(parts) if part]
