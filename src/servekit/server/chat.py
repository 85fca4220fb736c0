"""`/v1/chat/completions`: what its body means to the engine, and what its answer looks like."""

import contextlib
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from servekit.engine.core.request import SamplingParams, TokenLogprob
from servekit.engine.output import Chunk, Usage
from servekit.errors import InputError, UnsupportedError
from servekit.server.call import Call, CollectedChoice
from servekit.server.logprobs import chat_logprobs
from servekit.server.messages import template_messages
from servekit.server.params import sampling_params
from servekit.server.schema import ChatBody
from servekit.server.shape import AnswerHead, EventWriter, OpenAIEnds, whole_body
from servekit.server.state import EngineFacade, TokenNames
from servekit.server.structured import grammar_of
from servekit.server.tool_deltas import ChoiceDeltas, whole_message
from servekit.server.tools import Tools, tools_of


class ChatPlan:
    """One chat request, validated: its prompt, its sampling, and the shape of its answer. Raises InputError."""

    id_prefix = "chatcmpl-"
    prompt_param = "messages"
    continues_text = False

    def __init__(self, body: ChatBody, engine: EngineFacade) -> None:
        if body.top_logprobs is not None and not body.logprobs:
            raise InputError("top_logprobs needs logprobs: true", param="top_logprobs")
        self.body = body
        self._engine = engine
        self._messages = template_messages(body.messages)
        self.tools = tools_of(body, engine.tool_format if body.tools else None)
        self.shows_control = self.tools is not None and self.tools.shows_control
        grammar = grammar_of(body, body.response_format)
        if self.tools is not None and self.tools.is_required:
            grammar = self.tools.grammar
        self.params: SamplingParams = sampling_params(
            body,
            engine.defaults,
            max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
            logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            grammar=grammar,
        )

    async def encode(self) -> list[tuple[int, ...]]:
        """The one prompt's token ids."""
        if self.tools is None:
            return [await self._engine.encode_chat(self._messages)]
        if self.tools.is_required:
            await self._engine.compile_grammar(self.tools.check)
        else:
            await self._hold_to_schemas(self.tools)
        return [await self._engine.encode_chat(self._messages, self.tools.shown)]

    async def _hold_to_schemas(self, tools: Tools) -> None:
        """Let calls that the model makes follow their schemas, unless something else says what the answer looks like.

        A keyword that cannot be enforced is no fault where the model is free; a wrong schema is.
        """
        with contextlib.suppress(UnsupportedError):
            await self._engine.compile_grammar(tools.check)
            is_free = self.params.grammar is None and not self.params.ignore_eos and not self.params.min_tokens
            if is_free and tools.can_be_held:
                await self._engine.compile_grammar(tools.grammar)
                self.params = replace(self.params, grammar=tools.grammar)

    def shape(self, head: AnswerHead, prompts: Sequence[tuple[int, ...]], *, include_usage: bool) -> "ChatShape":
        """How the answer is written."""
        return ChatShape(
            head,
            prompts[0] if self.body.return_token_ids else None,
            self._engine.tokenizer if self.body.logprobs else None,
            self.tools,
            include_usage=include_usage,
        )


class ChatShape(OpenAIEnds):
    """The chat shape. `prompt_token_ids` None leaves out all token ids, `names` None all log-probabilities.

    With `tools`, an answer's text is read for calls of functions.
    """

    def __init__(
        self,
        head: AnswerHead,
        prompt_token_ids: tuple[int, ...] | None,
        names: TokenNames | None,
        tools: Tools | None = None,
        *,
        include_usage: bool,
    ) -> None:
        self._head = head
        self._prompt_token_ids = prompt_token_ids
        self._names = names
        self._tools = tools
        self._calls: dict[int, ChoiceDeltas] = {}
        self._writer = EventWriter(head, "chat.completion.chunk", include_usage=include_usage)

    def opening(self, index: int) -> bytes:
        """The event that names the role."""
        choice = b'{"index":%d,"delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}' % index
        if self._prompt_token_ids is not None and index == 0:
            return self._writer.event(choice, prompt_token_ids=self._prompt_token_ids)
        return self._writer.event(choice)

    def delta(self, index: int, chunk: Chunk) -> bytes:
        """The new content, then the finish with an empty delta."""
        if self._tools is not None:
            return self._tool_delta(index, chunk, self._tools)
        events = b""
        if chunk.text or (chunk.token_ids and (self._names or self._prompt_token_ids is not None)):
            choice = b"".join(
                (
                    b'{"index":%d,"delta":{"content":' % index,
                    msgspec.json.encode(chunk.text),
                    b'},"logprobs":',
                    msgspec.json.encode(self._logprobs(chunk.logprobs)) if self._names else b"null",
                    b',"finish_reason":null',
                    b"" if self._prompt_token_ids is None else b',"token_ids":' + msgspec.json.encode(chunk.token_ids),
                    b"}",
                )
            )
            events = self._writer.event(choice)
        if chunk.finish_reason is not None:
            events += self._finish(index, chunk, chunk.finish_reason)
        return events

    def _tool_delta(self, index: int, chunk: Chunk, tools: Tools) -> bytes:
        """As `delta`, with the text taken apart. Log-probabilities and ids go with the first event of a chunk."""
        choice_deltas = self._calls.setdefault(index, ChoiceDeltas(tools.parser()))
        deltas = choice_deltas.push(chunk.text, is_last=chunk.finish_reason is not None)
        if not deltas and chunk.token_ids and (self._names or self._prompt_token_ids is not None):
            deltas = [{"content": ""}]
        events = b""
        for i, delta in enumerate(deltas):
            choice: dict[str, Any] = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
            if i == 0:
                choice["logprobs"] = self._logprobs(chunk.logprobs)
                if self._prompt_token_ids is not None:
                    choice["token_ids"] = chunk.token_ids
            events += self._writer.event(msgspec.json.encode(choice))
        if chunk.finish_reason is not None:
            events += self._finish(index, chunk, choice_deltas.finish_reason(chunk.finish_reason))
        return events

    def _finish(self, index: int, chunk: Chunk, reason: str) -> bytes:
        finish = {
            "index": index,
            "delta": {},
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": chunk.stop_reason,
        }
        return self._writer.finish(msgspec.json.encode(finish), chunk)

    def usage(self, usage: Usage) -> bytes:
        """The event with the token counts."""
        return self._writer.usage(usage)

    def body(self, call: Call, choices: Sequence[CollectedChoice]) -> bytes:
        """The `chat.completion` object."""
        rows = [self._choice(index, choice) for index, choice in enumerate(choices)]
        if self._prompt_token_ids is None:
            return whole_body(self._head, "chat.completion", call, rows)
        return whole_body(self._head, "chat.completion", call, rows, prompt_token_ids=self._prompt_token_ids)

    def _choice(self, index: int, choice: CollectedChoice) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": choice.text}
        reason: str | None = choice.last.finish_reason
        if self._tools is not None and choice.last.finish_reason is not None:
            message, reason = whole_message(self._tools.parser(), choice.text, choice.last.finish_reason)
        row: dict[str, Any] = {
            "index": index,
            "message": message,
            "logprobs": self._logprobs(choice.logprobs),
            "finish_reason": reason,
            "stop_reason": choice.last.stop_reason,
        }
        if self._prompt_token_ids is not None:
            row["token_ids"] = choice.token_ids
        return row

    def _logprobs(self, logprobs: Sequence[TokenLogprob]) -> dict[str, Any] | None:
        return None if self._names is None else chat_logprobs(logprobs, self._names)
