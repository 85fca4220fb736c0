"""Fields that other servers of this API know and this one does not offer: refused by name, never ignored.

A value that asks for nothing (an empty function list) is let through: many clients always send it.
"""

from collections.abc import Mapping
from typing import Any

from servekit.errors import UnsupportedError

HARMLESS_VALUES: Mapping[str, tuple[Any, ...]] = {
    "add_generation_prompt": (True,),
    "add_special_tokens": (True,),
    "audio": (),
    "best_of": (1,),
    "chat_template": (),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "documents": ([],),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "include_stop_str_in_output": (False,),
    "json_schema": (),
    "length_penalty": (1, 1.0),
    "modalities": (["text"],),
    "prediction": (),
    "prompt_logprobs": (),
    "reasoning_effort": (),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "truncate_prompt_tokens": (),
    "use_beam_search": (False,),
    "verbosity": ("medium",),
    "web_search_options": (),
}
"""Field -> the values of it that change nothing."""


def refuse_unsupported(document: Mapping[str, Any], table: Mapping[str, tuple[Any, ...]]) -> None:
    """Raise UnsupportedError for the first field of a request body that asks for something not offered here.

    `table` maps such fields to the values of them that ask for nothing.
    """
    for name, value in document.items():
        harmless = table.get(name)
        if harmless is None or value is None:
            continue
        if not any(type(value) is type(allowed) and value == allowed for allowed in harmless):
            raise UnsupportedError(f"{name} is not supported with this value", hint="leave it out", param=name)
