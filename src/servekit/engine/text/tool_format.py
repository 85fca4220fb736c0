"""How a family of models spells a call of a function in its text. It must not know requests or how a call is parsed.

A format is read off the model's own chat template, which must spell earlier calls as the model spells new ones.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace


@dataclass(frozen=True, slots=True)
class ToolFormat:
    """One call is a JSON object with `name` and `arguments_key`.

    `begin` stands before a call, or before the first of a list, and `end` after it; "" where there is none.
    `separators` may stand around an object. `optional_begin` may be left out at the start of an answer.
    `control_ids` are the control tokens among the markers: they are no part of an answer's text unless it is asked for.
    """

    name: str
    begin: str
    end: str
    arguments_key: str
    separators: str
    is_list: bool = False
    optional_begin: bool = False
    control_ids: tuple[tuple[str, int], ...] = ()

    def control_id(self, marker: str) -> int | None:
        """The token id of a marker that is a control token."""
        return dict(self.control_ids).get(marker)


_FORMATS = (
    ToolFormat("hermes", "<tool_call>", "</tool_call>", "arguments", " \n\r\t"),
    ToolFormat("mistral", "[TOOL_CALLS]", "]", "arguments", " \n\r\t,", is_list=True),
    ToolFormat("llama3", "<|python_tag|>", "", "parameters", " \n\r\t;,", optional_begin=True),
)
_SIGNS = {"hermes": "<tool_call>", "mistral": "[TOOL_CALLS]", "llama3": '"parameters": '}


def tool_format_of(template: str, control_id: Callable[[str], int | None]) -> ToolFormat | None:
    """The format that a chat template writes, or None. `control_id` names a spelling's control token, if it is one."""
    for tool_format in _FORMATS:
        if _SIGNS[tool_format.name] in template:
            markers = [(m, i) for m in (tool_format.begin, tool_format.end) if m and (i := control_id(m)) is not None]
            return replace(tool_format, control_ids=tuple(markers))
    return None
