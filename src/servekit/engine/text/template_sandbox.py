"""A Jinja environment for templates that come with a model and are not trusted. It must not know what a chat is.

On top of Jinja's ImmutableSandboxedEnvironment (no underscore attributes, no mutation, ranges up to 100,000) every
render has a budget of characters and of processor time. What is charged:

- output, captured blocks and macros, `+`, `*`, `~`, `%`, and the results of filters and calls;
- before they run, the operations whose result can be much larger than their arguments: repetition, joining, replacing,
  padding, formatting, indenting, printing of nested values;
- each turn of a loop, with the literal text of its body; time is looked at there too.

Powers and products are limited to 4,096 bits. Filters that only lay out text for people are left out. Not covered is a
comparison of two nested lists that were built to be slow: it is one operation to Python.
"""

import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jinja2 import nodes
from jinja2.compiler import CodeGenerator, Frame
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import pass_context

MAX_CHARS = 32 << 20
MAX_OUTPUT_CHARS = 8 << 20
MAX_SECONDS = 1.0
_MAX_BITS = 4096
_MAX_WIDTH = 1000
_ELEMENT_COST = 16
_LEFT_OUT = ("center", "wordwrap", "batch", "slice", "urlize", "xmlattr", "pprint", "filesizeformat", "random")
_PADDING = frozenset({"center", "ljust", "rjust", "zfill"})
# Filters that take lists and mappings apart; all others print what they get.
_PICKING = ("attr", "count", "d", "default", "dictsort", "first", "groupby", "items", "last", "length", "list", "map")
_CHOOSING = ("max", "min", "reject", "rejectattr", "reverse", "select", "selectattr", "sort", "sum", "unique")
_STRUCTURAL = frozenset({*_PICKING, *_CHOOSING})
# What ensure_ascii escapes; the noncharacters that mark client text must stay what they are.
_ESCAPED = re.compile("[^\x00-\x7f\ufdd0-\ufdef]")
# A width of four digits or more, one taken from an argument, or a field inside a format specification.
_WIDE_PRINTF = re.compile(r"%[^%a-zA-Z]*(?:\*|\d{4,})")
_WIDE_FORMAT = re.compile(r"\{[^{}]*:[^{}]*(?:\{|\d{4,})")


class TemplateLimitError(SecurityError):
    """A render used up its budget, or asked for something that would."""


class _Budget:
    """What one render may still spend."""

    __slots__ = ("_chars", "_deadline", "_ticks")

    def __init__(self) -> None:
        self._chars = MAX_CHARS
        self._ticks = 0
        # Time of this thread alone: a busy machine must not fail an innocent template.
        self._deadline = time.thread_time() + MAX_SECONDS

    def charge(self, chars: int) -> None:
        self._chars -= max(chars, 0) + 1
        if self._chars < 0:
            raise TemplateLimitError(f"it makes more than {MAX_CHARS} characters")
        self._ticks += 1
        if self._ticks % 64 == 0 and time.thread_time() > self._deadline:
            raise TemplateLimitError(f"it runs for more than {MAX_SECONDS:g} s")

    def charge_value(self, value: Any) -> None:
        """Charge a value as it would be printed; shared parts count each time, as they are printed each time."""
        pending = [value]
        while pending:
            item = pending.pop()
            if isinstance(item, str):
                self.charge(len(item))
                continue
            self.charge(_ELEMENT_COST)
            if isinstance(item, Mapping):
                pending.extend(item.keys())
                pending.extend(item.values())
            elif isinstance(item, list | tuple | set | frozenset):
                pending.extend(item)

    def charge_result(self, value: Any) -> None:
        if isinstance(value, str):
            self.charge(len(value))
        elif isinstance(value, list | tuple | dict | set):
            self.charge(_ELEMENT_COST * len(value))


class _BudgetContext(Context):
    """A context with one budget for the whole render."""

    budget: _Budget

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.budget = _Budget()

    def derived(self, locals: dict[str, Any] | None = None) -> Context:
        context = super().derived(locals)
        assert isinstance(context, _BudgetContext)
        context.budget = self.budget
        return context


class _CodeGenerator(CodeGenerator):
    """Routes `~` through the environment; Jinja lets a sandbox intercept the arithmetic operators only."""

    def visit_Concat(self, node: nodes.Concat, frame: Frame) -> None:
        self.write("environment.concatenate(context, (")
        for part in node.nodes:
            self.visit(part, frame)
            self.write(", ")
        self.write("))")


