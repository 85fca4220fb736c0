import logging
from pathlib import Path
from typing import Any

import pytest

from servekit.engine.text import template_sandbox
from servekit.engine.text.chat_template import ChatTemplate, load_chat_template, normalise_messages
from servekit.errors import InputError, ModelError, UnsupportedError

PLAIN = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)
NO_SYSTEM = (
    "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate') }}{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
WITH_TOOLS = "{% for t in tools or [] %}{{ t|tojson }}{% endfor %}{{ messages[0].content }}"


def user(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def system(text: str) -> dict[str, Any]:
    return {"role": "system", "content": text}


def assistant(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


def render(source: str, messages: list[dict[str, Any]], **options: Any) -> str:
    return ChatTemplate(source, {"bos_token": "<s>"}).render(messages, **options)


def test_messages_special_tokens_and_the_prompt_for_an_answer() -> None:
    assert render(PLAIN, [system("s"), user("u")]) == "<s>[system]s[user]u>"
    assert render(PLAIN, [user("u")], add_generation_prompt=False) == "<s>[user]u"


def test_variables_reach_the_template_but_cannot_replace_what_the_server_sets() -> None:
    assert render("{{ thinking }}", [user("u")], thinking=False) == "False"
    for name in ("bos_token", "documents"):
        with pytest.raises(InputError, match=f"{name} is set by the server") as caught:
            render(PLAIN, [user("u")], **{name: "x"})
        assert caught.value.param == "chat_template_kwargs"


def test_tools_go_to_templates_that_take_them() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    assert render(WITH_TOOLS, [user("u")], tools=tools) == '{"type": "function", "function": {"name": "f"}}u'
    with pytest.raises(UnsupportedError, match="takes no tools") as caught:
        render(PLAIN, [user("u")], tools=tools)
    assert caught.value.param == "tools"
    assert render(PLAIN, [user("u")], tools=[]) == "<s>[user]u>"


def test_a_refused_system_message_is_folded_into_the_first_user_turn(caplog: pytest.LogCaptureFixture) -> None:
    template = ChatTemplate(NO_SYSTEM, {})
    with caplog.at_level(logging.INFO, logger="servekit"):
        assert template.render([system("s"), user("u")]) == "<user>s\n\nu"
        assert template.render([system("a"), system("b"), user("u")]) == "<user>a\n\nb\n\nu"
        assert template.render([system("s"), user("")]) == "<user>s"
    assert len([record for record in caplog.records if "system" in record.message]) == 1


def test_folding_leaves_the_messages_as_they_were() -> None:
    messages = [system("s"), user("u")]
    render(NO_SYSTEM, messages)
    assert messages == [system("s"), user("u")]


def test_a_system_message_alone_is_refused_in_the_templates_words() -> None:
    with pytest.raises(InputError, match="System role not supported") as caught:
        render(NO_SYSTEM, [system("s")])
    assert caught.value.http_status == 400
    assert caught.value.param == "messages[0]"


def test_the_first_refused_message_is_named() -> None:
    for messages, index in (
        ([user("a"), user("b")], 1),
        ([user("a"), assistant("b"), user("c"), user("d"), assistant("e")], 3),
    ):
        with pytest.raises(InputError, match="must alternate") as caught:
            render(NO_SYSTEM, messages)
        assert caught.value.param == f"messages[{index}]"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ messages[0].x.y }}", "has no attribute 'x'"),
        ("{{ messages[0].content + 1 }}", "TypeError"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10**9) %}x{% endfor %}", "OverflowError"),
        ("{% include 'x' %}", "no loader"),
    ],
)
def test_whatever_a_template_does_wrong_is_a_refusal(source: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        render(source, [user("u")])


def test_an_answer_past_the_budget_is_a_refusal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_sandbox, "MAX_SECONDS", 0.05)
    with pytest.raises(InputError, match="runs for more than"):
        render("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", [user("u")])
    with pytest.raises(InputError, match="writes more than"):
        render("{{ 'a' * 9 * 1024 * 1024 }}", [user("u")])


@pytest.mark.parametrize("source", ["{% if %}", "{{ x", "{% for m in messages %}", "{{ 'a'|nosuchfilter }}"])
def test_a_template_that_does_not_compile_is_a_model_error(source: str) -> None:
    with pytest.raises(ModelError, match="cannot be compiled"):
        ChatTemplate(source, {})


def test_a_huge_template_is_refused() -> None:
    with pytest.raises(ModelError, match="has 300000 characters"):
        ChatTemplate("x" * 300_000, {})


def test_null_and_absent_content_are_empty_text() -> None:
    calls = [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    base = {"role": "assistant", "tool_calls": calls}
    normalised = [
        normalise_messages([message])[0] for message in (base, {**base, "content": None}, {**base, "content": ""})
    ]
    assert normalised[0] == normalised[1] == normalised[2]
    assert normalised[0]["content"] == ""


def test_text_parts_are_joined_and_other_nulls_dropped() -> None:
    parts = [{"type": "text", "text": "b"}, {"type": "text", "text": "c"}]
    assert normalise_messages([{"role": "user", "content": parts, "name": None}]) == [{"role": "user", "content": "bc"}]


def test_tool_arguments_become_objects() -> None:
    def arguments(text: str) -> Any:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": text}}
        (message,) = normalise_messages([{"role": "assistant", "tool_calls": [call]}])
        return message["tool_calls"][0]["function"]["arguments"]

    assert arguments('{"a": [1, "é"]}') == {"a": [1, "é"]}
    assert arguments("") == {}
    with pytest.raises(InputError, match="must be JSON") as caught:
        arguments("{a")
    assert caught.value.param == "messages[0].tool_calls[0].function.arguments"


@pytest.mark.parametrize(
    ("content", "kind", "param"),
    [
        ([{"type": "image_url", "image_url": {}}], UnsupportedError, "messages[0].content[0]"),
        ([{"type": "text"}], InputError, "messages[0].content[0].text"),
        (["x"], UnsupportedError, "messages[0].content[0]"),
        (7, InputError, "messages[0].content"),
    ],
)
def test_content_that_is_not_text_is_named(content: Any, kind: type[InputError], param: str) -> None:
    with pytest.raises(kind) as caught:
        normalise_messages([{"role": "user", "content": content}])
    assert caught.value.param == param


def test_where_a_template_comes_from(tmp_path: Path) -> None:
    named = [{"name": "default", "template": "D"}, {"name": "tool_use", "template": "T"}]
    assert load_chat_template(tmp_path, {}) is None
    assert load_chat_template(tmp_path, {"chat_template": "C"}) == "C"
    assert load_chat_template(tmp_path, {"chat_template": named}) == "T"
    assert load_chat_template(tmp_path, {"chat_template": named[:1]}) == "D"
    (tmp_path / "chat_template.jinja").write_text("→ é 日", encoding="utf-8")
    assert load_chat_template(tmp_path, {"chat_template": "C"}) == "→ é 日"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError, match=r"chat_template\.jinja cannot be read"):
        load_chat_template(tmp_path, {})
