"""`/v1/messages`: Anthropic's shape of a chat, translated to and from this server's own. No state, no images."""

import json
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from servekit.engine.core.request import FinishReason
from servekit.engine.output import Chunk, Usage
from servekit.errors import InputError, ServekitError, UnsupportedError
from servekit.server.blocks import BlockEnd, BlockEvent, BlockReader, BlockStart
from servekit.server.call import Call, CollectedChoice
from servekit.server.chat import ChatPlan
from servekit.server.counts import timings_fields
from servekit.server.errors import anthropic_error_body
from servekit.server.schema import (
    MAX_STOP_STRINGS,
    ChatBody,
    Function,
    FunctionCall,
    Message,
    StopString,
    Tool,
    ToolCall,
)
from servekit.server.shape import AnswerHead
from servekit.server.text_parts import joined_text, text_field


class AnthropicTool(Struct, kw_only=True):
    """An entry of `tools`."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    input_schema: dict[str, Any]
    description: str | None = None
    type: str | None = None


class AnthropicMessage(Struct, kw_only=True):
    """A turn: text, or blocks."""

    role: str
    content: str | list[dict[str, Any]]


class MessagesBody(Struct, kw_only=True):
    """`POST /v1/messages`."""

    model: str
    max_tokens: Annotated[int, Meta(ge=1)]
    messages: Annotated[list[AnthropicMessage], Meta(min_length=1)]
    system: str | list[dict[str, Any]] | None = None
    stop_sequences: Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    tools: list[AnthropicTool] | None = None
    tool_choice: dict[str, Any] | None = None


REFUSED: Mapping[str, tuple[Any, ...]] = {
    "container": (),
    "mcp_servers": ([],),
    "service_tier": ("auto", "standard_only"),
    "thinking": ({"type": "disabled"},),
}
"""Field -> the values that change nothing."""


def to_chat(body: MessagesBody) -> ChatBody:
    """The same request for this server's own chat. Raises InputError and UnsupportedError naming the field."""
    messages = [Message(role="system", content=_text(body.system, "system"))] if body.system else []
    for i, message in enumerate(body.messages):
        messages += _turns(message, f"messages[{i}]")
    if body.messages[-1].role == "assistant":
        raise UnsupportedError(
            "an answer that goes on from an assistant's turn is not supported",
            hint="end with a turn of the user",
            param=f"messages[{len(body.messages) - 1}].role",
        )
    choice, parallel = _tool_choice(body.tool_choice)
    return ChatBody(
        model=body.model,
        messages=messages,
        max_tokens=body.max_tokens,
        stop=body.stop_sequences,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        top_k=body.top_k,
        tools=[
            Tool(type="function", function=Function(name=t.name, description=t.description, parameters=t.input_schema))
            for t in body.tools or ()
        ],
        tool_choice=choice,
        parallel_tool_calls=parallel,
    )


def _tool_choice(given: Mapping[str, Any] | None) -> tuple[str | dict[str, Any] | None, bool]:
    if given is None:
        return None, True
    kind = given.get("type")
    parallel = given.get("disable_parallel_tool_use") is not True
    if kind == "tool":
        return {"type": "function", "function": {"name": given.get("name")}}, parallel
    known = {"auto": "auto", "any": "required", "none": "none"}
    if not isinstance(kind, str) or kind not in known:
        raise InputError("tool_choice.type must be auto, any, tool or none", param="tool_choice")
    return known[kind], parallel


def _turns(message: AnthropicMessage, path: str) -> list[Message]:
    """One turn may hold the results of several calls, which are turns of their own elsewhere."""
    if message.role not in ("user", "assistant"):
        raise InputError(f"{path}.role must be user or assistant", param=f"{path}.role")
    if isinstance(message.content, str):
        return [Message(role=message.role, content=message.content)]  # type: ignore[arg-type]  # checked above
    turns: list[Message] = []
    texts: list[str] = []
    calls: list[ToolCall] = []
    for i, block in enumerate(message.content):
        where = f"{path}.content[{i}]"
        kind = block.get("type")
        if kind == "text":
            texts.append(text_field(block, "text", where))
        elif kind == "tool_use" and message.role == "assistant":
            arguments = json.dumps(block.get("input") or {}, ensure_ascii=False)
            call = FunctionCall(name=text_field(block, "name", where), arguments=arguments)
            calls.append(ToolCall(id=text_field(block, "id", where), function=call))
        elif kind == "tool_result" and message.role == "user":
            result = _text(block.get("content") or "", f"{where}.content")
            turns.append(Message(role="tool", tool_call_id=text_field(block, "tool_use_id", where), content=result))
        else:
            raise UnsupportedError(f"{where}: a block of this type is not supported here", param=where)
    if texts or calls or not turns:
        text = "".join(texts)
        role = message.role
        turns.append(Message(role=role, content=text, tool_calls=calls or None))  # type: ignore[arg-type]
    return turns


