import contextlib
import resource
from pathlib import Path
from typing import Any

import pytest
from jinja2.exceptions import SecurityError, TemplateError

from servekit.engine.text import template_sandbox
from servekit.engine.text.template_sandbox import TemplateLimitError, TemplateSandbox

MESSAGES = [{"role": "user", "content": "one two"}, {"role": "assistant", "content": "three"}]


def render(source: str, **variables: Any) -> str:
    return TemplateSandbox().from_string(source).render(messages=MESSAGES, **variables)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (
            "{% for m in messages %}{{ loop.index }}/{{ loop.length }} {{ m.role }};{% endfor %}",
            "1/2 user;2/2 assistant;",
        ),
        ("{% for m in messages if m.role == 'user' %}{{ m.content }}{{ loop.last }}{% endfor %}", "one twoTrue"),
        ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% endfor %}", "assistant"),
        ("{% for x in [] %}{% else %}none{% endfor %}", "none"),
        ("{% for k, v in {'a': 1}.items() %}{{ k ~ '=' ~ v }}{% endfor %}", "a=1"),
        ("{{ 'a' + 'b' * 3 + '%s-%d' % ('x', 7) }}", "abbbx-7"),
        ("{{ '{:>4}|'.format('x') }}{{ '%03d'|format(7) }}", "   x|007"),
        ("{{ messages|map(attribute='role')|join(', ') }}", "user, assistant"),
        ("{{ {'a': '<é>', 'b': [1, none]}|tojson }}", '{"a": "<é>", "b": [1, null]}'),
        ("{{ ['é😀\\n']|tojson(ensure_ascii=true) }}", '["\\u00e9\\ud83d\\ude00\\n"]'),
        ("{{ {'a': 1}|tojson(indent=2) }}", '{\n  "a": 1\n}'),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}{{ ns.n }}", "2"),
        ("{% macro tag(x) %}[{{ x }}]{% endmacro %}{{ tag('a') }}{{ tag('b')|upper }}", "[a][B]"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}", "three"),
        ("{% set x %}a{{ 1 }}{% endset %}{{ x ~ x }}", "a1a1"),
        (
            "{{ 'a,b'.split(',')[1] }}{{ ' x '.strip() }}{{ 'aXa'.replace('X', '--') }}{{ 'ab'|replace('a', 'c') }}",
            "bxa--acb",
        ),
        (
            "{% for x in [[1, [2]]] recursive %}{% if x is iterable %}({{ loop(x) }}){% else %}{{ x }}{% endif %}"
            "{% endfor %}",
            "(1(2))",
        ),
        ("{{ missing }}{{ messages[9] is defined }}{{ 7 % 4 }}{{ 2 ** 10 }}", "False31024"),
        ("  {% if true %}\n  x\n  {% endif %}\n", "  x\n"),
    ],
)
def test_ordinary_templates_render_as_usual(source: str, expected: str) -> None:
    assert render(source) == expected


def test_text_for_people_is_not_offered() -> None:
    for source in ("{{ lipsum() }}", "{{ 'a'|center(9) }}", "{{ 'a'|wordwrap(1) }}", "{{ [1]|batch(2, 'x')|list }}"):
        with pytest.raises(TemplateError):
            render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__ }}",
        "{{ ''['__class__'] }}",
        "{{ (''|attr('__class__')) }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ cycler.__init__.__globals__ }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({}) }}",
        "{{ self.__init__ }}",
    ],
)
def test_nothing_behind_the_values_can_be_reached(source: str) -> None:
    # Jinja gives an undefined value, which prints as nothing and raises when it is used.
    with contextlib.suppress(SecurityError):
        assert render(source) == ""
    with pytest.raises(SecurityError):
        render(source.replace(" }}", ".x }}"))


def test_the_known_escape_makes_no_file(tmp_path: Path) -> None:
    marker = tmp_path / "pwn"
    source = (
        "{% for c in ''.__class__.__mro__[1].__subclasses__() %}{% if c.__name__ == '_wrap_close' %}"
        f"{{{{ c.__init__.__globals__['system']('touch {marker}') }}}}{{% endif %}}{{% endfor %}}"
    )
    with pytest.raises(SecurityError):
        render(source)
    assert not marker.exists()


