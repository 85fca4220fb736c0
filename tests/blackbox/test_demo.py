"""The demo model behind the official client: what the README promises."""

import re
import subprocess
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from servekit.store.paths import models_dir
from tests.blackbox.bodies import chat, user
from tests.blackbox.server import (
    CHAT,
    EXIT_DEADLINE_S,
    Server,
    command,
    environment,
    running_server,
    wait_until,
)

pytestmark = pytest.mark.demo

QUESTION: Any = [user("What is the capital of France?")]
ANSWER = "The capital of France is Paris."


@pytest.fixture(scope="module")
def process() -> Iterator[Server]:
    assert (models_dir() / "demo").is_dir(), "run `servekit pull demo` first"
    # In float32: how weights are rounded must not decide what is asserted to the letter.
    flags = ("--quantize", "none", "--dtype", "float32", "--kv-memory", "64MiB", "--parallel", "4")
    with running_server("demo", *flags) as server:
        yield server


def test_it_says_that_it_is_loading_and_can_be_ended_meanwhile() -> None:
    # In float32, whose weights are made anew at every start: packed ones are loaded before a signal could arrive.
    arguments = command("demo", "--quantize", "none", "--dtype", "float32", "--kv-memory", "64MiB")
    pipe = subprocess.PIPE
    with subprocess.Popen(arguments, stdout=pipe, stderr=pipe, text=True, env=environment()) as process:
        try:
            assert process.stderr is not None
            announced = re.search(r"http://\S+", process.stderr.readline())
            assert announced is not None
            with httpx.Client(base_url=announced[0], trust_env=False) as http:
                wait_until(lambda: listens(http), lambda: "it never listened")
                assert (http.get("/health").status_code, http.get("/health").json()) == (503, {"status": "loading"})
                refused = http.post(CHAT, json=chat())
                assert (refused.status_code, refused.json()["error"]["code"]) == (503, "unavailable")
                # Well into the work of loading, which must not keep or crash the process.
                for _ in range(100):
                    http.get("/health")
                process.terminate()
            assert process.wait(EXIT_DEADLINE_S) == 0
            assert process.stdout is not None
            assert process.stdout.read() == ""
        finally:
            process.kill()


def listens(http: httpx.Client) -> bool:
    """Whether a connection is taken."""
    try:
        http.get("/health")
    except httpx.ConnectError:
        return False
    return True


@pytest.fixture
def client(server: Server) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=0) as client:
        yield client


def test_the_official_client_gets_a_whole_answer(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["demo"]
    answer = client.chat.completions.create(model="demo", messages=QUESTION, temperature=0, max_tokens=32)
    assert answer.choices[0].message.content == ANSWER
    assert answer.choices[0].finish_reason == "stop"
    assert answer.usage is not None
    # Seven words and a full stop, and the token that ended it.
    assert answer.usage.completion_tokens == 8


def test_the_official_client_gets_a_stream(client: openai.OpenAI) -> None:
    stream = client.chat.completions.create(
        model="demo",
        messages=QUESTION,
        temperature=0,
        max_tokens=32,
        stream=True,
        stream_options={"include_usage": True},
    )
    *chunks, last = list(stream)
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks) == ANSWER
    assert [chunk.choices[0].finish_reason for chunk in chunks[-1:]] == ["stop"]
    assert len(chunks) > 4, "word by word"
    assert last.choices == []
    assert last.usage is not None
    assert last.usage.completion_tokens == 8


def test_the_official_client_completes_text_and_takes_leave(server: Server, client: openai.OpenAI) -> None:
    text = client.completions.create(model="demo", prompt="1, 2, 3, 4,", temperature=0, max_tokens=8)
    assert text.choices[0].text.startswith(" 5, 6")
    with client.chat.completions.create(
        model="demo", messages=QUESTION, temperature=0, stream=True, extra_body={"ignore_eos": True}
    ) as stream:
        next(iter(stream))
        server.wait_for(lambda state: state["running"] == 1)
    server.wait_idle()


def test_the_official_client_gets_typed_errors(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError) as too_long:
        client.chat.completions.create(model="demo", messages=[{"role": "user", "content": "long " * 9000}])
    assert too_long.value.code == "context_length_exceeded"
    with pytest.raises(openai.NotFoundError):
        client.chat.completions.create(model="gpt", messages=QUESTION)
