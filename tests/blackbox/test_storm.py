"""Five hundred at once, many of them badly behaved: every answer is its own, and afterwards nothing is left."""

import json
import random
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import psutil
import pytest

from tests.blackbox.server import COMPLETIONS, Server, running_server
from tests.blackbox.tiny import TinyChat
from tests.blackbox.wire import DONE

NUM_REQUESTS = 500
MAX_GROWTH_PER_REQUEST = 16 * 1024
"""Bytes."""

STEP_TOKENS = "16"
"""oneDNN keeps half a megabyte for each number of tokens that a step had: few numbers, so that they all come at once
and what grows afterwards is a leak."""

NUM_MARKED = 24
"""Different prompts; each has its own answer, asked for alone before the storm."""


@pytest.fixture(scope="module")
def process(chatty: TinyChat) -> Iterator[Server]:
    flags = ("--dtype", "float32", "--kv-memory", "2MiB", "--max-model-len", "256", "--queue-limit", "600")
    steps = ("--max-num-batched-tokens", STEP_TOKENS)
    with running_server(chatty.directory, *flags, "--log-level", "warning", "--parallel", "8", *steps) as server:
        yield server


def marked(i: int, **fields: object) -> dict[str, object]:
    """A prompt that begins with its number; greedy, without the loops of a random model."""
    prompt = [100 + i, *range(50, 80 + i)]
    return {
        "prompt": prompt,
        "temperature": 0,
        "max_tokens": 12,
        "frequency_penalty": 1.5,
        "ignore_eos": True,
        **fields,
    }


def text_of(body: bytes) -> str:
    return str(json.loads(body)["choices"][0]["text"])


class Storm:
    """One storm's clients. Each returns what it did."""

    def __init__(self, server: Server, expected: list[str], seed: int) -> None:
        self._server = server
        self._expected = expected
        chance = random.Random(seed)
        kinds = ["whole"] * 100 + ["stream"] * 100 + ["drop"] * 200 + ["invalid"] * 50 + ["slow"] * 50
        chance.shuffle(kinds)
        self.clients = [(kind, chance.randrange(NUM_MARKED), chance.random()) for kind in kinds]
        assert len(self.clients) == NUM_REQUESTS

    def run(self, client: tuple[str, int, float]) -> str:
        kind, i, chance = client
        stream = kind in ("stream", "slow") or chance < 0.5
        body = marked(i, n=0) if kind == "invalid" else marked(i, stream=stream)
        with self._server.wire(receive_buffer=2048 if kind == "slow" else None) as wire:
            if kind == "drop" and chance < 0.2:
                wire.send(b"POST /v1/completions HTTP/1.1\r\nhost: 127.0.0.1\r\n"[: int(chance * 200)])
                return kind
            wire.post(COMPLETIONS, body)
            if kind == "drop":
                if chance > 0.6:  # after the headers have come
                    wire.head()
                (wire.reset if chance > 0.8 else wire.close)()
                return kind
            status, headers = wire.head()
            if kind == "invalid":
                assert (status, json.loads(wire.body(headers))["error"]["param"]) == (400, "n")
                return kind
            assert status == 200
            if not stream:
                assert text_of(wire.body(headers)) == self._expected[i]
                return kind
            text, pause = "", threading.Event()
            for piece in wire.chunks():
                for line in piece.split(b"\n\n"):
                    if line.startswith(b"data: ") and line != DONE:
                        text += "".join(c["text"] for c in json.loads(line[6:])["choices"])
                if kind == "slow":
                    pause.wait(0.01)
            assert text == self._expected[i]
        return kind


def test_three_storms(server: Server) -> None:
    expected = [text_of(server.post(COMPLETIONS, marked(i)).content) for i in range(NUM_MARKED)]
    assert len(set(expected)) == NUM_MARKED
    sizes = []
    for seed in range(3):
        storm = Storm(server, expected, seed)
        with ThreadPoolExecutor(NUM_REQUESTS) as pool:
            assert len(list(pool.map(storm.run, storm.clients))) == NUM_REQUESTS
        state = server.wait_idle()
        assert state["live_blocks"] == 0
        assert state["cached_blocks"] + state["free_blocks"] == state["usable_blocks"]
        sizes.append(psutil.Process(server.process.pid).memory_info().rss)
    assert sizes[2] - sizes[0] < MAX_GROWTH_PER_REQUEST * 2 * NUM_REQUESTS, sizes
