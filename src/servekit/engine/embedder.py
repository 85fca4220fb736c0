"""Embedder: the embedding half of the async facade: texts in, vectors out. It must not know HTTP.

It belongs to the event loop; texts become token ids in a worker thread, and vectors are made on the engine thread.
"""

import asyncio
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import numpy as np

from servekit.engine.core.embed_queue import EmbedInput, EmbedRequest
from servekit.engine.embed_work import EmbedUpdate
from servekit.engine.spec.pooling import EmbeddingSpec
from servekit.engine.step import EmbedRunner, FloatArray
from servekit.engine.text.input_encoder import InputEncoder, TruncationSide
from servekit.errors import EngineError, InputError, InputLengthError, OverloadedError, UnsupportedError

InputType = Literal["query", "document"]
_PROMPT_NAMES: dict[InputType, tuple[str, ...]] = {"query": ("query",), "document": ("document", "passage")}
_TEXTS_A_PIECE = 256
"""Texts that one worker thread encodes before the next request gets its turn."""


@dataclass(frozen=True, slots=True)
class Embedded:
    """Vectors [n, dim] in the order of the texts. Seconds: `queue` before the first step, `device` in all steps."""

    vectors: FloatArray
    queue: float
    device: float


@dataclass(slots=True)
class _Open:
    future: asyncio.Future[Embedded]
    num_texts: int
    vectors: FloatArray | None = None
    num_done: int = 0
    queue: float | None = None
    device: float = 0.0


