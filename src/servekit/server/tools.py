"""Which functions a chat may call, and how it is held to that. It must not know how a call is parsed or sent."""

import json
from collections.abc import Sequence
from typing import Any

import msgspec

from servekit.engine.core.request import GrammarSpec
from servekit.engine.text.tool_format import ToolFormat
from servekit.errors import InputError, UnsupportedError
from servekit.server.schema import ChatBody, Tool
from servekit.server.tool_calls import ToolCallParser

MAX_TOOLS = 128
_JSON_OPTIONS = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}", "lenient": False}


class Tools:
    """The functions of one request that may be called, and whether one must be. Raises InputError, UnsupportedError.

    `shown` is what the template gets. `grammar` holds the answer to calls where one must be made; otherwise it is only
    compiled, so that a wrong schema is refused.
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
        self.grammar = GrammarSpec("lark", self._lark(), "tools")

    @property
    def shows_control(self) -> bool:
        """Whether control tokens must come as text, because they are the markers of a call."""
        return bool(self._form.control_ids)

    def parser(self) -> ToolCallParser:
        """A fresh parser for one choice."""
        names = frozenset(function.name for function in self._callable)
        return ToolCallParser(self._form, names, only_one=not self._parallel)

    def _lark(self) -> str:
        """One call or several, as the format spells them; the schema of the arguments belongs to the name."""
        form = self._form
        calls = [
            {
                "type": "object",
                "properties": {"name": {"const": f.name}, form.arguments_key: f.parameters or {"type": "object"}},
                "required": ["name", form.arguments_key],
                "additionalProperties": False,
            }
            for f in self._callable
        ]
        schemas = [json.dumps({"x-guidance": _JSON_OPTIONS, **call}, ensure_ascii=False) for call in calls]
        rules = [f"call_{i}: %json {schema}" for i, schema in enumerate(schemas)]
        rules.append("call: " + " | ".join(f"call_{i}" for i in range(len(schemas))))
        begin, end = self._marker(form.begin), self._marker(form.end)
        if form.is_list:
            more = '(", " call)* ' if self._parallel else ""
            start = f'start: {begin} "[" call {more}"]"'
        elif form.optional_begin:
            start = "start: call" + (' ("; " call)*' if self._parallel else "")
        else:
            one = f'{begin} "\\n" call "\\n" {end}'
            start = f"start: {one}" + (f' ("\\n" {one})*' if self._parallel else "")
        return "\n".join([start, *rules])

    def _marker(self, text: str) -> str:
        control_id = self._form.control_id(text)
        return json.dumps(text) if control_id is None else f"<[{control_id}]>"


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
    if choice != "auto" and (body.response_format or body.grammar or body.regex or body.choice):
        raise InputError("a call cannot be required together with another form", param="tool_choice")
    return Tools(body.tools, choice, parallel=body.parallel_tool_calls is not False, form=form)


def _chosen_name(choice: dict[str, Any]) -> str:
    function = choice.get("function")
    name = function.get("name") if isinstance(function, dict) else None
    if choice.get("type") != "function" or not isinstance(name, str):
        raise InputError("a named tool_choice is an object with type and function.name", param="tool_choice")
    return name


def _template_tool(tool: Tool) -> dict[str, Any]:
    function = {name: value for name, value in msgspec.to_builtins(tool.function).items() if value is not None}
    function.pop("strict", None)
    function.setdefault("parameters", {"type": "object", "properties": {}})
    return {"type": "function", "function": function}
