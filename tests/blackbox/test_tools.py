"""Calls of functions by a random model with a real template: required ones always come, and always parse."""

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from tests.blackbox.bodies import chat
from tests.blackbox.server import CHAT, Server, running_server
from tests.blackbox.tiny import TinyChat, make_with_tools

TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "the weather",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"enum": ["Bern", "Genf"]},
                    "days": {"type": "integer", "maximum": 9, "minimum": 1},
                },
                "required": ["city", "days"],
                "additionalProperties": False,
            },
        },
    },
    {"type": "function", "function": {"name": "stop"}},
]
HERMES = (
    "{% if tools %}{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content }}"
    "{% for call in message.tool_calls or [] %}"
    "{{ '<tool_call>\n' + (call.function | tojson) + '\n</tool_call>' }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CALL = "'<tool_call>\n' + (call.function | tojson) + '\n</tool_call>'"
MISTRAL = HERMES.replace(CALL, "'[TOOL_CALLS][' + (call.function | tojson) + ']'")
ARGS = HERMES.replace(CALL, "'[TOOL_CALLS]' + call.function.name + '[ARGS]' + (call.function.arguments | tojson)")
CODER = HERMES.replace(CALL, "'<tool_call>\n<function=' + call.function.name + '>\n</function>\n</tool_call>'")
GLM = HERMES.replace(CALL, "'<tool_call>' + call.function.name + '\n<arg_key>a</arg_key>\n</tool_call>'")
LLAMA = HERMES.replace(CALL, "'{\"parameters\": ' + (call.function | tojson) + '}'")
assert CALL in HERMES
TEMPLATES = {"hermes": HERMES, "mistral": MISTRAL, "llama": LLAMA, "args": ARGS, "coder": CODER, "glm": GLM}
CONTROL = {"mistral": ["[TOOL_CALLS]"], "args": ["[TOOL_CALLS]", "[ARGS]"]}


def function(parameters: Any) -> dict[str, Any]:
    return {"tools": [{"type": "function", "function": {"name": "f", "parameters": parameters}}]}


@pytest.fixture(scope="module", params=TEMPLATES)
def process(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    control = [AddedToken(marker, special=True) for marker in CONTROL.get(request.param, [])]
    model = make_with_tools(tmp_path_factory.mktemp("tools") / "tiny", TEMPLATES[request.param], control)
    flags = ("--dtype", "float32", "--kv-memory", "4MiB", "--max-model-len", "2048")
    with running_server(model.directory, *flags) as server:
        yield server


@pytest.fixture
def form(request: pytest.FixtureRequest) -> str:
    name: str = request.node.callspec.params["process"]
    return name


def check_call(call: Any) -> None:
    arguments = json.loads(call["function"]["arguments"])
    if call["function"]["name"] == "weather":
        assert arguments["city"] in ("Bern", "Genf")
        assert 1 <= arguments["days"] <= 9
    else:
        assert call["function"]["name"] == "stop"
    assert len(call["id"]) == 9


WEATHER = {"type": "function", "function": {"name": "weather"}}


def test_a_named_call_comes_whole_and_streamed(server: Server, form: str) -> None:
    for seed in range(4):
        body = {**chat(tools=TOOLS, tool_choice=WEATHER), "temperature": 1.2, "seed": seed}
        (choice,) = server.answer(CHAT, body)["choices"]
        assert (choice["finish_reason"], choice["message"]["content"]) == ("tool_calls", None)
        (call,) = choice["message"]["tool_calls"]
        assert call["function"]["name"] == "weather"
        check_call(call)
        with server.open(CHAT, {**body, "stream": True}) as wire:
            deltas = [event["choices"][0] for event in wire.events()]
        assert deltas[-1]["finish_reason"] == "tool_calls"
        parts = [part for d in deltas for part in d["delta"].get("tool_calls", [])]
        assert parts[0]["function"] == {"name": "weather", "arguments": ""}
        if form in ("hermes", "mistral", "llama"):
            assert len(parts) > 3, "the arguments come as they are made"
        assert "".join(part["function"]["arguments"] for part in parts) == call["function"]["arguments"]


def test_required_calls_may_be_several_unless_told_otherwise(server: Server) -> None:
    nothing = {"type": "function", "function": {"name": "stop", "parameters": {"const": {}}}}
    for seed in range(3):
        sampled = {"temperature": 1.2, "seed": seed, "max_tokens": 300}
        body = {**chat(tools=[TOOLS[0], nothing], tool_choice="required"), **sampled}
        (choice,) = server.answer(CHAT, body)["choices"]
        assert choice["message"]["tool_calls"]
        if choice["finish_reason"] == "tool_calls":
            for call in choice["message"]["tool_calls"]:
                check_call(call)
        (choice,) = server.answer(CHAT, {**body, "parallel_tool_calls": False})["choices"]
        assert len(choice["message"]["tool_calls"]) == 1


def test_auto_leaves_the_model_free_and_history_renders(server: Server) -> None:
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "stop", "arguments": "{}"}}
    turns = (
        {"role": "user", "content": "a"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "abcdefghi", "content": "ok"},
    )
    answer = server.answer(CHAT, chat(*turns, tools=TOOLS, max_tokens=20))
    assert answer["choices"][0]["finish_reason"] in ("stop", "length", "tool_calls")
    without = server.answer(CHAT, chat(*turns, tools=TOOLS, tool_choice="none", max_tokens=1))
    assert without["usage"]["prompt_tokens"] < answer["usage"]["prompt_tokens"]


