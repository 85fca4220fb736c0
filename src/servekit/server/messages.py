"""Chat messages as the model's template takes them. It must not know the template."""

from collections.abc import Sequence
from typing import Any

import msgspec

from servekit.errors import InputError, UnsupportedError
from servekit.server.schema import ContentPart, Message, ToolCall


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """One plain dict a message: content is always text, and `developer` is the system role that templates know.

    Text parts are joined without anything between them. Raises InputError naming `messages[i].content`.
    """
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, path: str) -> dict[str, Any]:
    role = "system" if message.role == "developer" else message.role
    turn: dict[str, Any] = {"role": role, "content": _text(message, f"{path}.content")}
    if message.name is not None:
        turn["name"] = message.name
    if message.tool_call_id is not None:
        turn["tool_call_id"] = message.tool_call_id
    if message.tool_calls:
        if role != "assistant":
            raise InputError(f"a message of role {role} cannot hold tool calls", param=f"{path}.tool_calls")
        turn["tool_calls"] = [_tool_call(call) for call in message.tool_calls]
    return turn


def _text(message: Message, path: str) -> str:
    content = message.content
    if content is None:
        if message.role == "assistant" and message.tool_calls:
            return ""
        raise InputError(f"a message of role {message.role} needs content", param=path)
    if isinstance(content, str):
        return content
    return "".join(_part_text(part, f"{path}[{i}]") for i, part in enumerate(content))


def _part_text(part: ContentPart, path: str) -> str:
    if part.type != "text":
        raise UnsupportedError("only text parts are supported", param=path)
    if part.text is None:
        raise InputError("a text part needs text", param=f"{path}.text")
    return part.text


def _tool_call(call: ToolCall) -> dict[str, Any]:
    """Templates print arguments as JSON, so they get the object; what is no object goes through as it is."""
    arguments: Any = call.function.arguments
    try:
        decoded = msgspec.json.decode(call.function.arguments)
    except (msgspec.DecodeError, RecursionError):
        decoded = None
    if isinstance(decoded, dict):
        arguments = decoded
    turn: dict[str, Any] = {"type": call.type, "function": {"name": call.function.name, "arguments": arguments}}
    return turn if call.id is None else {"id": call.id, **turn}
