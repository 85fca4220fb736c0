"""Whose turn it is and who is refused, with real sockets and threads."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import openai
import pytest

from tests.blackbox.bodies import chat, chat_text, completion, endless, finish, streamed_text, user
from tests.blackbox.server import (
    CHAT,
    COMPLETIONS,
    Server,
    running_server,
)
from tests.blackbox.tiny import BYTES_PER_TOKEN, TinyChat

CHUNK = 64
QUEUE_LIMIT = 4
FLOAT32 = ("--dtype", "float32")


@pytest.fixture(scope="module")
def process(chatty: TinyChat) -> Iterator[Server]:
    """Small steps, and two slots."""
    flags = ("--kv-memory", "16MiB", "--parallel", "2", "--max-num-batched-tokens", str(CHUNK))
    with running_server(chatty.directory, *FLOAT32, *flags, "--queue-limit", str(QUEUE_LIMIT)) as server:
        yield server


class Reader(threading.Thread):
    """Reads a stream as it comes and counts its tokens, until it has been told that this is enough."""

    def __init__(self, stream: Iterator[Any]) -> None:
        super().__init__(daemon=True)
        self.num_tokens = 0
        self.enough = threading.Event()
        self._stream = stream

    def run(self) -> None:
        """Read event after event."""
        for event in self._stream:
            self.num_tokens += len(event["choices"][0].get("token_ids", ()))
            if self.enough.is_set():
                return


def test_a_long_prompt_shares_every_step_with_a_stream_that_runs(server: Server) -> None:
    num_prompt_tokens = int(0.9 * 4096)
    num_chunks = -(-num_prompt_tokens // (CHUNK - 1))
    with server.open(CHAT, endless(stream=True, return_token_ids=True)) as wire:
        stream = wire.events()
        for _ in range(20):
            next(stream)
        reader = Reader(stream)
        reader.start()
        steps, before = server.state["steps"], reader.num_tokens
        server.answer(COMPLETIONS, completion([9] * num_prompt_tokens, max_tokens=1, ignore_eos=True))
        gained, num_steps = reader.num_tokens - before, server.state["steps"] - steps
        reader.enough.set()
        reader.join()
    # Each chunk brought the stream a token, but for what the reader had yet to read; and the prompt was not starved.
    assert num_chunks <= num_steps
    assert 0.8 * num_chunks <= gained <= 3 * num_chunks


def test_health_answers_while_a_huge_prompt_is_read(server: Server) -> None:
    body = chat(user("a " * (4 * 2**20 - 1000)))
    slowest = 0.0
    with ThreadPoolExecutor(1) as pool, httpx.Client(base_url=server.url, timeout=60, trust_env=False) as prober:
        refused = pool.submit(server.post, CHAT, body)
        while not refused.done():
            began = time.monotonic()
            assert prober.get("/health").status_code == 200
            slowest = max(slowest, time.monotonic() - began)
    assert refused.result().status_code == 400
    assert refused.result().json()["error"]["code"] == "context_length_exceeded"
    assert slowest < 2.0, "ten times what a supervisor waits for"


def test_a_body_over_the_limit_is_refused(server: Server) -> None:
    response = server.post(CHAT, chat(user("a" * (8 * 2**20))))
    assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


def test_beyond_the_queue_limit_requests_are_told_to_come_back(server: Server) -> None:
    body = chat(max_tokens=40, ignore_eos=True)
    with ThreadPoolExecutor(30) as pool:
        responses = list(pool.map(lambda _: server.post(CHAT, body), range(30)))
    accepted = [response for response in responses if response.status_code == 200]
    refused = [response for response in responses if response.status_code == 429]
    assert len(accepted) + len(refused) == 30
    assert len(accepted) >= 2 + QUEUE_LIMIT
    assert all(response.json()["usage"]["completion_tokens"] == 40 for response in accepted)
    assert len({chat_text(response.json()) for response in accepted}) == 1
    for response in refused:
        assert int(response.headers["retry-after"]) >= 1
        assert response.json()["error"]["type"] == "overloaded_error"


def test_the_openai_client_comes_back_by_itself(server: Server) -> None:
    wires = [server.open(CHAT, endless(stream=True)) for _ in range(2 + QUEUE_LIMIT)]
    server.wait_for(lambda state: (state["running"], state["waiting"]) == (2, QUEUE_LIMIT))
    refused = server.post(CHAT, chat(stream=True))
    assert (refused.status_code, refused.headers["content-type"]) == (429, "application/json")
    assert server.post(CHAT, chat(n=2)).status_code == 429
    num_refused = server.log.count("status=429")

    def ask(client: openai.OpenAI) -> int:
        messages: Any = [user("hi")]
        answer = client.chat.completions.create(
            model="chatty", messages=messages, max_tokens=3, extra_body={"ignore_eos": True}
        )
        assert answer.usage is not None
        return answer.usage.completion_tokens

    client = openai.OpenAI(api_key="none", base_url=f"{server.url}/v1", max_retries=10)
    with client, ThreadPoolExecutor(1) as pool:
        answer = pool.submit(ask, client)
        server.wait_for_log("status=429", num_refused + 1)
        for wire in wires:
            wire.close()
        assert answer.result() == 3


def test_a_call_for_another_task_and_bad_calls_leave_a_stream_alone(server: Server, chatty: TinyChat) -> None:
    body = endless(max_tokens=400)
    expected = chat_text(server.answer(CHAT, body))
    with server.open(CHAT, {**body, "stream": True}) as wire:
        stream = wire.events()
        events = [next(stream)]
        for path, bad, status in (
            ("/v1/embeddings", {"model": "chatty", "input": "x"}, 400),
            (CHAT, chat(logit_bias={"999999999": 5}), 400),
            (CHAT, chat(stop_token_ids=[-1]), 400),
            (COMPLETIONS, completion([10**6]), 400),
            (COMPLETIONS, completion([-1]), 400),
            (COMPLETIONS, completion([]), 400),
            (CHAT, chat(seed=2**70), 400),
            (CHAT, chat(temperature=1e-320, top_k=2**62, max_tokens=4), 200),
            (CHAT, chat(temperature=1e-30, top_p=1e-30, min_p=1, max_tokens=4), 200),
            (CHAT, chat(repetition_penalty=1e-300, max_tokens=4), 200),
        ):
            response = server.post(path, bad)
            assert response.status_code == status, (bad, response.text)
            assert response.headers["content-type"] == "application/json"
        events += stream
    assert streamed_text(events) == expected
    assert finish(events)["finish_reason"] == "length"
    for _ in range(20):
        assert server.answer(CHAT, chat(max_tokens=2, ignore_eos=True))["usage"]["completion_tokens"] == 2


def test_a_prompt_larger_than_the_pool_blocks_nobody(chatty: TinyChat) -> None:
    pool = 7 * 16
    with running_server(chatty.directory, *FLOAT32, "--kv-memory", str((pool + 16) * BYTES_PER_TOKEN)) as server:
        assert server.get("/v1/models")["data"][0]["max_model_len"] == pool
        assert server.state["usable_blocks"] == 7
        for stream in (False, True):
            refused = server.post(COMPLETIONS, completion([9] * 2 * pool, stream=stream))
            error = refused.json()["error"]
            assert refused.status_code == 400
            assert error["code"] in ("context_length_exceeded", "kv_capacity_exceeded")
            assert str(2 * pool) in error["message"]
            assert str(pool) in error["message"]
        server.check_serving()
        edge = server.answer(COMPLETIONS, completion([9] * 100, max_tokens=100, ignore_eos=True))
        assert edge["usage"]["total_tokens"] == pool
        assert edge["choices"][0]["finish_reason"] == "length"
        # Two that cannot be there together take turns.
        with ThreadPoolExecutor(4) as pool_of_threads:
            bodies = [completion([9 + i] * 60, max_tokens=50, ignore_eos=True) for i in range(4)]
            answers = list(pool_of_threads.map(lambda body: server.answer(COMPLETIONS, body), bodies))
        assert [answer["usage"]["completion_tokens"] for answer in answers] == [50] * 4
        server.check_serving()
