"""An engine without a model: a token is a byte, and the answers are scripted.

The default answer is "Hi there" in two chunks with fixed timings, so that whole bodies can be compared.
"""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Self

from servekit.engine.core.prefix_history import PrefixEnd, PrefixExplanation
from servekit.engine.core.preview import Preview
from servekit.engine.core.request import FinishReason, GrammarSpec, Request, RequestTimings
from servekit.engine.embed_work import EmbedStats
from servekit.engine.embedder import Embedder
from servekit.engine.engine import EngineStats
from servekit.engine.loop import SlotState
from servekit.engine.output import Chunk, SamplingDefaults, Usage
from servekit.engine.text.tool_format import ToolFormat
from servekit.errors import ContextLengthError

VOCAB_SIZE = 256
STATS = EngineStats(1, 1, 0, 3, 2, 5, 10, 0, 40, 16, 7, 90, 0.5, 0.6, 0.1, 0.01)
PREVIEW = Preview(0, 16, 3, 5, 2, 1, num_tokens_ahead=20, num_steps_to_slot=3)
SLOT = SlotState(0, "r-0", "decode", 5, 0, 6, 2, 1, 0, 0, 0.5, 20.0, 40.0)
TIMINGS = RequestTimings(queue=0.001, prefill=0.02, decode=0.04, num_preemptions=1, mean_batch_size=2.5)


class ByteTokens:
    """Token id = byte."""

    def token_text(self, token_id: int, /) -> str:
        return bytes([token_id]).decode("utf-8", errors="replace")

    def visible_bytes(self, token_id: int, /) -> bytes:
        return self.token_bytes(token_id)

    def token_bytes(self, token_id: int, /) -> bytes:
        return bytes([token_id])


def hi_there(request: Request) -> list[Chunk]:
    """Two chunks and a stop; one token of the prompt was cached."""
    num_prompt = len(request.prompt_token_ids)
    return [
        Chunk("Hi", Usage(num_prompt, 2, 1), token_ids=(72, 105)),
        Chunk(
            " there",
            Usage(num_prompt, 9, 1),
            token_ids=tuple(b" there"),
            finish_reason=FinishReason.STOP,
            timings=TIMINGS,
        ),
    ]


class FakeGeneration:
    """Gives its chunks in order; with `hold`, waits for ever after them."""

    def __init__(self, chunks: Sequence[Chunk], *, hold: bool = False) -> None:
        self._chunks = list(chunks)
        self._hold = hold
        self.read_to_end = False
        self.aborted = False
        self.waiting = asyncio.Event()
        self.expired = asyncio.Event()

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Chunk:
        if self._chunks:
            return self._chunks.pop(0)
        if self._hold:
            self.waiting.set()
            await self.expired.wait()
            return self._chunks.pop(0)
        self.read_to_end = True
        raise StopAsyncIteration

    def expire(self, message: str, /) -> None:
        self.expired.set()
        self._chunks.append(Chunk("", Usage(1), finish_reason=FinishReason.ERROR, error=message))

    async def aclose(self) -> None:
        self.aborted = self.aborted or not self.read_to_end


class FakeEngine:
    """Keeps what it was asked. `script` makes the chunks of a request; `refuse` maps a request's number to an error."""

    def __init__(
        self,
        script: Callable[[Request], Sequence[Chunk]] = hi_there,
        *,
        hold: bool = False,
        refuse: Mapping[int, Exception] | None = None,
        defaults: SamplingDefaults | None = None,
        max_model_len: int = 1000,
        tool_format: ToolFormat | None = None,
    ) -> None:
        self._script = script
        self._hold = hold
        self._refuse = refuse or {}
        self.defaults = defaults or SamplingDefaults()
        self.max_model_len = max_model_len
        self.max_open = 600
        self.grammars: list[GrammarSpec] = []
        self.tools: Sequence[Mapping[str, Any]] | None = None
        self.tool_format = tool_format
        self.vocab_size = VOCAB_SIZE
        self.last_step_age: float | None = None
        self.tokenizer = ByteTokens()
        self.is_alive = True
        self.can_generate = True
        self.embedder: Embedder | None = None
        self.requests: list[Request] = []
        self.generations: list[FakeGeneration] = []
        self.messages: list[Mapping[str, Any]] = []
        self.encode_error: Exception | None = None

    def generate(self, request: Request, /) -> FakeGeneration:
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise ContextLengthError(len(request.prompt_token_ids), self.max_model_len)
        if len(self.requests) in self._refuse:
            raise self._refuse[len(self.requests)]
        generation = FakeGeneration(self._script(request), hold=self._hold)
        self.requests.append(request)
        self.generations.append(generation)
        return generation

    def stats(self) -> EngineStats:
        return replace(STATS, last_step_age=self.last_step_age)

    def embed_stats(self) -> EmbedStats:
        return EmbedStats()

    async def slots(self) -> list[SlotState]:
        return [SLOT]

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, /
    ) -> tuple[int, ...]:
        self.tools = tools
        if self.encode_error is not None:
            raise self.encode_error
        self.messages = list(messages)
        return tuple("".join(message["content"] for message in messages).encode())

    async def encode_text(self, text: str, /, *, add_special_tokens: bool = True) -> tuple[int, ...]:
        return (*((0,) if not add_special_tokens else ()), *text.encode())

    async def compile_grammar(self, spec: GrammarSpec, /) -> None:
        self.grammars.append(spec)

    async def explain_cache(self, request: Request, visible: str, /) -> PrefixExplanation:
        return PrefixExplanation(16, 18, PrefixEnd.NOT_FULL, given_token=65, known_token=None)

    async def preview(self, request: Request, /) -> Preview:
        if len(request.prompt_token_ids) >= self.max_model_len:
            raise ContextLengthError(len(request.prompt_token_ids), self.max_model_len)
        return replace(PREVIEW, num_prompt_tokens=len(request.prompt_token_ids))