def _text(content: Any, path: str) -> str:
    return joined_text(content, path, kinds=("text",), noun="blocks")


class MessagesPlan(ChatPlan):
    """A chat whose answer has Anthropic's shape."""

    id_prefix = "msg_"

    def shape(  # type: ignore[override]  # another shape of the same protocol
        self, head: AnswerHead, prompts: Sequence[tuple[int, ...]], *, include_usage: bool
    ) -> "MessagesShape":
        """How the answer is written."""
        return MessagesShape(head, len(prompts[0]), BlockReader(self.tools.parser() if self.tools else None))


class MessagesShape:
    """The `message` object, whole or as named events."""

    def __init__(self, head: AnswerHead, num_prompt_tokens: int, reader: BlockReader) -> None:
        self._head = head
        self._num_prompt_tokens = num_prompt_tokens
        self._reader = reader

    def opening(self, index: int) -> bytes:
        """The message without content."""
        return _event("message_start", message=self._message([], None, Usage(self._num_prompt_tokens)))

    def delta(self, index: int, chunk: Chunk) -> bytes:
        """Blocks as they grow, then why the message ended."""
        events = b"".join(map(_block_event, self._reader.push(chunk)))
        if chunk.finish_reason is not None:
            timings = {} if chunk.timings is None else {"timings": timings_fields(chunk.usage, chunk.timings)}
            events += _event("message_delta", delta=self._end(chunk), usage=_usage(chunk.usage), **timings)
        return events

    def usage(self, usage: Usage) -> bytes:
        """It has been said with the end of the message."""
        return b""

    def failed(self, error: ServekitError) -> bytes:
        """An error after the first byte."""
        return b"event: error\ndata: %s\n\n" % anthropic_error_body(error)

    def end(self, *, has_failed: bool) -> bytes:
        """The last event, unless an error was that."""
        return b"" if has_failed else _event("message_stop")

    def body(self, call: Call, choices: Sequence[CollectedChoice]) -> bytes:
        """The whole message."""
        (choice,) = choices
        self._reader.read(choice.text, is_last=True)
        content = [
            {"type": "text", "text": block.text}
            if block.name is None
            else {"type": "tool_use", "id": block.id, "name": block.name, "input": _object(block.text)}
            for block in self._reader.blocks
        ]
        message = self._message(content, choice.last, call.usage)
        if call.timings is not None:
            message["timings"] = timings_fields(call.usage, call.timings)
        return msgspec.json.encode(message)

    def _message(self, content: list[dict[str, Any]], last: Chunk | None, usage: Usage) -> dict[str, Any]:
        end = {"stop_reason": None, "stop_sequence": None} if last is None else self._end(last)
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            **end,
            "usage": _usage(usage),
        }

    def _end(self, last: Chunk) -> dict[str, Any]:
        stopped_by = last.stop_reason if isinstance(last.stop_reason, str) else None
        if last.finish_reason is FinishReason.LENGTH:
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._reader.num_calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        return {"stop_reason": "stop_sequence" if stopped_by else "end_turn", "stop_sequence": stopped_by}


def _block_event(event: BlockEvent) -> bytes:
    block = event.block
    if isinstance(event, BlockEnd):
        return _event("content_block_stop", index=event.index)
    if isinstance(event, BlockStart):
        shown: dict[str, Any] = {"type": "text", "text": ""}
        if block.name is not None:
            shown = {"type": "tool_use", "id": block.id, "name": block.name, "input": {}}
        return _event("content_block_start", index=event.index, content_block=shown)
    delta = {"type": "text_delta", "text": event.text}
    if block.name is not None:
        delta = {"type": "input_json_delta", "partial_json": event.text}
    return _event("content_block_delta", index=event.index, delta=delta)


def _event(name: str, **fields: Any) -> bytes:
    return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode({"type": name, **fields}))


def _usage(usage: Usage) -> dict[str, int]:
    """Anthropic counts cached prompt tokens apart from the others."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _object(text: str) -> dict[str, Any]:
    """The arguments of a call; those that were cut off are none."""
    try:
        value = json.loads(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
