"""The plain data that crosses between the API and the engine. It must not know torch, the scheduler or HTTP.

Everything here is a frozen value, so that a process boundary can be put between the two sides.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from math import isfinite
from types import MappingProxyType
from typing import Literal

from servekit.errors import InputError

_NO_BIAS: Mapping[int, float] = MappingProxyType({})
MAX_TOP_LOGPROBS = 20


class FinishReason(StrEnum):
    """Why a sequence ended: a stop token or string, the token limit, the client, or our own fault."""

    STOP = "stop"
    LENGTH = "length"
    ABORT = "abort"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class GrammarSpec:
    """A form that an answer must have, as text: a JSON schema, a regular expression, or a grammar (GBNF, Lark).

    `param` is the request's field that it came in.
    """

    kind: Literal["json_schema", "regex", "grammar", "lark"]
    text: str
    param: str = field(default="response_format", compare=False)


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are chosen and when to stop.

    `temperature` 0 is greedy. `top_k` 0, `top_p` 1 and `min_p` 0 are off. `max_tokens` None means until EOS or the
    context limit. `stop_token_ids` are stops beside the model's own EOS set, which `ignore_eos` switches off (the
    explicit ones stay). `logprobs` None gives none, N the chosen token's and the N most likely ones'. The penalties
    follow OpenAI (presence, frequency: over generated tokens) and CTRL, arXiv:1909.05858 (repetition: over prompt and
    generated tokens). A `grammar` allows the model's EOS exactly where the answer may end.

    Raises InputError, with `param` naming the field, for a value out of range.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    max_tokens: int | None = None
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: frozenset[int] = frozenset()
    seed: int | None = None
    ignore_eos: bool = False
    logprobs: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=lambda: _NO_BIAS)
    grammar: GrammarSpec | None = None

    def __post_init__(self) -> None:
        _in_range("temperature", self.temperature, 0.0, 100.0)
        _in_range("top_p", self.top_p, 0.0, 1.0, low_open=True)
        _in_range("min_p", self.min_p, 0.0, 1.0)
        _in_range("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _in_range("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _in_range("repetition_penalty", self.repetition_penalty, 0.0, 100.0, low_open=True)
        _at_least("top_k", self.top_k, 0)
        _at_least("min_tokens", self.min_tokens, 0)
        if self.max_tokens is not None:
            _at_least("max_tokens", self.max_tokens, 1)
            if self.min_tokens > self.max_tokens:
                raise InputError(
                    f"min_tokens {self.min_tokens} is more than max_tokens {self.max_tokens}",
                    param="min_tokens",
                )
        if self.logprobs is not None:
            _in_range("top_logprobs", self.logprobs, 0, MAX_TOP_LOGPROBS)
        if self.seed is not None and not -(2**63) <= self.seed < 2**64:
            raise InputError("seed must fit in 64 bits", param="seed")
        if self.grammar is not None and (self.ignore_eos or self.min_tokens):
            name = "ignore_eos" if self.ignore_eos else "min_tokens"
            raise InputError(f"{name} cannot be followed together with {self.grammar.param}", param=name)
        if any(not text for text in self.stop):
            raise InputError("a stop string must not be empty", param="stop")
        for token_id, bias in self.logit_bias.items():
            if token_id < 0 or not -100.0 <= bias <= 100.0:
                raise InputError(
                    f"logit_bias {token_id}: {bias} must map a token id to a value from -100 to 100",
                    param="logit_bias",
                )

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken without drawing."""
        return self.temperature == 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """One prompt to continue once. `arrival_time` is in seconds of time.monotonic(); a lower `priority` goes first.

    `continues_text`: the answer reads on from the prompt's text, so a space that begins it is kept. `shows_control`:
    control tokens come as text, because whoever reads the answer looks for them.
    """

    request_id: str
    prompt_token_ids: tuple[int, ...]
    sampling: SamplingParams
    arrival_time: float
    priority: int = 0
    cache_salt: str = ""
    continues_text: bool = False
    shows_control: bool = False


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Natural-log probability of the chosen token and of the most likely ones, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class SampledToken:
    """What the sampler decided for one sequence in one step."""

    token_id: int
    logprob: TokenLogprob | None = None


@dataclass(frozen=True, slots=True)
class RequestTimings:
    """Seconds a request has spent. `queue` ends when it was first scheduled, `prefill` at its first token.

    `mean_batch_size` is how many sequences, itself included, shared the steps it took part in.
    """

    queue: float = 0.0
    prefill: float = 0.0
    decode: float = 0.0
    num_preemptions: int = 0
    mean_batch_size: float = field(default=0.0, compare=False)


@dataclass(frozen=True, slots=True)
class Update:
    """What one step did for one request. After one with a `finish_reason`, no more follow.

    `stop_reason` is the stop token id that matched, when one did. `timings` come with every token, as of then: which
    update is the last may be decided by who reads the text.
    """

    request_id: str
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    num_cached_tokens: int = 0
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None
    error: str | None = None
    timings: RequestTimings | None = None


def _in_range(name: str, value: float, low: float, high: float, *, low_open: bool = False) -> None:
    if not isfinite(value) or not low <= value <= high or (low_open and value == low):
        raise InputError(
            f"{name} must be {'over' if low_open else 'from'} {low:g} up to {high:g}, not {value:g}",
            param=name,
        )


def _at_least(name: str, value: int, low: int) -> None:
    if value < low:
        raise InputError(f"{name} must be at least {low}, not {value}", param=name)
