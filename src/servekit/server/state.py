"""What the HTTP room knows of the server: its settings, and the engine once there is one.

The protocols say what it needs of an engine, so that it can be tested without one. It must not know how the engine
makes a token.
"""

import time
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from servekit.engine.core.prefix_history import PrefixExplanation
from servekit.engine.core.preview import Preview
from servekit.engine.core.request import GrammarSpec, Request
from servekit.engine.embed_work import EmbedStats
from servekit.engine.embedder import Embedder
from servekit.engine.engine import EngineStats
from servekit.engine.loop import SlotState
from servekit.engine.output import Chunk, SamplingDefaults
from servekit.engine.text.tool_format import ToolFormat
from servekit.errors import UnavailableError
from servekit.server.metrics import ServerMetrics
from servekit.server.security import Security

STALL_SECONDS = 60.0
"""No step takes this long: a thread that has work and has not come by since is stuck."""


class TokenNames(Protocol):
    """Single token ids as text and as bytes, for log-probabilities and echoed prompts.

    `visible_bytes` are those that reach an answer's text: none for a control token.
    """

    def token_text(self, token_id: int, /) -> str: ...

    def token_bytes(self, token_id: int, /) -> bytes: ...

    def visible_bytes(self, token_id: int, /) -> bytes: ...


class Generation(Protocol):
    """The answer to one engine request as it is made; `aclose` before its end aborts the request."""

    def __aiter__(self) -> AsyncIterator[Chunk]: ...

    async def aclose(self) -> None: ...

    def expire(self, message: str, /) -> None: ...


class EngineFacade(Protocol):
    """What the routes call. `generate` admits or refuses at once, before anything is computed."""

    @property
    def max_model_len(self) -> int: ...

    @property
    def max_open(self) -> int: ...

    @property
    def vocab_size(self) -> int: ...

    @property
    def tokenizer(self) -> TokenNames: ...

    @property
    def defaults(self) -> SamplingDefaults: ...

    @property
    def is_alive(self) -> bool: ...

    @property
    def can_generate(self) -> bool: ...

    @property
    def embedder(self) -> Embedder | None: ...

    def generate(self, request: Request, /) -> Generation: ...

    def stats(self) -> EngineStats: ...

    def embed_stats(self) -> EmbedStats: ...

    async def slots(self) -> list[SlotState]: ...

    @property
    def tool_format(self) -> ToolFormat | None: ...

    async def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None, /
    ) -> tuple[int, ...]: ...

    async def encode_text(self, text: str, /, *, add_special_tokens: bool = True) -> tuple[int, ...]: ...

    async def compile_grammar(self, spec: GrammarSpec, /) -> None: ...

    async def explain_cache(self, request: Request, visible: str, /) -> PrefixExplanation: ...

    async def preview(self, request: Request, /) -> Preview: ...


@dataclass(slots=True)
class ServerState:
    """Shared by the routes and by whoever loads and ends the engine.

    `engine` is None while the model loads; `load_error` says why it never will be there. `draining` is set when the
    server stops taking requests. `created` is in seconds since the epoch, `body_limit` in bytes, `ping_interval` and
    `read_timeout` (for a whole body) in seconds, `request_timeout` too, from arrival to the last token.
    `refuse_unknown` refuses a field that nobody knows, `log_prompts` lets bodies into the log. `props` is what
    `GET /props` shows.
    """

    model_name: str
    engine: EngineFacade | None = None
    load_error: str | None = None
    draining: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    props: dict[str, Any] = field(default_factory=dict)
    metrics: ServerMetrics = field(init=False)
    body_limit: int = 8 * 2**20
    ping_interval: float = 15.0
    read_timeout: float = 30.0
    request_timeout: float | None = None
    refuse_unknown: bool = False
    log_prompts: bool = False
    security: Security = field(default_factory=Security)

    def __post_init__(self) -> None:
        self.metrics = ServerMetrics(self.model_name)

    @property
    def status(self) -> str:
        """One word for `/health`: loading, failed, draining, dead or ok."""
        if self.load_error is not None:
            return "failed"
        if self.draining:
            return "draining"
        if self.engine is None:
            return "loading"
        return "ok" if self.engine.is_alive else "dead"

    def health(self) -> str:
        """`status`, or `stalled` when work is open and the engine thread has not come by for STALL_SECONDS."""
        status = self.status
        if status == "ok" and self.engine is not None and (self.engine.stats().last_step_age or 0.0) > STALL_SECONDS:
            return "stalled"
        return status

    @property
    def embedding_name(self) -> str:
        """The id of the embedding model: its own, or the served one where it is the only model."""
        engine = self.ready_engine()
        return engine.embedder.model_name if engine.embedder is not None and engine.can_generate else self.model_name

    @property
    def model_names(self) -> tuple[str, ...]:
        """The ids that requests may name."""
        return tuple(dict.fromkeys((self.model_name, self.embedding_name)))

    def ready_engine(self) -> EngineFacade:
        """The engine, if it takes requests now. Raises UnavailableError that says why it does not."""
        status = self.status
        if status != "ok" or self.engine is None:
            raise UnavailableError(_WHY_UNAVAILABLE[status])
        return self.engine


_WHY_UNAVAILABLE = {
    "loading": "the model is still loading",
    "failed": "the model could not be loaded",
    "draining": "the server is shutting down",
    "dead": "the engine has stopped",
}
