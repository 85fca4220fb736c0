"""Clients that people use, unchanged, against the real server: all they need is its URL."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from tests.blackbox.server import Server, running_server
from tests.blackbox.test_tools import HERMES, TOOLS
from tests.blackbox.tiny import make_with_tools
from tests.blackbox.tiny_embedder import TinyEmbedder, make_embedder

USER = [{"role": "user", "content": "the cat"}]
CHOICE = {"type": "function", "function": {"name": "weather"}}


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = make_with_tools(tmp_path_factory.mktemp("clients") / "tiny", HERMES, [])
    flags = ("--dtype", "float32", "--kv-memory", "4MiB", "--max-model-len", "2048", "--served-model-name", "tiny")
    with running_server(model.directory, *flags) as server:
        yield server


@pytest.fixture
def client(server: Server) -> Iterator[Any]:
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as made:
        yield made


def test_openai_chat_whole_and_streamed(client: Any) -> None:
    whole = client.chat.completions.create(model="tiny", messages=USER, temperature=0, max_tokens=12)
    stream = client.chat.completions.create(
        model="tiny", messages=USER, temperature=0, max_tokens=12, stream=True, stream_options={"include_usage": True}
    )
    chunks = list(stream)
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage == whole.usage.model_copy(
        update={"prompt_tokens_details": chunks[-1].usage.prompt_tokens_details}
    )


def test_openai_completions_and_errors(client: Any) -> None:
    done = client.completions.create(model="tiny", prompt=["the cat", "a dog"], max_tokens=4, n=2)
    assert [choice.index for choice in done.choices] == [0, 1, 2, 3]
    with pytest.raises(openai.NotFoundError, match="is not served here"):
        client.completions.create(model="other", prompt="a")
    with pytest.raises(openai.BadRequestError) as caught:
        client.completions.create(model="tiny", prompt="a " * 5000)
    assert caught.value.code == "context_length_exceeded"


def test_openai_responses(client: Any) -> None:
    whole = client.responses.create(model="tiny", input="the cat", temperature=0, max_output_tokens=12)
    with client.responses.stream(model="tiny", input="the cat", temperature=0, max_output_tokens=12) as stream:
        deltas = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
    assert deltas == whole.output_text
    tool = {"type": "function", **TOOLS[0]["function"], "strict": True}
    called = client.responses.create(
        model="tiny", input="a", tools=[tool], tool_choice={"type": "function", "name": "weather"}
    )
    (item,) = called.output
    assert json.loads(item.arguments)["city"] in ("Bern", "Genf")


def test_openai_responses_as_events(client: Any) -> None:
    tool = {"type": "function", **TOOLS[0]["function"], "strict": True}
    asked = {"model": "tiny", "input": "a", "tools": [tool], "tool_choice": "required", "max_output_tokens": 300}
    events = list(client.responses.create(**asked, stream=True, parallel_tool_calls=False))
    assert [event.sequence_number for event in events] == list(range(len(events)))
    kinds = [event.type for event in events]
    assert kinds[:3] == ["response.created", "response.in_progress", "response.output_item.added"]
    arguments = "".join(e.delta for e in events if e.type == "response.function_call_arguments.delta")
    done = [e.arguments for e in events if e.type == "response.function_call_arguments.done"]
    assert kinds[-1] == "response.completed"
    (item,) = events[-1].response.output
    assert (done, item.arguments, item.status) == ([arguments], arguments, "completed")
    assert json.loads(arguments)["city"] in ("Bern", "Genf")
    added = events[2].item
    assert (added.id, added.call_id, added.name, added.arguments) == (item.id, item.call_id, "weather", "")
    # The result of the call goes back, and a cut answer says that it is one.
    history = [
        {"role": "user", "content": "a"},
        item.model_dump(exclude_none=True),
        {"type": "function_call_output", "call_id": item.call_id, "output": "sun"},
    ]
    *_, last = client.responses.create(model="tiny", input=history, tools=[tool], max_output_tokens=2, stream=True)
    assert (last.type, last.response.incomplete_details.reason) == ("response.incomplete", "max_output_tokens")
    assert last.response.usage.output_tokens == 2


def test_openai_tools(client: Any) -> None:
    done = client.chat.completions.create(model="tiny", messages=USER, tools=TOOLS, tool_choice=CHOICE)
    (call,) = done.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)["city"] in ("Bern", "Genf")


def test_anthropic(server: Server) -> None:
    with anthropic.Anthropic(base_url=server.url, api_key="none", max_retries=0) as typed:
        client: Any = typed
        # Not every version of this client knows the temperature.
        asked = {"model": "tiny", "max_tokens": 12, "messages": USER, "extra_body": {"temperature": 0}}
        whole = client.messages.create(**asked)
        with client.messages.stream(**asked) as stream:
            assert "".join(stream.text_stream) == whole.content[0].text
        tool = {"name": "weather", "input_schema": TOOLS[0]["function"]["parameters"]}
        choice = {"type": "tool", "name": "weather"}
        called = client.messages.create(**{**asked, "max_tokens": 300}, tools=[tool], tool_choice=choice)
        assert called.stop_reason == "tool_use"
        assert called.content[0].input["city"] in ("Bern", "Genf")


LANGCHAIN = """
from langchain_openai import ChatOpenAI
model = ChatOpenAI(base_url=URL, api_key="none", model="tiny", temperature=0, max_tokens=12, max_retries=0)
whole = model.invoke("the cat")
assert "".join(chunk.content for chunk in model.stream("the cat")) == whole.content
(call,) = model.bind_tools(TOOLS, tool_choice="weather").bind(max_tokens=300).invoke("a").tool_calls
assert call["args"]["city"] in ("Bern", "Genf")
"""
LITELLM = """
import asyncio, litellm
user = [{"role": "user", "content": "the cat"}]
asked = {"model": "openai/tiny", "api_base": URL, "api_key": "none", "messages": user, "temperature": 0}
asked["max_tokens"] = 12
whole = litellm.completion(**asked).choices[0].message.content
assert "".join(c.choices[0].delta.content or "" for c in litellm.completion(**asked, stream=True)) == whole
assert asyncio.run(litellm.acompletion(**asked)).choices[0].message.content == whole
"""


def run_client(script: str, **names: Any) -> None:
    """In a process of its own: what such a library leaves open at exit is not ours."""
    program = "".join(f"{name} = {value!r}\n" for name, value in names.items()) + script
    # Without it litellm fetches a table of prices.
    env = {**os.environ, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=240, env=env)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("script", [pytest.param(LANGCHAIN, id="langchain"), pytest.param(LITELLM, id="litellm")])
def test_chat_frameworks(server: Server, script: str) -> None:
    run_client(script, URL=f"{server.url}/v1", TOOLS=TOOLS)


LANGCHAIN_EMBEDDINGS = """
from langchain_openai import OpenAIEmbeddings
asked = {"base_url": URL, "api_key": "none", "model": "embedder", "max_retries": 0}
model = OpenAIEmbeddings(**asked, check_embedding_ctx_length=False)
assert close(model.embed_documents(TEXTS), VECTORS)
assert close([model.embed_query(TEXTS[0])], VECTORS[:1])
# By default it sends token ids: with the model's own tokenizer they are embedded as they are.
ids = OpenAIEmbeddings(**asked, tiktoken_enabled=False, tiktoken_model_name=FOLDER)
assert close(ids.embed_documents(TEXTS), VECTORS)
"""
LLAMA_INDEX = """
from llama_index.embeddings.openai import OpenAIEmbedding
model = OpenAIEmbedding(model_name="embedder", api_base=URL, api_key="none", max_retries=0)
assert close(model.get_text_embedding_batch(TEXTS), VECTORS)
assert close([model.get_query_embedding(TEXTS[0])], VECTORS[:1])
"""
CLOSE = """
def close(found, expected):
    return len(found) == len(expected) and all(
        abs(a - b) < 1e-5 for ours, theirs in zip(found, expected) for a, b in zip(ours, theirs)
    )
"""


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, TinyEmbedder]]:
    tiny = make_embedder(tmp_path_factory.mktemp("clients") / "embedder")
    with running_server(tiny.directory, "--dtype", "float32") as server:
        yield server, tiny


@pytest.mark.parametrize(
    "script", [pytest.param(LANGCHAIN_EMBEDDINGS, id="langchain"), pytest.param(LLAMA_INDEX, id="llama-index")]
)
def test_embedding_frameworks(embedder: tuple[Server, TinyEmbedder], script: str) -> None:
    server, tiny = embedder
    texts = ["the cat sat", "one two three four", "it rained"]
    vectors = tiny.vectors(texts).tolist()
    names = {"URL": f"{server.url}/v1", "TEXTS": texts, "VECTORS": vectors, "FOLDER": str(tiny.directory)}
    run_client(CLOSE + script, **names)
