"""The request bodies this server honours, field by field. It must not know what a field does.

Every optional field may be null, which means absent. A constraint stands here only where no engine type holds it:
ranges of sampling values belong to SamplingParams. `user` and `metadata` describe the request to the client's own
systems; they are accepted and change nothing.
"""

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

from servekit.engine.core.request import MAX_TOP_LOGPROBS

MAX_CHOICES = 64
"""Most choices one request may ask for, over all its prompts."""

MAX_STOP_STRINGS = 16

MAX_STOP_CHARS = 1024
"""Of one stop string: every choice keeps a table as long as each of them."""

MAX_LOGIT_BIAS = 1024
"""Tokens that one request may bias."""

MAX_SALT_CHARS = 256
"""The last prompts are remembered with their salts."""

_Int64 = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
"""What tensors and other languages can hold; JSON itself has no limit."""

StopString = Annotated[str, Meta(max_length=MAX_STOP_CHARS)]

_TopLogprobs = Annotated[int, Meta(ge=0, le=MAX_TOP_LOGPROBS)]


class StreamOptions(Struct, kw_only=True):
    """`include_usage` adds one last chunk with the token counts."""

    include_usage: bool | None = None


class StructuredOutputs(Struct, kw_only=True, forbid_unknown_fields=True):
    """vLLM's holder of one form of the answer."""

    json: str | dict[str, Any] | bool | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


class GenerationBody(Struct, kw_only=True):
    """The fields that both generating routes share. `guided_` and `structured_outputs` are vLLM's names for a form."""

    model: str | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: list[int] | None = None
    max_tokens: _Int64 | None = None
    min_tokens: _Int64 | None = None
    ignore_eos: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: _Int64 | None = None
    min_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None
    logit_bias: Annotated[dict[str, float], Meta(max_length=MAX_LOGIT_BIAS)] | None = None
    seed: int | None = None
    priority: _Int64 | None = None
    cache_salt: Annotated[str, Meta(max_length=MAX_SALT_CHARS)] | None = None
    return_token_ids: bool | None = None
    grammar: str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: str | dict[str, Any] | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    user: str | None = None
    metadata: dict[str, Any] | None = None


class ContentPart(Struct, kw_only=True):
    """One part of a message's content."""

    type: str
    text: str | None = None


class FunctionCall(Struct, kw_only=True):
    """A call a model made earlier: `arguments` is JSON text."""

    name: str
    arguments: str


class ToolCall(Struct, kw_only=True):
    """An earlier answer's call, replayed as history."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"


class Message(Struct, kw_only=True):
    """One turn of a conversation."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None


class TokenizeBody(Struct, kw_only=True):
    """`POST /tokenize`: one of `prompt`, `content` (the same) and `messages`."""

    model: str | None = None
    prompt: str | None = None
    content: str | None = None
    messages: Annotated[list[Message], Meta(min_length=1)] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class DetokenizeBody(Struct, kw_only=True):
    """`POST /detokenize`."""

    tokens: list[_Int64]
    model: str | None = None


class Function(Struct, kw_only=True):
    """A function that the model may call; `parameters` is a JSON schema. It is enforced, `strict` or not."""

    name: Annotated[str, Meta(pattern=r"^[a-zA-Z0-9_.-]{1,64}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Struct, kw_only=True):
    """An entry of `tools`."""

    type: Literal["function"]
    function: Function


class ChatBody(GenerationBody, kw_only=True):
    """`POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: _TopLogprobs | None = None
    tools: list[Tool] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None


class CompletionBody(GenerationBody, kw_only=True):
    """`POST /v1/completions`. A list of prompts is all strings, all token ids (one prompt) or all lists of them."""

    prompt: str | Annotated[list[str | int | list[int]], Meta(min_length=1)]
    echo: bool | None = None
    logprobs: _TopLogprobs | None = None