DOUBLING = "{% set ns = namespace(s='aaaaaaaa') %}{% for i in range(60) %}STEP{% endfor %}"

BOMBS = [
    "{{ 'a' * 10**9 }}",
    "{{ 10**9 * 'a' }}",
    "{{ [1] * 10**9 }}",
    "{{ 10 ** (10 ** 7) }}",
    "{% set ns = namespace(n=3) %}{% for i in range(60) %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    DOUBLING.replace("STEP", "{% set ns.s = ns.s + ns.s %}"),
    DOUBLING.replace("STEP", "{% set ns.s = ns.s ~ ns.s %}"),
    DOUBLING.replace("STEP", "{% set ns.s = [ns.s, ns.s]|join %}"),
    DOUBLING.replace("STEP", "{% set ns.s = ''.join([ns.s, ns.s]) %}"),
    DOUBLING.replace("STEP", "{% set ns.s = '%s%s' % (ns.s, ns.s) %}"),
    DOUBLING.replace("STEP", "{% set ns.s = '{0}{0}'.format(ns.s) %}"),
    DOUBLING.replace("STEP", "{% set ns.s = ns.s.replace('a', 'aa') %}"),
    DOUBLING.replace("STEP", "{% set ns.s = ns.s|replace('a', 'aa') %}"),
    DOUBLING.replace("STEP", "{% set ns.s %}{{ ns.s }}{{ ns.s }}{% endset %}"),
    DOUBLING.replace("STEP", "{% set ns.s = [ns.s, ns.s] %}") + "{{ ns.s }}",
    DOUBLING.replace("STEP", "{% set ns.s = [ns.s, ns.s] %}") + "{{ ns.s|string }}",
    DOUBLING.replace("STEP", "{% set ns.s = [ns.s, ns.s] %}") + "{{ ns.s|tojson }}",
    DOUBLING.replace("STEP", "{% set ns.s = {'a': ns.s, 'b': ns.s} %}") + "{{ ns.s ~ '' }}",
    "{% macro twice(s) %}{{ s }}{{ s }}{% endmacro %}" + DOUBLING.replace("STEP", "{% set ns.s = twice(ns.s) %}"),
    "{% for i in range(10**9) %}x{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}x{% endfor %}{% endfor %}",
    "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + "y" * 10_000 + "{% endfor %}{% endset %}",
    "{% for i in range(9) recursive %}{{ loop(range(99999)) }}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}",
    "{% set ns = namespace(l=[]) %}{% for i in range(9999) %}{% set ns.l = ns.l + [range(99999)|list] %}{% endfor %}",
    "{{ 'a'.center(10**9) }}",
    "{{ 'a'.ljust(10**9) }}",
    "{{ '7'.zfill(10**9) }}",
    "{{ '\t'.expandtabs(10**9) }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '%0999999999d'|format(1) }}",
    "{{ '{:1000000000}'.format(1) }}",
    "{{ '{:{}}'.format(1, 1000000000) }}",
    "{{ 'a'|indent(10**9, true) }}",
    "{{ [1]|tojson(indent=10**9) }}",
    "{{ ('x' * 10**6)|replace('x', 'y' * 10**6) }}",
    "{{ range(99999)|join('x' * 10**6) }}",
    "{{ ['a']|map('center', 10**9)|list }}",
]


@pytest.mark.parametrize("source", BOMBS)
def test_bombs_end_within_their_budget(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.1)
    template = TemplateSandbox().from_string(source)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises((TemplateError, OverflowError, RecursionError)):
        template.render(messages=MESSAGES)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200 * 1024


def test_each_render_has_a_budget_of_its_own() -> None:
    template = TemplateSandbox().from_string("{{ 'a' * n }}")
    for _ in range(10):
        assert len(template.render(n=10_000_000)) == 10_000_000
    with pytest.raises(TemplateLimitError, match="characters"):
        template.render(n=100_000_000)
