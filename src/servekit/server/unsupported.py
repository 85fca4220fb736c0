"""Fields that other servers of this API know and this one does not offer: refused by name, never ignored.

A value that asks for nothing (an empty tool list, plain-text output) is let through: many clients always send it.
"""

from collections.abc import Collection, Mapping
from typing import Any

from servekit.errors import UnsupportedError

HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "choice": (),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "grammar": (),
    "guided_choice": (),
    "guided_grammar": (),
    "guided_json": (),
    "guided_regex": (),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "regex": (),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "structured_outputs": (),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Field -> the values of it that change nothing."""


def refuse_unsupported(document: Mapping[str, Any], honoured: Collection[str]) -> None:
    """Raise UnsupportedError for the first field of a request body that asks for something not offered here.

    `honoured` are the fields that the route knows how to serve.
    """
    for name, value in document.items():
        harmless = HARMLESS_VALUES.get(name)
        if harmless is None or value is None or name in honoured:
            continue
        if not any(type(value) is type(allowed) and value == allowed for allowed in harmless):
            raise UnsupportedError(f"{name} is not supported with this value", hint="leave it out", param=name)
