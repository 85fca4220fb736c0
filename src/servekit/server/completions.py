"""`/v1/completions`: what its body means to the engine, and what its answer looks like."""

from collections.abc import Sequence
from typing import Any

import msgspec

from servekit.engine.core.request import SamplingParams, TokenLogprob
from servekit.engine.output import Chunk, Usage
from servekit.errors import InputError, UnsupportedError
from servekit.server.call import Call, CollectedChoice
from servekit.server.logprobs import CompletionLogprobs
from servekit.server.params import sampling_params
from servekit.server.schema import MAX_CHOICES, CompletionBody
from servekit.server.shape import AnswerHead, EventWriter, OpenAIEnds, whole_body
from servekit.server.state import EngineFacade
from servekit.server.structured import grammar_of

DEFAULT_MAX_TOKENS = 16
"""OpenAI's default on this route (its API reference, `max_tokens`)."""

Prompt = str | tuple[int, ...]


class CompletionPlan:
    """One completion request, validated: its prompts, its sampling, and the shape of its answer. Raises InputError."""

    id_prefix = "cmpl-"
    prompt_param = "prompt"
    continues_text = True
    shows_control = False

    def __init__(self, body: CompletionBody, engine: EngineFacade) -> None:
        if body.echo and body.logprobs is not None:
            raise UnsupportedError(
                "echo with logprobs needs log-probabilities of the prompt, which are not computed", param="echo"
            )
        self._body = body
        self._engine = engine
        self._prompts = _prompts(body.prompt)
        self._choices_per_prompt = body.n or 1
        if len(self._prompts) * self._choices_per_prompt > MAX_CHOICES:
            raise InputError(
                f"{len(self._prompts)} prompts with {self._choices_per_prompt} choices each are more than "
                f"{MAX_CHOICES} choices",
                param="prompt",
            )
        self.params: SamplingParams = sampling_params(
            body,
            engine.defaults,
            max_tokens=DEFAULT_MAX_TOKENS if body.max_tokens is None else body.max_tokens,
            logprobs=body.logprobs,
            grammar=grammar_of(body, body.response_format),
        )

    async def encode(self) -> list[tuple[int, ...]]:
        """Each prompt's token ids; those given as ids are taken as they are."""
        return [await self._engine.encode_text(p) if isinstance(p, str) else p for p in self._prompts]

    def shape(self, head: AnswerHead, prompts: Sequence[tuple[int, ...]], *, include_usage: bool) -> "CompletionShape":
        """How the answer is written: one row for every choice of every prompt."""
        rows = [
            CompletionRow(
                echo=self._text(given) if self._body.echo else "",
                prompt_token_ids=token_ids if self._body.return_token_ids else None,
                logprobs=CompletionLogprobs(self._engine.tokenizer) if self._body.logprobs is not None else None,
            )
            for given, token_ids in zip(self._prompts, prompts, strict=True)
            for _ in range(self._choices_per_prompt)
        ]
        return CompletionShape(head, rows, include_usage=include_usage)

    def _text(self, prompt: Prompt) -> str:
        if isinstance(prompt, str):
            return prompt
        return b"".join(map(self._engine.tokenizer.token_bytes, prompt)).decode("utf-8", errors="replace")


class CompletionRow:
    """What one choice shows beside its text; None is not shown. `echo` stands before the text."""

    def __init__(
        self, echo: str, prompt_token_ids: tuple[int, ...] | None, logprobs: CompletionLogprobs | None
    ) -> None:
        self.echo = echo
        self.prompt_token_ids = prompt_token_ids
        self._logprobs = logprobs

    @property
    def shows_tokens(self) -> bool:
        """Whether a token without text of its own must be shown."""
        return self._logprobs is not None or self.prompt_token_ids is not None

    def logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        """The lists for the next tokens of this choice."""
        return None if self._logprobs is None else self._logprobs.fields(logprobs)


class CompletionShape(OpenAIEnds):
    """The `text_completion` shape, one row a choice."""

    def __init__(self, head: AnswerHead, rows: Sequence[CompletionRow], *, include_usage: bool) -> None:
        self._head = head
        self._rows = rows
        self._writer = EventWriter(head, "text_completion", include_usage=include_usage)

    def opening(self, index: int) -> bytes:
        """The echoed prompt and its token ids, where they were asked for."""
        row = self._rows[index]
        if not row.echo and row.prompt_token_ids is None:
            return b""
        choice: dict[str, Any] = {"index": index, "text": row.echo, "logprobs": None, "finish_reason": None}
        if row.prompt_token_ids is not None:
            choice["prompt_token_ids"] = row.prompt_token_ids
        return self._writer.event(msgspec.json.encode(choice))

    def delta(self, index: int, chunk: Chunk) -> bytes:
        """The new text, then the finish with an empty text."""
        row = self._rows[index]
        events = b""
        if chunk.text or (chunk.token_ids and row.shows_tokens):
            choice = b"".join(
                (
                    b'{"index":%d,"text":' % index,
                    msgspec.json.encode(chunk.text),
                    b',"logprobs":',
                    msgspec.json.encode(row.logprobs(chunk.logprobs)),
                    b',"finish_reason":null',
                    b"" if row.prompt_token_ids is None else b',"token_ids":' + msgspec.json.encode(chunk.token_ids),
                    b"}",
                )
            )
            events = self._writer.event(choice)
        if chunk.finish_reason is not None:
            finish = {
                "index": index,
                "text": "",
                "logprobs": None,
                "finish_reason": chunk.finish_reason,
                "stop_reason": chunk.stop_reason,
            }
            events += self._writer.finish(msgspec.json.encode(finish), chunk)
        return events

    def usage(self, usage: Usage) -> bytes:
        """The event with the token counts."""
        return self._writer.usage(usage)

    def body(self, call: Call, choices: Sequence[CollectedChoice]) -> bytes:
        """The `text_completion` object."""
        rows = [self._choice(index, row, choices[index]) for index, row in enumerate(self._rows)]
        return whole_body(self._head, "text_completion", call, rows)

    def _choice(self, index: int, row: CompletionRow, choice: CollectedChoice) -> dict[str, Any]:
        fields: dict[str, Any] = {
            "index": index,
            "text": row.echo + choice.text,
            "logprobs": row.logprobs(choice.logprobs),
            "finish_reason": choice.last.finish_reason,
            "stop_reason": choice.last.stop_reason,
        }
        if row.prompt_token_ids is not None:
            fields["prompt_token_ids"] = row.prompt_token_ids
            fields["token_ids"] = choice.token_ids
        return fields


def _prompts(given: str | list[str | int | list[int]]) -> list[Prompt]:
    """One prompt or several. Raises InputError for a list of mixed kinds."""
    if isinstance(given, str):
        return [given]
    if all(isinstance(item, str) for item in given):
        return [item for item in given if isinstance(item, str)]
    if all(isinstance(item, int) for item in given):
        return [tuple(item for item in given if isinstance(item, int))]
    if all(isinstance(item, list) for item in given):
        return [tuple(item) for item in given if isinstance(item, list)]
    raise InputError("a list of prompts is all strings, all token ids or all lists of token ids", param="prompt")