class _Generation(Extension):
    """`{% generation %}` marks the assistant's text for training; here its body is plain output in its own scope."""

    tags = {"generation"}  # noqa: RUF012 - declared by Jinja as an instance variable

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        return nodes.Scope(parser.parse_statements(("name:endgeneration",), drop_needle=True), lineno=line)


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """The environment chat templates are written for (that of transformers), with budgets."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})
    code_generator_class = _CodeGenerator
    context_class = _BudgetContext

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols], finalize=_finalize
        )
        del self.globals["lipsum"]
        for name in _LEFT_OUT:
            del self.filters[name]
        self.filters["tojson"] = _to_json
        self.filters = {name: _charged(name, function) for name, function in self.filters.items()}
        self.filters["format"] = _format
        self.filters["bounded"] = _bounded

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        for loop in source.find_all(nodes.For):
            text = sum(len(data.data) for data in loop.find_all(nodes.TemplateData))
            cost = nodes.Const(text, lineno=loop.lineno)
            loop.iter = nodes.Filter(loop.iter, "bounded", [cost], [], None, None, lineno=loop.lineno)
            loop.set_environment(self)
        return super()._generate(source, *args, **kwargs)

    def concatenate(self, context: _BudgetContext, parts: tuple[Any, ...]) -> str:
        """The operator `~`."""
        context.budget.charge_value(parts)
        return "".join(map(str, parts))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        budget = _budget(context)
        if operator == "*":
            for sequence, times in ((left, right), (right, left)):
                if isinstance(sequence, str | list | tuple) and isinstance(times, int):
                    each = 1 if isinstance(sequence, str) else _ELEMENT_COST
                    budget.charge(each * len(sequence) * times)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length() + right.bit_length() if operator == "*" else left.bit_length() * abs(right)
            if bits > _MAX_BITS:
                raise TemplateLimitError("it computes a number of more than 4,096 bits")
        if operator == "%" and isinstance(left, str):
            if _WIDE_PRINTF.search(left):
                raise TemplateLimitError(f"it formats a field wider than {_MAX_WIDTH - 1}")
            _charge_format(budget, left, "%", right if isinstance(right, tuple) else (right,))
        if operator == "+" and isinstance(left, str | list | tuple) and isinstance(right, str | list | tuple):
            each = 1 if isinstance(left, str) else _ELEMENT_COST
            budget.charge(each * (len(left) + len(right)))
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None and _WIDE_FORMAT.search(value.__self__):
            raise TemplateLimitError(f"it formats a field wider than {_MAX_WIDTH - 1}")
        return wrapped

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(__context)
        method = getattr(__obj, "__wrapped__", __obj)
        text = getattr(method, "__self__", None)
        if isinstance(text, str):
            args = _charge_method(budget, text, method.__name__, args, kwargs)
        elif isinstance(__obj, LoopContext) and args:
            args = (_bounded(__context, args[0], 0), *args[1:])
        result = super().call(__context, __obj, *args, **kwargs)
        budget.charge_result(result)
        return result


def _budget(context: Context) -> _Budget:
    assert isinstance(context, _BudgetContext)
    return context.budget


@pass_context
def _finalize(context: Context, value: Any) -> Any:
    _budget(context).charge_value(value)
    return value


@pass_context
def _bounded(context: Context, values: Iterable[Any], cost: int) -> Iterator[Any]:
    """The items of a loop, each charged with the literal text that one turn writes."""
    budget = _budget(context)
    for value in values:
        budget.charge(cost)
        yield value


@pass_context
def _format(context: Context, text: Any, *args: Any, **kwargs: Any) -> Any:
    environment = context.environment
    assert isinstance(environment, TemplateSandbox)
    return environment.call_binop(context, "%", str(text), kwargs or args)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    # Jinja's own escapes HTML, which no model was trained on.
    text = json.dumps(value, ensure_ascii=False, indent=indent, separators=separators, sort_keys=sort_keys)
    return _ESCAPED.sub(lambda match: json.dumps(match[0])[1:-1], text) if ensure_ascii else text


def _charged(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """A filter with its cost; Jinja marks filters that want the context or environment as first argument."""
    wants = getattr(getattr(function, "jinja_pass_arg", None), "name", None)

    @pass_context
    def call(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(context)
        if isinstance(value, str):
            args = _charge_method(budget, value, name, args, kwargs)
        elif name == "join":
            value = list(value)
            separator = str(args[0] if args else kwargs.get("d", ""))
            budget.charge_value(value)
            budget.charge(len(separator) * len(value))
        elif name not in _STRUCTURAL:
            budget.charge_value(value)
        if name in ("indent", "tojson"):
            _limit_indent(budget, value, args, kwargs)
        first = {"context": context, "eval_context": context.eval_ctx, "environment": context.environment}
        result = function(first[wants], value, *args, **kwargs) if wants else function(value, *args, **kwargs)
        budget.charge_result(result)
        return result

    return call


def _charge_method(
    budget: _Budget, text: str, name: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Any, ...]:
    """Charge a method or filter on a string before it runs; an iterator among the arguments is read out."""
    if name in _PADDING and args:
        budget.charge(int(args[0]))
    elif name == "expandtabs":
        budget.charge(len(text) * int(args[0] if args else kwargs.get("tabsize", 8)))
    elif name == "replace":
        texts = [str(arg) for arg in (*args, *kwargs.values())][:2]
        if len(texts) == 2:
            budget.charge(max(text.count(texts[0]) * len(texts[1]), text.count(texts[1]) * len(texts[0])))
    elif name == "join" and args and isinstance(args[0], Iterable) and not isinstance(args[0], str):
        parts = list(args[0])
        budget.charge_value(parts)
        budget.charge(len(text) * len(parts))
        args = (parts, *args[1:])
    elif name in ("join", "translate"):
        budget.charge(len(text) * (1 + sum(len(str(arg)) for arg in (*args, *kwargs.values()))))
    elif name in ("format", "format_map"):
        _charge_format(budget, text, "{", (*args, *kwargs.values()))
    budget.charge(len(text))
    return args


def _charge_format(budget: _Budget, text: str, mark: str, values: Iterable[Any]) -> None:
    widest = max((len(value) for value in values if isinstance(value, str)), default=0)
    for value in values:
        budget.charge_value(value)
    budget.charge(len(text) + text.count(mark) * widest)


def _limit_indent(budget: _Budget, value: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    for width in (*args, *kwargs.values()):
        size = len(width) if isinstance(width, str) else width if isinstance(width, int) else 0
        if size > _MAX_WIDTH:
            raise TemplateLimitError(f"it indents by more than {_MAX_WIDTH}")
        if isinstance(value, str):
            budget.charge(size * (1 + value.count("\n")))
