"""What a caller of the engine receives. Plain data; it must not know how the text was made."""

from dataclasses import dataclass

from servekit.engine.core.request import FinishReason, RequestTimings, TokenLogprob


@dataclass(frozen=True, slots=True)
class Usage:
    """Tokens of one choice so far. `cached_tokens` of the prompt came from the prefix cache."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """A piece of one choice's answer, in order. The last one has a `finish_reason` (and `timings`), or an `error`.

    `text` may lag behind `token_ids`: bytes of an incomplete character and the start of a possible stop string are
    held. A stop token is counted in `usage` but is in neither `text`, `token_ids` nor `logprobs`. `stop_reason` is the
    stop string or token id that matched.
    """

    text: str
    usage: Usage
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    finish_reason: FinishReason | None = None
    stop_reason: int | str | None = None
    timings: RequestTimings | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SamplingDefaults:
    """The model's own sampling advice (generation_config.json); None where it has none."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
