"""Render a conversation into the model's prompt text. It must not know token ids.

The template is the model's own Jinja source, run in TemplateSandbox. Messages arrive as the API's dictionaries and are
brought to the form that templates are written for; a system message that the template refuses is folded into the first
user message.
"""

import json
import logging
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, meta

from servekit.engine.text.template_sandbox import MAX_OUTPUT_CHARS, TemplateLimitError, TemplateSandbox
from servekit.errors import InputError, ModelError, UnsupportedError

_MAX_SOURCE_CHARS = 256 << 10
_RESERVED = ("messages", "tools", "documents", "add_generation_prompt")

_logger = logging.getLogger(__name__)

Message = dict[str, Any]


class ChatTemplate:
    """One compiled chat template; `special_tokens` are the variables bos_token, eos_token and so on.

    Safe to use from several threads. Raises ModelError when the source cannot be compiled.
    """

    def __init__(self, source: str, special_tokens: Mapping[str, str]) -> None:
        if len(source) > _MAX_SOURCE_CHARS:
            raise ModelError(f"the model's chat template has {len(source)} characters; at most {_MAX_SOURCE_CHARS} run")
        self.source = source
        self._special_tokens = dict(special_tokens)
        environment = TemplateSandbox()
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template: Template = environment.from_string(source)
            variables = meta.find_undeclared_variables(environment.parse(source))
        except (TemplateError, RecursionError, SyntaxError, ValueError, TypeError) as error:
            raise ModelError(f"the model's chat template cannot be compiled: {error}") from error
        self.supports_tools = "tools" in variables
        self._told_of_folding = False

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt text of normalised messages.

        Raises InputError with the template's own words when it refuses the conversation, naming the first message it
        refuses where that can be told, and when it runs past its budget.
        """
        for name in variables:
            if name in _RESERVED or name in self._special_tokens:
                raise InputError(f"{name} is set by the server", param="chat_template_kwargs")
        if tools and not self.supports_tools:
            raise UnsupportedError("this model's chat template takes no tools", param="tools")
        variables |= {"tools": list(tools) if tools else None, "add_generation_prompt": add_generation_prompt}
        try:
            return self._run(messages, variables)
        except TemplateLimitError as error:
            _refuse(error, "messages")
        except TemplateError as error:
            folded = _fold_system(messages)
            if folded is None:
                _refuse(error, self._first_refused(messages, variables))
        try:
            text = self._run(folded, variables)
        except TemplateError as error:
            _refuse(error, "messages")
        if not self._told_of_folding:
            self._told_of_folding = True
            _logger.info("the chat template takes no system message; system text goes into the first user message")
        return text

    def _run(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        pieces, size = [], 0
        try:
            for piece in self._template.generate(
                messages=list(messages), documents=None, **self._special_tokens, **variables
            ):
                pieces.append(piece)
                size += len(piece)
                if size > MAX_OUTPUT_CHARS:
                    raise TemplateLimitError(f"it writes more than {MAX_OUTPUT_CHARS} characters")
        except TemplateError:
            raise
        except Exception as error:
            # A template is a program: whatever it can raise, it must not look like a fault of the server.
            raise TemplateError(f"{type(error).__name__}: {error}") from error
        return "".join(pieces)

    def _first_refused(self, messages: Sequence[Message], variables: Mapping[str, Any]) -> str:
        """The first message without which the rest before it renders, by bisection."""
        passes, fails = 0, len(messages)
        while fails - passes > 1:
            middle = (passes + fails) // 2
            try:
                self._run(messages[:middle], variables)
                passes = middle
            except TemplateError:
                fails = middle
        return f"messages[{fails - 1}]" if messages else "messages"


def load_chat_template(directory: Path, tokenizer_config: Mapping[str, Any]) -> str | None:
    """The source of the model's chat template, or None.

    chat_template.jinja comes first, then `chat_template` of tokenizer_config.json; of several named ones that with
    tools, else the default. Raises ModelError for a file that is not UTF-8 text.
    """
    file = directory / "chat_template.jinja"
    if file.is_file():
        try:
            with open(file, encoding="utf-8") as opened:
                return opened.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ModelError(f"chat_template.jinja cannot be read: {error}") from error
    stated = tokenizer_config.get("chat_template")
    if isinstance(stated, list):
        named = {entry.get("name"): entry.get("template") for entry in stated if isinstance(entry, dict)}
        stated = named.get("tool_use") or named.get("default")
    return stated if isinstance(stated, str) else None


def normalise_messages(messages: Sequence[Mapping[str, Any]]) -> list[Message]:
    """API messages as templates expect them, as new dictionaries.

    Content that is null or absent becomes "", text parts are joined, other null fields go, and a tool call's arguments
    become the object that their JSON text stands for. Raises UnsupportedError for content that is not text, InputError
    for malformed fields; both name the message.
    """
    return [_normalise(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalise(message: Mapping[str, Any], where: str) -> Message:
    result: Message = {key: value for key, value in message.items() if value is not None}
    result["content"] = _text(message.get("content"), f"{where}.content")
    if "tool_calls" in result:
        calls = result["tool_calls"]
        if not isinstance(calls, list):
            raise InputError("tool_calls must be a list", param=f"{where}.tool_calls")
        result["tool_calls"] = [
            _with_parsed_arguments(call, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)
        ]
    return result


def _text(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InputError("content must be a string or a list of parts", param=where)
    texts = []
    for index, part in enumerate(content):
        kind = part.get("type") if isinstance(part, Mapping) else None
        if kind != "text":
            raise UnsupportedError(f"content parts of type {kind!r} are not read, only text", param=f"{where}[{index}]")
        if not isinstance(part.get("text"), str):
            raise InputError("a text part must hold a string", param=f"{where}[{index}].text")
        texts.append(part["text"])
    return "".join(texts)


def _with_parsed_arguments(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        raise InputError("a tool call must hold a function", param=where)
    arguments = function.get("arguments")
    if not isinstance(arguments, str):
        return dict(call)
    try:
        parsed = json.loads(arguments) if arguments.strip() else {}
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"the arguments of a tool call must be JSON: {error}", param=f"{where}.function.arguments"
        ) from error
    return {**call, "function": {**function, "arguments": parsed}}


def _fold_system(messages: Sequence[Message]) -> list[Message] | None:
    """The messages with leading system text put before the first user's, or None when there is nothing to fold."""
    num_system = next((i for i, message in enumerate(messages) if message.get("role") != "system"), len(messages))
    rest = [dict(message) for message in messages[num_system:]]
    if num_system == 0 or not rest or rest[0].get("role") != "user":
        return None
    texts = [*(message["content"] for message in messages[:num_system]), rest[0]["content"]]
    rest[0]["content"] = "\n\n".join(text for text in texts if text)
    return rest


def _refuse(error: TemplateError, param: str) -> NoReturn:
    raise InputError(f"the model's chat template refuses this conversation: {error}", param=param) from error


def _raise_exception(message: str) -> NoReturn:
    raise TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)
