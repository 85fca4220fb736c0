"""InputEncoder: texts to the token ids that an embedding model reads. It must not know requests, HTTP or tensors.

A thin layer over the `tokenizers` library. Truncation and padding that a tokenizer's file asks for are switched off:
a text that is too long is the caller's to judge, and batches are not padded here.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import tokenizers

from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.text.tokenizer import load_backend
from servekit.errors import InputError

TruncationSide = Literal["left", "right"]


@contextmanager
def valid_unicode() -> Iterator[None]:
    """Turn the tokenizer library's complaint about broken Unicode into an InputError."""
    try:
        yield
    except (UnicodeEncodeError, TypeError) as error:
        raise InputError("the text is not valid Unicode: it holds half of a surrogate pair") from error


class InputEncoder:
    """One embedding model's tokenizer. `vocab_size` counts its tokens."""

    def __init__(self, backend: tokenizers.Tokenizer, *, lower_case: bool = False) -> None:
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._lower_case = lower_case
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._before, self._after = self._special_tokens()
        self._num_pair_special = backend.num_special_tokens_to_add(True)

    @classmethod
    def from_directory(cls, directory: Path, *, lower_case: bool = False) -> Self:
        """The tokenizer of a model folder. Raises ModelError when its files are missing or damaged."""
        return cls(load_backend(directory), lower_case=lower_case)

    def encode(self, texts: Sequence[str], prompt: str = "", *, pool_prompt: bool = True) -> list[EmbedInput]:
        """Each text with `prompt` before it and the special tokens around it. Raises InputError for broken Unicode.

        Without `pool_prompt` the prompt and what stands before it are marked as not to be pooled.
        """
        num_unpooled = 0
        if prompt and not pool_prompt:
            alone = self._run([self._prepared(prompt)], add_special_tokens=False)[0].ids
            num_unpooled = len(self._before) + len(alone)
        encodings = self._run([self._prepared(prompt + text) for text in texts])
        return [
            EmbedInput(tuple(encoding.ids), num_unpooled=min(num_unpooled, len(encoding.ids) - 1))
            for encoding in encodings
        ]

    def encode_pairs(self, pairs: Sequence[tuple[str, str]]) -> list[EmbedInput]:
        """Each pair as a cross-encoder reads it, with where its second text begins."""
        prepared = [(self._prepared(first), self._prepared(second)) for first, second in pairs]
        inputs = []
        for encoding in self._run(prepared):
            second = next((i for i, part in enumerate(encoding.type_ids) if part), None)
            inputs.append(EmbedInput(tuple(encoding.ids), second))
        return inputs

    def wrap(self, token_ids: Sequence[int]) -> EmbedInput:
        """Token ids of a text with the special tokens around them, those that are not there already."""
        ids = tuple(token_ids)
        before = () if ids[: len(self._before)] == self._before else self._before
        after = () if not self._after or ids[-len(self._after) :] == self._after else self._after
        return EmbedInput(before + ids + after)

    def truncate(self, text: EmbedInput, max_tokens: int, side: TruncationSide) -> EmbedInput:
        """A single text cut to `max_tokens` on one side, its special tokens kept."""
        ids = text.token_ids
        if len(ids) <= max_tokens:
            return text
        inner = ids[len(self._before) : len(ids) - len(self._after)]
        kept = max(0, max_tokens - len(self._before) - len(self._after))
        inner = inner[:kept] if side == "right" else inner[len(inner) - kept :]
        cut = 0 if side == "right" else len(ids) - max_tokens
        shortened = self._before + inner + self._after
        return EmbedInput(shortened, num_unpooled=min(max(0, text.num_unpooled - cut), len(shortened) - 1))

    def encode_pairs_within(self, pairs: Sequence[tuple[str, str]], max_tokens: int) -> list[EmbedInput]:
        """Pairs whose second text is cut, at its end, to what the first and the special tokens leave."""
        firsts = self._run([self._prepared(first) for first, _ in pairs], add_special_tokens=False)
        seconds = self._run([self._prepared(second) for _, second in pairs], add_special_tokens=False)
        inputs = []
        for first, second in zip(firsts, seconds, strict=True):
            second.truncate(max(0, max_tokens - len(first.ids) - self._num_pair_special))
            encoding = self._backend.post_process(first, second, True)
            start = next((i for i, part in enumerate(encoding.type_ids) if part), None)
            inputs.append(EmbedInput(tuple(encoding.ids), start))
        return inputs

    def _prepared(self, text: str) -> str:
        return text.lower() if self._lower_case else text

    def _run(
        self, texts: Sequence[str] | Sequence[tuple[str, str]], add_special_tokens: bool = True
    ) -> list[tokenizers.Encoding]:
        with valid_unicode():
            # The fast variant leaves out offsets, which nobody reads.
            return self._backend.encode_batch_fast(list(texts), add_special_tokens=add_special_tokens)

    def _special_tokens(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """What the tokenizer puts before and after a text."""
        inner, whole = (self._backend.encode("a", add_special_tokens=special).ids for special in (False, True))
        start = next((i for i in range(len(whole)) if whole[i : i + len(inner)] == inner), 0)
        return tuple(whole[:start]), tuple(whole[start + len(inner) :])
