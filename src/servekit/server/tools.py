"""Which functions a chat may call, and how it is held to that. It must not know how a call is parsed or sent."""

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from servekit.engine.core.request import GrammarSpec
from servekit.engine.text.tool_format import ToolFormat
from servekit.errors import InputError, UnsupportedError
from servekit.server.call_grammar import possible_calls, required_calls
from servekit.server.call_text import CallParser
from servekit.server.schema import ChatBody, Tool
from servekit.server.structured import grammar_of
from servekit.server.tagged_calls import TaggedCallParser
from servekit.server.tool_calls import ToolCallParser

MAX_TOOLS = 128


class Tools:
    """The functions of one request that may be called, and whether one must be. Raises InputError, UnsupportedError.

    `shown` is what the template gets. `check` compiles if and only if the schemas are right. `grammar` holds an answer
    to calls, or to calls that follow their schemas where it makes any, if it can be held to that (`can_be_held`).
    """

    def __init__(
        self, tools: Sequence[Tool], choice: str | dict[str, Any], *, parallel: bool, form: ToolFormat
    ) -> None:
        self.shown: list[dict[str, Any]] = [_template_tool(tool) for tool in tools]
        self.is_required = choice != "auto"
        self._form = form
        self._parallel = parallel
        self._callable = [tool.function for tool in tools]
        if isinstance(choice, dict):
            wanted = _chosen_name(choice)
            self._callable = [function for function in self._callable if function.name == wanted]
            if not self._callable:
                raise InputError("tool_choice names a function that is not in tools", param="tool_choice")
            self._parallel = False
        for function in self._callable:
            _check_references(function.parameters or {})
        grammar = required_calls(form, self._callable, parallel=self._parallel)
        # Other styles say less about values than their schemas, and a text of any kind hides a call that cannot be.
        as_object = form if form.style == "object" else ToolFormat("object", "<", ">")
        check = grammar if form is as_object else required_calls(as_object, self._callable, parallel=False)
        self.check = GrammarSpec("lark", check, "tools")
        if not self.is_required:
            grammar = possible_calls(form, self._callable) or grammar
        self.can_be_held = self.is_required or not form.optional_begin
        self.grammar = GrammarSpec("lark", grammar, "tools")

    @property
    def shows_control(self) -> bool:
        """Whether control tokens must come as text, because they are the markers of a call."""
        return bool(self._form.control_ids)

    def parser(self) -> CallParser:
        """A fresh parser for one choice."""
        if self._form.style != "object":
            schemas = {function.name: function.parameters for function in self._callable}
            return TaggedCallParser(self._form, schemas, only_one=not self._parallel)
        names = frozenset(function.name for function in self._callable)
        return ToolCallParser(self._form, names, only_one=not self._parallel)


def tools_of(body: ChatBody, form: ToolFormat | None) -> Tools | None:
    """The body's tools, or None where none may be called. Raises InputError and UnsupportedError."""
    choice = body.tool_choice if body.tool_choice is not None else "auto"
    if isinstance(choice, str) and choice not in ("none", "auto", "required"):
        raise InputError("tool_choice must be none, auto, required or a function", param="tool_choice")
    if not body.tools:
        if choice not in ("none", "auto"):
            raise InputError("tool_choice asks for a call, but there are no tools", param="tool_choice")
        return None
    if len(body.tools) > MAX_TOOLS:
        raise InputError(f"{len(body.tools)} tools are more than {MAX_TOOLS}", param="tools")
    names = [tool.function.name for tool in body.tools]
    if len(set(names)) < len(names):
        raise InputError("two tools have the same name", param="tools")
    if choice == "none":
        return None
    if form is None:
        raise UnsupportedError("this model's chat template shows no form of tool calls that is known", param="tools")
    if choice != "auto" and grammar_of(body, body.response_format) is not None:
        raise InputError("a call cannot be required together with another form", param="tool_choice")
    return Tools(body.tools, choice, parallel=body.parallel_tool_calls is not False, form=form)


def _chosen_name(choice: dict[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InputError("a named tool_choice is an object with type and function.name", param="tool_choice")
    return name


def _check_references(schema: Mapping[str, Any]) -> None:
    """Refuse a schema that is a reference to itself: it compiles, and no value satisfies it."""
    seen, place = set[str](), schema
    while isinstance(reference := place.get("$ref"), str) and reference.startswith("#/"):
        if reference in seen:
            raise InputError("tools: a $ref in a schema leads to itself", param="tools")
        seen.add(reference)
        found: Any = schema
        for key in reference.removeprefix("#/").split("/"):
            found = found.get(key) if isinstance(found, Mapping) else None
        if not isinstance(found, Mapping):
            return
        place = found


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = {name: value for name, value in msgspec.to_builtins(tool.function).items() if value is not None}
    function.pop("strict", None)
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": function}
