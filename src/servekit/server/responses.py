"""`/v1/responses`: OpenAI's newer shape, translated to and from the chat. Nothing is stored between requests."""

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct

from servekit.engine.core.request import FinishReason
from servekit.engine.output import Chunk, Usage
from servekit.errors import InputError, ServekitError, UnsupportedError
from servekit.server.blocks import Block, BlockEnd, BlockEvent, BlockReader, BlockStart
from servekit.server.call import Call, CollectedChoice
from servekit.server.chat import ChatPlan
from servekit.server.counts import timings_fields
from servekit.server.errors import error_fields
from servekit.server.schema import ChatBody, Function, FunctionCall, Message, Tool, ToolCall
from servekit.server.shape import AnswerHead
from servekit.server.state import EngineFacade
from servekit.server.text_parts import joined_text, text_field

_TEXT_PARTS = ("input_text", "output_text", "text")
_ROLES = ("system", "developer", "user", "assistant")

REFUSED: Mapping[str, tuple[Any, ...]] = {
    "background": (False,),
    "conversation": (),
    "include": ([],),
    "max_tool_calls": (),
    "previous_response_id": (),
    "prompt": (),
    "reasoning": ({},),
    "service_tier": ("auto", "default"),
    "store": (False,),
    "stream_options": ({}, {"include_obfuscation": False}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
"""Field -> the values that change nothing."""


class ResponseTool(Struct, kw_only=True):
    """An entry of `tools`; only functions are offered."""

    type: str
    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class TextSettings(Struct, kw_only=True):
    """`text.format` is what the chat calls response_format."""

    format: dict[str, Any] | None = None
    verbosity: str | None = None


class ResponsesBody(Struct, kw_only=True):
    """`POST /v1/responses`."""

    input: str | Annotated[list[dict[str, Any]], Meta(min_length=1)]
    model: str | None = None
    instructions: str | None = None
    max_output_tokens: Annotated[int, Meta(ge=1)] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    tools: list[ResponseTool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: TextSettings | None = None
    metadata: dict[str, Any] | None = None
    user: str | None = None


def to_chat(body: ResponsesBody) -> ChatBody:
    """The same request for the chat. Raises InputError and UnsupportedError naming the field."""
    messages = [Message(role="system", content=body.instructions)] if body.instructions else []
    if isinstance(body.input, str):
        messages.append(Message(role="user", content=body.input))
    else:
        for i, item in enumerate(body.input):
            _add_item(messages, item, f"input[{i}]")
    for i, tool in enumerate(body.tools or ()):
        if tool.type != "function":
            raise UnsupportedError("only function tools are supported", param=f"tools[{i}].type")
    if body.text is not None and body.text.verbosity not in (None, "medium"):
        raise UnsupportedError("text.verbosity is not supported", param="text.verbosity")
    return ChatBody(
        model=body.model,
        messages=messages,
        max_tokens=body.max_output_tokens,
        stream=body.stream,
        temperature=body.temperature,
        top_p=body.top_p,
        tools=[
            Tool(type="function", function=Function(name=t.name, description=t.description, parameters=t.parameters))
            for t in body.tools or ()
        ],
        tool_choice=_tool_choice(body.tool_choice),
        parallel_tool_calls=body.parallel_tool_calls,
        response_format=_format(body.text.format if body.text is not None else None),
    )


def _tool_choice(given: str | dict[str, Any] | None) -> str | dict[str, Any] | None:
    if isinstance(given, dict) and "name" in given:
        return {"type": given.get("type"), "function": {"name": given["name"]}}
    return given


def _format(given: dict[str, Any] | None) -> dict[str, Any] | None:
    """The chat keeps a schema one level deeper."""
    if given is None or given.get("type") != "json_schema":
        return given
    return {"type": "json_schema", "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _add_item(messages: list[Message], item: Mapping[str, Any], path: str) -> None:
    kind = item.get("type", "message")
    if kind == "message":
        if item.get("role") not in _ROLES:
            raise InputError(f"{path}.role must be one of {', '.join(_ROLES)}", param=f"{path}.role")
        messages.append(Message(role=item["role"], content=_text(item.get("content"), f"{path}.content")))
    elif kind == "function_call":
        call = FunctionCall(name=text_field(item, "name", path), arguments=text_field(item, "arguments", path))
        made = ToolCall(id=text_field(item, "call_id", path), function=call)
        last = messages[-1] if messages else None
        if last is not None and last.role == "assistant":
            last.tool_calls = [*(last.tool_calls or ()), made]
        else:
            messages.append(Message(role="assistant", content="", tool_calls=[made]))
    elif kind == "function_call_output":
        output = _text(item.get("output"), f"{path}.output")
        messages.append(Message(role="tool", tool_call_id=text_field(item, "call_id", path), content=output))
    else:
        raise UnsupportedError(f"{path}: an item of this type is not supported here", param=f"{path}.type")


def _text(content: Any, path: str) -> str:
    return joined_text(content, path, kinds=_TEXT_PARTS, noun="parts")


class ResponsesPlan(ChatPlan):
    """A chat whose answer is a response object; `asked` is repeated in it."""

    id_prefix = "resp_"
    prompt_param = "input"

    def __init__(self, asked: ResponsesBody, engine: EngineFacade) -> None:
        super().__init__(to_chat(asked), engine)
        self._asked = asked

    def shape(  # type: ignore[override]  # another shape of the same protocol
        self, head: AnswerHead, prompts: Sequence[tuple[int, ...]], *, include_usage: bool
    ) -> "ResponsesShape":
        """How the answer is written."""
        asked = {
            "instructions": self._asked.instructions,
            "max_output_tokens": self._asked.max_output_tokens,
            "metadata": self._asked.metadata or {},
            "parallel_tool_calls": self._asked.parallel_tool_calls is not False,
            "temperature": self.params.temperature,
            "top_p": self.params.top_p,
            "tool_choice": self._asked.tool_choice or "auto",
            "tools": msgspec.to_builtins(self._asked.tools or []),
            "text": {"format": (self._asked.text and self._asked.text.format) or {"type": "text"}},
            "previous_response_id": None,
            "store": False,
            "truncation": "disabled",
        }
        return ResponsesShape(head, asked, BlockReader(self.tools.parser() if self.tools else None))


class ResponsesShape:
    """The `response` object, whole or as numbered, named events."""

    def __init__(self, head: AnswerHead, asked: dict[str, Any], reader: BlockReader) -> None:
        self._head = head
        self._asked = asked
        self._reader = reader
        self._num_events = 0
        self._is_cut = False

    def opening(self, index: int) -> bytes:
        """The response without output."""
        response = self._response("in_progress", None, None)
        return self._event("response.created", response=response) + self._event(
            "response.in_progress", response=response
        )

    def delta(self, index: int, chunk: Chunk) -> bytes:
        """Items as they grow, then the whole response."""
        self._is_cut = chunk.finish_reason is FinishReason.LENGTH
        events = b"".join(map(self._block_events, self._reader.push(chunk)))
        if chunk.finish_reason is not None:
            status = _status(chunk)
            timings = None if chunk.timings is None else timings_fields(chunk.usage, chunk.timings)
            response = self._response(status, chunk.usage, None, timings)
            events += self._event(f"response.{status}", response=response)
        return events

    def usage(self, usage: Usage) -> bytes:
        """It has been said with the whole response."""
        return b""

    def failed(self, error: ServekitError) -> bytes:
        """An error after the first byte."""
        return self._event("response.failed", response=self._response("failed", None, error))

    def end(self, *, has_failed: bool) -> bytes:
        """The last event was the whole response."""
        return b""

    def body(self, call: Call, choices: Sequence[CollectedChoice]) -> bytes:
        """The whole response."""
        (choice,) = choices
        self._reader.read(choice.text, is_last=True)
        self._is_cut = choice.last.finish_reason is FinishReason.LENGTH
        timings = None if call.timings is None else timings_fields(call.usage, call.timings)
        return msgspec.json.encode(self._response(_status(choice.last), call.usage, None, timings))

    def _response(
        self,
        status: str,
        usage: Usage | None,
        error: ServekitError | None,
        timings: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        fields = None if error is None else error_fields(error)
        response = {
            "id": self._head.id,
            "object": "response",
            "created_at": self._head.created,
            "status": status,
            "error": None if fields is None else {"code": fields["code"], "message": fields["message"]},
            "incomplete_details": {"reason": "max_output_tokens"} if status == "incomplete" else None,
            "model": self._head.model,
            "output": [self._item(i, block, self._item_status(i)) for i, block in enumerate(self._reader.blocks)],
            "usage": None if usage is None else _usage(usage),
            **self._asked,
        }
        return response if timings is None else {**response, "timings": timings}

    def _item_status(self, index: int) -> str:
        """Of an item that has ended: where an answer is cut, only its last item is."""
        return "incomplete" if self._is_cut and index == len(self._reader.blocks) - 1 else "completed"

    def _item(self, index: int, block: Block, status: str, *, is_open: bool = False) -> dict[str, Any]:
        if block.name is None:
            content = [] if is_open else [_part(block.text)]
            item_id = self._item_id(index, block)
            return {"id": item_id, "type": "message", "status": status, "role": "assistant", "content": content}
        return {
            "id": self._item_id(index, block),
            "type": "function_call",
            "status": status,
            "call_id": block.id,
            "name": block.name,
            "arguments": "" if is_open else block.text,
        }

    def _item_id(self, index: int, block: Block) -> str:
        kind = "msg" if block.name is None else "fc"
        return f"{kind}_{self._head.id.removeprefix(ResponsesPlan.id_prefix)}_{index}"

    def _block_events(self, event: BlockEvent) -> bytes:
        block, index = event.block, event.index
        item_id = self._item_id(index, block)
        where: dict[str, Any] = {"item_id": item_id, "output_index": index}
        is_text = block.name is None
        if is_text:
            where["content_index"] = 0
        if isinstance(event, BlockStart):
            item = self._item(index, block, "in_progress", is_open=True)
            events = self._event("response.output_item.added", output_index=index, item=item)
            return events + self._event("response.content_part.added", **where, part=_part("")) if is_text else events
        if isinstance(event, BlockEnd):
            if is_text:
                events = self._event("response.output_text.done", **where, text=block.text, logprobs=[])
                events += self._event("response.content_part.done", **where, part=_part(block.text))
            else:
                done = {**where, "name": block.name, "arguments": block.text}
                events = self._event("response.function_call_arguments.done", **done)
            item = self._item(index, block, self._item_status(index))
            return events + self._event("response.output_item.done", output_index=index, item=item)
        if is_text:
            return self._event("response.output_text.delta", **where, delta=event.text, logprobs=[])
        return self._event("response.function_call_arguments.delta", **where, delta=event.text)

    def _event(self, name: str, /, **fields: Any) -> bytes:
        data = {"type": name, "sequence_number": self._num_events, **fields}
        self._num_events += 1
        return b"event: %s\ndata: %s\n\n" % (name.encode(), msgspec.json.encode(data))


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _status(last: Chunk) -> str:
    return "incomplete" if last.finish_reason is FinishReason.LENGTH else "completed"


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }
