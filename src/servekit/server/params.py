"""From the fields of a request body to the engine's SamplingParams. It must not know HTTP or the shape of an answer."""

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

from servekit.engine.core.request import GrammarSpec, SamplingParams
from servekit.engine.output import SamplingDefaults
from servekit.errors import InputError
from servekit.server.schema import GenerationBody

N = TypeVar("N", int, float)

_OFF = SamplingParams()


def sampling_params(
    body: GenerationBody,
    defaults: SamplingDefaults,
    *,
    max_tokens: int | None,
    logprobs: int | None,
    grammar: GrammarSpec | None,
) -> SamplingParams:
    """What the body asks for, else what the model advises, else off.

    `top_k` -1 is off as well, as other servers have it. Raises InputError naming the field.
    """
    return SamplingParams(
        temperature=_first(body.temperature, defaults.temperature, _OFF.temperature),
        top_p=_first(body.top_p, defaults.top_p, _OFF.top_p),
        top_k=_first(0 if body.top_k == -1 else body.top_k, defaults.top_k, _OFF.top_k),
        min_p=_first(body.min_p, defaults.min_p, _OFF.min_p),
        max_tokens=max_tokens,
        min_tokens=_first(body.min_tokens, None, _OFF.min_tokens),
        stop=_stop_strings(body.stop),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        seed=body.seed,
        ignore_eos=bool(body.ignore_eos),
        logprobs=logprobs,
        presence_penalty=_first(body.presence_penalty, None, _OFF.presence_penalty),
        frequency_penalty=_first(body.frequency_penalty, None, _OFF.frequency_penalty),
        repetition_penalty=_first(body.repetition_penalty, defaults.repetition_penalty, _OFF.repetition_penalty),
        logit_bias=_logit_bias(body.logit_bias or {}),
        grammar=grammar,
    )


def for_choice(params: SamplingParams, index: int) -> SamplingParams:
    """The params of choice `index` of n: a given seed moves on by one a choice, so they differ and can be repeated."""
    return params if params.seed is None or index == 0 else replace(params, seed=params.seed + index)


def _first(asked: N | None, advised: N | None, default: N) -> N:
    if asked is not None:
        return asked
    return advised if advised is not None else default


def _stop_strings(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(given: Mapping[str, float]) -> dict[int, float]:
    for key in given:
        if not (key.isascii() and key.isdigit() and len(key) <= 10):
            raise InputError("the keys of logit_bias must be token ids", param="logit_bias")
    return {int(key): bias for key, bias in given.items()}
