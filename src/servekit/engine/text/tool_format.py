"""How a family of models spells a call of a function in its text. It must not know requests or how a call is parsed.

A format is read off the model's own chat template, which must spell earlier calls as the model spells new ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

CallStyle = Literal["object", "name_and_object", "parameter_tags", "key_value_tags"]
"""What stands between the markers of a call:

- `object`: a JSON object with the name and the arguments.
- `name_and_object`: the name, `[ARGS]`, and the arguments as a JSON object (Mistral since 2025).
- `parameter_tags`: `<function=NAME>`, one `<parameter=KEY>` with its value each, `</function>` (Qwen3-Coder).
- `key_value_tags`: the name, then `<arg_key>` and `<arg_value>` in turn (GLM).
"""


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """How one call is written.

    `begin` stands before a call, or before the first of a list, and `end` after it; "" where there is none. In style
    `object` the arguments are under `arguments_key`, and `separators` may stand around an object.
    `optional_begin` may be left out at the start of an answer. `inner` are the markers within a call.
    `control_ids` are the control tokens among the markers: they are no part of an answer's text unless it is asked for.
    """

    name: str
    begin: str
    end: str
    arguments_key: str = "arguments"
    separators: str = " \n\r\t"
    style: CallStyle = "object"
    inner: tuple[str, ...] = ()
    is_list: bool = False
    optional_begin: bool = False
    control_ids: tuple[tuple[str, int], ...] = ()

    def control_id(self, marker: str) -> int | None:
        """The token id of a marker that is a control token."""
        return dict(self.control_ids).get(marker)


_GLM_TAGS = ("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>")
_FORMATS: tuple[tuple[str, ToolFormat], ...] = (
    ("<function=", ToolFormat("qwen3_coder", "<tool_call>", "</tool_call>", style="parameter_tags")),
    ("<arg_key>", ToolFormat("glm", "<tool_call>", "</tool_call>", style="key_value_tags", inner=_GLM_TAGS)),
    ("[ARGS]", ToolFormat("mistral_args", "[TOOL_CALLS]", "", style="name_and_object", inner=("[CALL_ID]", "[ARGS]"))),
    ("<tool_call>", ToolFormat("hermes", "<tool_call>", "</tool_call>")),
    ("[TOOL_CALLS]", ToolFormat("mistral", "[TOOL_CALLS]", "]", separators=" \n\r\t,", is_list=True)),
    (
        '"parameters": ',
        ToolFormat("llama3", "<|python_tag|>", "", "parameters", separators=" \n\r\t;,", optional_begin=True),
    ),
)
"""Formats by the sign that only their templates have; the first whose sign is there."""


def tool_format_of(template: str, control_id: Callable[[str], int | None]) -> ToolFormat | None:
    """The format that a chat template writes, or None. `control_id` names a spelling's control token, if it is one."""
    for sign, tool_format in _FORMATS:
        if sign in template:
            markers = (tool_format.begin, tool_format.end, *tool_format.inner)
            found = [(marker, i) for marker in markers if marker and (i := control_id(marker)) is not None]
            return replace(tool_format, control_ids=tuple(found))
    return None