class Embedder:
    """One embedding model or cross-encoder (`is_scorer`), between its callers and the engine thread.

    `max_tokens` is the longest text, special tokens included; `size` the length of a vector. The engine connects it.
    """

    def __init__(
        self,
        *,
        model_name: str,
        encoder: InputEncoder,
        runner: EmbedRunner,
        spec: EmbeddingSpec | None,
        vocab_size: int,
        max_tokens: int,
        size: int,
        any_size: bool = False,
        queue_limit: int,
    ) -> None:
        self.model_name = model_name
        self.runner = runner
        self.max_tokens = max_tokens
        self.size = size
        self.encode_seconds = 0.0
        self._encoder = encoder
        self._spec = spec
        self._vocab_size = vocab_size
        self._any_size = any_size
        self._queue_limit = queue_limit
        self._open: dict[str, _Open] = {}
        self._submit: Callable[[EmbedRequest], None] | None = None
        self._abort: Callable[[str], None] | None = None

    def connect(self, submit: Callable[[EmbedRequest], None], abort: Callable[[str], None]) -> None:
        """Where requests go: the inbox of the engine thread."""
        self._submit, self._abort = submit, abort

    @property
    def is_scorer(self) -> bool:
        """Whether it scores pairs instead of embedding texts."""
        return self._spec is None

    @property
    def num_open(self) -> int:
        """Requests in the engine's hands."""
        return len(self._open)

    async def encode(
        self,
        texts: Sequence[str | tuple[int, ...]],
        *,
        input_type: InputType | None = None,
        truncate: TruncationSide | None = None,
    ) -> list[EmbedInput]:
        """Token ids of texts, made in a worker thread; those given as ids only get their special tokens.

        Raises InputLengthError naming the place of a text that is too long unless it may be truncated, InputError for
        an empty text, a foreign id or a prompt that the model does not have.
        """
        if self._spec is None:
            raise UnsupportedError("this model scores pairs of texts and embeds none", param="model")
        prompt = self._prompt(input_type)
        inputs: list[EmbedInput] = []
        for first in range(0, len(texts), _TEXTS_A_PIECE):
            piece = texts[first : first + _TEXTS_A_PIECE]
            inputs += await self._timed(partial(self._encode_piece, piece, first, prompt))
        if truncate is not None:
            return [self._encoder.truncate(text, self.max_tokens, truncate) for text in inputs]
        self._check_lengths(inputs, "input")
        return inputs

    async def encode_pairs(self, pairs: Sequence[tuple[str, str]], *, truncate: bool, param: str) -> list[EmbedInput]:
        """Token ids of pairs for a cross-encoder. With `truncate` the second text is cut to fit."""
        if not self.is_scorer:
            raise UnsupportedError(
                "this model embeds texts and is no cross-encoder",
                hint="method: similarity ranks by the cosine of its embeddings",
                param="model",
            )
        if truncate:
            inputs = await self._timed(lambda: self._encoder.encode_pairs_within(pairs, self.max_tokens))
        else:
            inputs = await self._timed(lambda: self._encoder.encode_pairs(pairs))
        self._check_lengths(inputs, param)
        return inputs

    async def embed(self, inputs: Sequence[EmbedInput]) -> Embedded:
        """The vectors of encoded texts; cancelling it takes what has not been computed out of the line.

        Raises OverloadedError when the waiting line is full, EngineError when the model fails.
        """
        assert self._submit is not None, "the engine connects its embedder"
        assert self._abort is not None
        if len(self._open) > self._queue_limit:
            raise OverloadedError(f"{self._queue_limit} requests are waiting, the most that --queue-limit allows")
        request_id = uuid.uuid4().hex
        entry = _Open(asyncio.get_running_loop().create_future(), len(inputs))
        self._open[request_id] = entry
        try:
            self._submit(EmbedRequest(request_id, tuple(inputs), time.monotonic()))
            return await entry.future
        finally:
            if self._open.pop(request_id, None) is not None:
                self._abort(request_id)

    def cut(self, vectors: FloatArray, size: int | None) -> FloatArray:
        """The first `size` numbers of each vector, at the length that the model's own vectors have.

        Raises InputError for a size that the model does not have, UnsupportedError when it has only one.
        """
        if size is None or size == self.size:
            return vectors
        shortened = vectors[:, :size]
        if self._spec is not None and self._spec.normalise:
            lengths = np.linalg.norm(shortened, axis=1, keepdims=True)
            shortened = shortened / np.maximum(lengths, 1e-12)
        return np.ascontiguousarray(shortened, dtype=np.float32)

    def check_size(self, size: int | None) -> None:
        """Raise unless vectors can be cut to `size`."""
        if size is None or size == self.size:
            return
        if size > self.size:
            raise InputError(f"dimensions must be at most {self.size}, not {size}", param="dimensions")
        sizes = None if self._spec is None else self._spec.matryoshka
        if self._any_size or sizes == ():
            return
        if sizes is None:
            raise UnsupportedError(
                f"this model's vectors have {self.size} numbers, and it does not say that they may be cut",
                hint="--matryoshka allows it for a model that was trained so",
                param="dimensions",
            )
        if size not in sizes:
            offered = ", ".join(map(str, sizes))
            raise InputError(f"dimensions must be one of {offered}, not {size}", param="dimensions")

    def take(self, updates: list[EmbedUpdate]) -> None:
        """One step's updates, on the event loop."""
        for update in updates:
            entry = self._open.get(update.request_id)
            if entry is None or entry.future.done():
                continue
            if update.error is not None or update.vectors is None:
                self._open.pop(update.request_id)
                entry.future.set_exception(EngineError(update.error or "the request was ended by the server"))
                continue
            if entry.vectors is None:
                entry.vectors = np.empty((entry.num_texts, update.vectors.shape[1]), dtype=np.float32)
            entry.vectors[list(update.rows)] = update.vectors
            entry.num_done += len(update.rows)
            entry.queue = update.queue if entry.queue is None else entry.queue
            entry.device += update.device
            if entry.num_done == entry.num_texts:
                self._open.pop(update.request_id)
                entry.future.set_result(Embedded(entry.vectors, entry.queue, entry.device))

    def fail_all(self, error: Exception) -> None:
        """End every open request with `error`."""
        for entry in self._open.values():
            if not entry.future.done():
                entry.future.set_exception(error)
        self._open.clear()

    async def _timed(self, work: Callable[[], list[EmbedInput]]) -> list[EmbedInput]:
        began = time.monotonic()
        try:
            return await asyncio.to_thread(work)
        finally:
            self.encode_seconds += time.monotonic() - began

    def _prompt(self, input_type: InputType | None) -> str:
        assert self._spec is not None
        if input_type is None:
            return self._spec.default_prompt or ""
        if not self._spec.prompts:
            return ""  # such a model reads queries and documents alike
        for name in _PROMPT_NAMES[input_type]:
            if name in self._spec.prompts:
                return self._spec.prompts[name]
        known = ", ".join(self._spec.prompts)
        raise InputError(f"this model has no prompt for {input_type}, only {known}", param="input_type")

    def _encode_piece(self, texts: Sequence[str | tuple[int, ...]], first: int, prompt: str) -> list[EmbedInput]:
        for index, text in enumerate(texts, first):
            if not text:
                raise InputError(f"input[{index}] is empty", param="input")
            if not isinstance(text, str) and not all(0 <= token_id < self._vocab_size for token_id in text):
                raise InputError(f"input[{index}] has a token id outside 0 to {self._vocab_size - 1}", param="input")
        strings = [text for text in texts if isinstance(text, str)]
        words = iter(
            self._encoder.encode(strings, prompt, pool_prompt=self._spec is None or self._spec.includes_prompt)
        )
        return [next(words) if isinstance(text, str) else self._encoder.wrap(text) for text in texts]

    def _check_lengths(self, inputs: Sequence[EmbedInput], param: str) -> None:
        for index, text in enumerate(inputs):
            if len(text.token_ids) > self.max_tokens:
                raise InputLengthError(index, len(text.token_ids), self.max_tokens, param=param)
