"""PairPromptEncoder: pairs of texts put into a prompt, for decoders that score them. It must not know the score.

Control tokens count where the prompt has them; spelled inside a text they are text.
"""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Self

import tokenizers

from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.spec.token_score import DOCUMENT, QUERY, TokenScoreSpec
from servekit.engine.text.input_encoder import InputEncoder, valid_unicode
from servekit.engine.text.tokenizer import Tokenizer, load_backend
from servekit.errors import ModelError


class PairPromptEncoder(InputEncoder):
    """An InputEncoder whose pairs are the two texts in `prompt`, at the places QUERY and DOCUMENT."""

    def __init__(self, backend: tokenizers.Tokenizer, prompt: str) -> None:
        super().__init__(backend)
        if prompt.count(QUERY) != 1 or prompt.count(DOCUMENT) != 1:
            raise ModelError("the model's prompt for pairs must hold the query and the document once each")
        self._plain = tokenizers.Tokenizer.from_str(backend.to_str())
        self._plain.encode_special_tokens = True
        control = {token.content: i for i, token in backend.get_added_tokens_decoder().items() if token.special}
        longest_first = sorted(control, key=len, reverse=True)
        pieces = re.split(f"({'|'.join(map(re.escape, longest_first))})", prompt) if control else [prompt]
        # Control tokens as ids, the text between them as text.
        self._pieces: list[str | int] = [control.get(piece, piece) for piece in pieces if piece]

    @classmethod
    def from_model(cls, directory: Path, spec: TokenScoreSpec) -> Self:
        """With the spec's own prompt, or the one that the folder's chat template makes of a query and a document."""
        return cls(load_backend(directory), spec.prompt or _template_prompt(directory, spec.instruction))

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[EmbedInput]:
        """Each pair as the model reads it."""
        return [EmbedInput(self._joined(query, document)) for query, document in pairs]

    def encode_pairs_within(self, pairs: Sequence[tuple[str, str]], max_tokens: int) -> list[EmbedInput]:
        """Pairs whose documents are cut, at their ends, to what the rest leaves."""
        return [EmbedInput(self._within(query, document, max_tokens)) for query, document in pairs]

    def _within(self, query: str, document: str, max_tokens: int) -> tuple[int, ...]:
        ids = self._joined(query, document)
        while len(ids) > max_tokens and document:
            # Tokens at the seams may merge, so it may take a second round.
            offsets = self._plain.encode(document, add_special_tokens=False).offsets
            kept = max(0, len(offsets) - (len(ids) - max_tokens))
            shortened = document[: offsets[kept - 1][1]] if kept else ""
            document = shortened if len(shortened) < len(document) else document[:-1]
            ids = self._joined(query, document)
        return ids

    def _joined(self, query: str, document: str) -> tuple[int, ...]:
        ids: list[int] = []
        for piece in self._pieces:
            if isinstance(piece, int):
                ids.append(piece)
                continue
            text = "".join({QUERY: query, DOCUMENT: document}.get(part, part) for part in _PLACES.split(piece))
            with valid_unicode():
                ids += self._plain.encode(text, add_special_tokens=False).ids
        return tuple(ids)


_PLACES = re.compile(f"({QUERY}|{DOCUMENT})")


def _template_prompt(directory: Path, instruction: str | None) -> str:
    messages = [{"role": "query", "content": QUERY}, {"role": "document", "content": DOCUMENT}]
    if instruction:
        messages.insert(0, {"role": "system", "content": instruction})
    return Tokenizer.from_directory(directory).render_own(messages)
