"""Tokens and milliseconds of an answer, in the shapes that clients read. It must not know where they were counted."""

from collections.abc import Sequence
from typing import Any

from servekit.engine.core.request import RequestTimings
from servekit.engine.output import Usage


def usage_fields(usage: Usage) -> dict[str, Any]:
    """The `usage` object; the cached tokens are always in it, zero included."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
    }


def total_usage(choices: Sequence[Usage], choices_per_prompt: int) -> Usage:
    """One request's tokens: each prompt counts once, by its first choice, and every choice's answer counts."""
    prompts = choices[::choices_per_prompt]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in prompts),
        completion_tokens=sum(usage.completion_tokens for usage in choices),
        cached_tokens=sum(usage.cached_tokens for usage in prompts),
    )


def longest_timings(choices: Sequence[RequestTimings]) -> RequestTimings:
    """One request's times: its choices run side by side, so the longest of each; preemptions add up."""
    return RequestTimings(
        queue=max(timings.queue for timings in choices),
        prefill=max(timings.prefill for timings in choices),
        decode=max(timings.decode for timings in choices),
        num_preemptions=sum(timings.num_preemptions for timings in choices),
        mean_batch_size=max(timings.mean_batch_size for timings in choices),
    )


def timings_fields(usage: Usage, timings: RequestTimings, num_choices: int = 1) -> dict[str, Any]:
    """The `timings` object: llama.cpp's names, `queue_ms`, `preemptions`, `mean_batch_size`. A rate without time is 0.

    Prefill ends with each choice's first token, so decode time stands for all the tokens but these.
    """
    prompt_n = usage.prompt_tokens - usage.cached_tokens
    decoded_n = max(usage.completion_tokens - num_choices, 0)
    prompt_ms, predicted_ms = timings.prefill * 1e3, timings.decode * 1e3
    return {
        "queue_ms": _round(timings.queue * 1e3),
        "preemptions": timings.num_preemptions,
        "mean_batch_size": _round(timings.mean_batch_size),
        "cache_n": usage.cached_tokens,
        "prompt_n": prompt_n,
        "prompt_ms": _round(prompt_ms),
        "prompt_per_token_ms": _ratio(prompt_ms, prompt_n),
        "prompt_per_second": _ratio(prompt_n * 1e3, prompt_ms),
        "predicted_n": usage.completion_tokens,
        "predicted_ms": _round(predicted_ms),
        "predicted_per_token_ms": _ratio(predicted_ms, decoded_n),
        "predicted_per_second": _ratio(decoded_n * 1e3, predicted_ms),
    }


def _ratio(over: float, under: float) -> float:
    return _round(over / under) if under > 0 else 0.0


def _round(value: float) -> float:
    return round(value, 3)