def test_a_call_that_the_model_chose_to_make_follows_its_schema(server: Server, form: str) -> None:
    """The marker is made likely, and nothing after it."""
    if form not in CONTROL:
        pytest.skip("only a marker that is one token can be made likely")
    marker = server.answer("/tokenize", {"prompt": "[TOOL_CALLS]", "add_special_tokens": False})["tokens"]
    assert len(marker) == 1
    for seed in range(3):
        sampled = {"temperature": 1.2, "seed": seed, "max_tokens": 200, "logit_bias": {str(marker[0]): 30}}
        (choice,) = server.answer(CHAT, {**chat(tools=TOOLS), **sampled})["choices"]
        assert choice["message"]["content"] is None
        calls = choice["message"]["tool_calls"]
        for call in calls if choice["finish_reason"] == "tool_calls" else calls[:-1]:
            check_call(call)
        assert calls


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        (function({"type": "wizard"}), "tools"),
        (function({"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}), "tools"),
        (function({"properties": {"a": {"type": "string", "pattern": "["}}}), "tools"),
        ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools[0].function.name"),
        ({"tools": [{"type": "code"}]}, "tools[0].type"),
        ({"tools": [TOOLS[1], TOOLS[1]]}, "tools"),
        ({"tools": TOOLS, "tool_choice": "always"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "x"}}}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": {"type": "function"}}, "tool_choice"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "required", "regex": "a"}, "tool_choice"),
    ],
)
def test_hostile_tools_are_refused(server: Server, fields: dict[str, Any], param: str) -> None:
    response = server.post(CHAT, chat(**fields))
    assert (response.status_code, response.json()["error"]["param"]) == (400, param), response.text


def test_openai_client(server: Server) -> None:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        stream: Any = client.chat.completions.create(
            model="tiny",
            messages=[{"role": "user", "content": "a"}],
            tools=TOOLS,
            tool_choice=WEATHER,
            stream=True,  # type: ignore[call-overload]
        )
        arguments = "".join(
            part.function.arguments
            for chunk in stream
            for choice in chunk.choices
            for part in choice.delta.tool_calls or []
        )
        assert json.loads(arguments)["city"] in ("Bern", "Genf")


def test_a_template_without_tools_refuses_them(chatty: TinyChat) -> None:
    with running_server(chatty.directory, "--dtype", "float32", "--kv-memory", "2MiB") as server:
        response = server.post(CHAT, chat(tools=TOOLS))
        assert (response.status_code, response.json()["error"]["param"]) == (400, "tools")
        server.check_serving()
