"""What calls of functions may look like, as a grammar in Lark's form. It must not know how a grammar is enforced."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from servekit.engine.text.tool_format import ToolFormat
from servekit.server.schema import Function

JSON_OPTIONS: Mapping[str, Any] = {"whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}", "lenient": False}
"""A weak model would otherwise write white space for ever."""

_DEFINITIONS = ("$defs", "definitions")
_ANY = r"/(.|\n)*/"


def required_calls(form: ToolFormat, functions: Sequence[Function], *, parallel: bool) -> str:
    """An answer that is one call, or with `parallel` several."""
    return "\n".join([f"start: {_calls(form, parallel=parallel)}", *_rules(form, functions)])


def possible_calls(form: ToolFormat, functions: Sequence[Function]) -> str | None:
    """Any text, in which what begins like a call must be one. None where calls have no mark of their own."""
    if form.optional_begin:
        return None
    rules = _rules(form, functions)
    if form.control_id(form.begin) is not None:
        # A text never holds a control token, so the marker alone separates the two.
        return "\n".join([f"start: (text? {_calls(form, parallel=form.is_list)})* text?", f"text: {_ANY}", *rules])
    after_marker = _calls(form, parallel=form.is_list, with_begin=False)
    until_marker = f"until_marker[suffix={json.dumps(form.begin)}]: {_ANY}"
    return "\n".join([f"start: (until_marker {after_marker})* text", until_marker, f"text: {_ANY}", *rules])


def _calls(form: ToolFormat, *, parallel: bool, with_begin: bool = True) -> str:
    """Calls as they stand in an answer."""
    begin, end = (_marker(form, form.begin) if with_begin else ""), _marker(form, form.end)
    if form.is_list:
        more = '(", " call)* ' if parallel else ""
        return f'{begin} "[" call {more}"]"'
    if form.optional_begin:
        return "call" + (' ("; " call)*' if parallel else "")
    if form.style == "name_and_object":
        one = f"{begin} call"
        return f"({one})+" if parallel else one
    one = f'{begin} "\\n" call "\\n" {end}' if form.style != "key_value_tags" else f"{begin} call {end}"
    return one + (f' ("\\n" {one})*' if parallel else "")


def _rules(form: ToolFormat, functions: Sequence[Function]) -> list[str]:
    rules = ["call: " + " | ".join(f"call_{i}" for i in range(len(functions)))]
    for i, function in enumerate(functions):
        if form.style == "object":
            rules.append(f"call_{i}: {_object(form, function)}")
        elif form.style == "name_and_object":
            arguments = _json(function.parameters or {"type": "object"})
            rules.append(f"call_{i}: {json.dumps(function.name)} {_marker(form, '[ARGS]')} arguments_{i}")
            rules.append(f"arguments_{i}: {arguments}")
        else:
            rules += _tagged(form, f"call_{i}", function)
    return rules


def _object(form: ToolFormat, function: Function) -> str:
    """Name and arguments in one object, in that order. References in a schema are to its own root, so that moves."""
    arguments = function.parameters or {"type": "object"}
    shared = {key: arguments[key] for key in _DEFINITIONS if key in arguments}
    return _json(
        {
            **shared,
            "type": "object",
            "properties": {
                "name": {"const": function.name},
                form.arguments_key: {key: value for key, value in arguments.items() if key not in shared},
            },
            "required": ["name", form.arguments_key],
            "additionalProperties": False,
        }
    )


def _tagged(form: ToolFormat, rule: str, function: Function) -> Iterator[str]:
    """One rule a parameter, in the schema's order. A text is any; every other value is JSON and follows its schema."""
    schema = function.parameters or {}
    properties = schema.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = schema.get("required") or ()
    if form.style == "parameter_tags":
        head, foot = json.dumps(f"<function={function.name}>\n"), '"</function>"'
    else:
        head, foot = json.dumps(f"{function.name}\n"), ""
    names = [f"{rule}_{i}" + ("" if key in required else "?") for i, key in enumerate(properties)]
    yield f"{rule}: {head} {' '.join(names)} {foot}"
    for i, (key, kind) in enumerate(properties.items()):
        name = f"{rule}_{i}"
        before, after = _around_value(form, key)
        if isinstance(kind, Mapping) and kind.get("type") == "string" and "enum" not in kind:
            yield f"{name}: {before} {name}_text"
            yield f"{name}_text[suffix={json.dumps(after)}]: {_ANY}"
        elif isinstance(kind, Mapping) and isinstance(kind.get("enum"), list) and kind.get("type") == "string":
            texts = " | ".join(json.dumps(str(text)) for text in kind["enum"])
            yield f"{name}: {before} ({texts}) {json.dumps(after)}"
        else:
            shared = {k: schema[k] for k in _DEFINITIONS if k in schema}
            value = {**kind, **shared} if isinstance(kind, Mapping) else kind
            yield f"{name}: {before} {name}_json {json.dumps(after)}"
            yield f"{name}_json: {_json(value)}"


def _around_value(form: ToolFormat, key: str) -> tuple[str, str]:
    """What stands before a value, as a piece of a rule, and the text after it."""
    if form.style == "parameter_tags":
        return json.dumps(f"<parameter={key}>\n"), "\n</parameter>\n"
    tags = [_marker(form, tag) for tag in ("<arg_key>", "</arg_key>", "<arg_value>")]
    return f'{tags[0]} {json.dumps(key)} {tags[1]} "\\n" {tags[2]}', "</arg_value>\n"


def _json(schema: Any) -> str:
    options = {"x-guidance": JSON_OPTIONS}
    return f"%json {json.dumps({**options, **schema} if isinstance(schema, Mapping) else schema, ensure_ascii=False)}"


def _marker(form: ToolFormat, text: str) -> str:
    control_id = form.control_id(text)
    return json.dumps(text) if control_id is None else f"<[{control_id}]>"
