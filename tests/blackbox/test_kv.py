"""The KV pool of a real engine under many clients: nothing leaks, nothing foreign is read."""

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from typing import Any

import pytest

from tests.blackbox.bodies import chat, completion, piece
from tests.blackbox.server import CHAT, COMPLETIONS, Server, running_server
from tests.blackbox.tiny import BOS, BYTES_PER_TOKEN, TinyChat

BLOCK = 16
NUM_REQUESTS = 500
FLAGS = ("--dtype", "float32", "--block-size", str(BLOCK), "--parallel", "8", "--max-num-batched-tokens", "64")
VARIED: dict[str, Any] = {"ignore_eos": True, "frequency_penalty": 1.5, "return_token_ids": True}
"""Greedy, but without the loops of a random model: such an answer depends on all of its context."""


@pytest.fixture(scope="module")
def process(chatty: TinyChat) -> Iterator[Server]:
    """With the prefix cache."""
    with running_server(chatty.directory, *FLAGS, "--kv-memory", "2MiB") as server:
        yield server


@pytest.fixture(scope="module")
def uncached(chatty: TinyChat) -> Iterator[Server]:
    """Without it."""
    with running_server(chatty.directory, *FLAGS, "--kv-memory", "2MiB", "--no-prefix-cache") as server:
        yield server


@pytest.fixture(scope="module")
def small(chatty: TinyChat) -> Iterator[Server]:
    """A pool of 24 blocks."""
    with running_server(chatty.directory, *FLAGS, "--kv-memory", str(25 * BLOCK * BYTES_PER_TOKEN)) as server:
        yield server


def tokens(seed: int, count: int) -> list[int]:
    """A prompt that no other seed begins like; no control tokens."""
    return [random.Random(f"{seed}-{i}").randrange(3, 259) for i in range(count)]


def answered(server: Server, prompt: list[int], max_tokens: int = 8) -> tuple[list[int], int]:
    """The greedy continuation, and how much of the prompt came from the cache."""
    answer = server.answer(COMPLETIONS, completion(prompt, max_tokens=max_tokens, **VARIED))
    assert answer["usage"]["prompt_tokens"] == len(prompt)
    return answer["choices"][0]["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


def one_of_many(server: Server, number: int) -> str:
    """One client of a mixed crowd; what became of it."""
    chance = random.Random(number)
    num_prompt = chance.choice([1, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 3 * BLOCK, chance.randrange(1, 120)])
    prompt = tokens(chance.randrange(40), num_prompt)
    body = completion(prompt, max_tokens=chance.randrange(1, 48), ignore_eos=True, n=chance.choice([1, 1, 1, 2]))
    fate = chance.random()
    if fate < 0.1:
        too_long, unknown = {"prompt": [9] * 10_000}, {"prompt": [10**6]}
        bad: dict[str, Any] = chance.choice([{"temperature": -1}, too_long, unknown, {"n": 0}])
        assert server.post(COMPLETIONS, {**body, **bad}).status_code == 400
        return "rejected"
    if fate < 0.4:
        stream = chance.random() < 0.7
        wire = server.open(COMPLETIONS, {**body, "stream": stream, "max_tokens": 1500})
        if stream:
            events = wire.events()
            for _ in range(chance.randrange(4)):
                next(events)
        (wire.close if chance.random() < 0.5 else wire.reset)()
        return "dropped"
    if fate < 0.5:
        body["stop"] = ["a", "e", "\ufffd"]
    answer = server.answer(COMPLETIONS, body)
    assert len(answer["choices"]) == body["n"]
    return "answered"


@pytest.mark.parametrize("fixture", ["process", "uncached"])
def test_the_pool_returns_to_its_base(fixture: str, request: pytest.FixtureRequest) -> None:
    server: Server = request.getfixturevalue(fixture)
    before = server.wait_idle()
    with ThreadPoolExecutor(12) as pool:
        fates = [pool.submit(one_of_many, server, number) for number in range(NUM_REQUESTS)]
        while not all(fate.done() for fate in fates):
            state = server.state
            blocks = state["live_blocks"] + state["cached_blocks"] + state["free_blocks"]
            assert blocks == state["usable_blocks"] == before["usable_blocks"]
            assert state["running"] <= 8
        counts = [fate.result() for fate in fates]
    assert {fate: counts.count(fate) > NUM_REQUESTS / 20 for fate in set(counts)} == {
        "answered": True,
        "dropped": True,
        "rejected": True,
    }
    after = server.wait_idle()
    assert after["cached_blocks"] + after["free_blocks"] == after["usable_blocks"]
    if fixture == "uncached":
        assert (after["cached_blocks"], after["prefix_hit_tokens"]) == (0, 0)
    else:
        assert after["cached_blocks"] > 0
        assert after["prefix_hit_tokens"] > before["prefix_hit_tokens"]
    server.check_serving()


@pytest.mark.parametrize("length", [BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK])
def test_a_prompt_that_is_wholly_cached(server: Server, uncached: Server, length: int) -> None:
    prompt = tokens(1000 + length, length)
    expected = [answered(uncached, prompt)] * 3
    found = [answered(server, prompt) for _ in range(3)]
    assert [ids for ids, _ in found] == [ids for ids, _ in expected]
    # One token at least is computed, for its logits; and only whole blocks are shared.
    reused = (length - 1) // BLOCK * BLOCK
    assert [cached for _, cached in found] == [0, reused, reused]
    longer = [*prompt, 70]
    ids, cached = answered(server, longer)
    assert (ids, cached) == (answered(uncached, longer)[0], length // BLOCK * BLOCK)
    assert ids != found[0][0], "the last token must matter"
    assert [cached for _, cached in expected] == [0] * 3


def test_a_conversation_goes_on_from_the_cache(server: Server, uncached: Server) -> None:
    prompt = tokens(2000, 3 * BLOCK + 5)
    first, _ = answered(server, prompt, max_tokens=2 * BLOCK)
    second = [*prompt, *first, *tokens(2001, 7)]
    ids, cached = answered(server, second)
    assert ids == answered(uncached, second)[0]
    # All blocks of the first call are reused, answer included; its last token was never computed.
    assert cached == (len(prompt) + len(first) - 1) // BLOCK * BLOCK


def test_a_salt_keeps_caches_apart(server: Server) -> None:
    prompt = tokens(3000, 4 * BLOCK)

    def cached(salt: str) -> int:
        usage = server.answer(COMPLETIONS, completion(prompt, max_tokens=1, cache_salt=salt))["usage"]
        number: int = usage["prompt_tokens_details"]["cached_tokens"]
        return number

    assert [cached("a"), cached("b"), cached(""), cached("a"), cached("b")] == [0, 0, 0, 3 * BLOCK, 3 * BLOCK]


def test_identical_prompts_at_once(server: Server, uncached: Server) -> None:
    prompt = tokens(4000, 8 * BLOCK)
    expected, _ = answered(uncached, prompt, max_tokens=24)
    barrier = Barrier(16)

    def ask(_: int) -> list[int]:
        barrier.wait()
        return answered(server, prompt, max_tokens=24)[0]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(ask, range(16))) == [expected] * 16


def test_blocks_in_use_are_never_evicted(small: Server, uncached: Server) -> None:
    shared = tokens(5000, 3 * BLOCK)
    prompts = [shared + tokens(5001 + i, 5 + 3 * i) for i in range(8)]
    expected = [answered(uncached, prompt, max_tokens=60)[0] for prompt in prompts]
    assert len({tuple(ids) for ids in expected}) == 8, "an answer must tell which prompt it belongs to"
    before = small.state
    with ThreadPoolExecutor(10) as pool:
        for _ in range(2):
            streams = [pool.submit(stream_ids, small, prompt, 60) for prompt in prompts]
            filler = 0
            while not all(stream.done() for stream in streams):
                answered(small, tokens(6000 + filler, 2 * BLOCK + 1), max_tokens=2)
                filler += 1
            assert [stream.result() for stream in streams] == expected
            assert filler > 0
    after = small.wait_idle()
    assert after["preemptions"] > before["preemptions"]
    assert after["prefix_hit_tokens"] > before["prefix_hit_tokens"]
    small.check_serving()


def stream_ids(server: Server, prompt: list[int], max_tokens: int) -> list[int]:
    """The tokens of a streamed greedy continuation."""
    body = completion(prompt, max_tokens=max_tokens, stream=True, **VARIED)
    with server.open(COMPLETIONS, body) as wire:
        return [token_id for event in wire.events() for token_id in event["choices"][0].get("token_ids", ())]


def test_a_preempted_stream_repeats_and_loses_nothing(small: Server, uncached: Server) -> None:
    bodies = [chat(max_tokens=150, seed=i, temperature=1, **{**VARIED, "n": 2}) for i in range(3)]
    expected = [uncached.answer(CHAT, body) for body in bodies]
    before = small.state["preemptions"]

    def stream(body: dict[str, Any]) -> list[str]:
        with small.open(CHAT, {**body, "stream": True}) as wire:
            events = list(wire.events())
        return ["".join(piece(event, index) for event in events) for index in range(2)]

    with ThreadPoolExecutor(3) as pool:
        streamed = list(pool.map(stream, bodies))
    assert small.state["preemptions"] > before
    assert streamed == [[choice["message"]["content"] for choice in answer["choices"]] for answer in expected]


def test_preflight_agrees_with_what_then_happens(chatty: TinyChat) -> None:
    flags = ("--dtype", "float32", "--kv-memory", "2MiB", "--block-size", "16", "--max-model-len", "512")
    with running_server(chatty.directory, *flags) as server:
        body = completion(list(range(100, 170)), max_tokens=2)
        first = server.answer("/v1/preflight", body)["prompts"][0]
        assert (first["prompt_tokens"], first["cached_tokens"], first["new_blocks"]) == (70, 0, 5)
        assert first["expected_ttft_ms"] is None
        assert server.answer(COMPLETIONS, body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 0
        second = server.answer("/v1/preflight", body)["prompts"][0]
        assert (second["cached_tokens"], second["new_blocks"]) == (64, 1)
        assert second["expected_ttft_ms"] > 0
        assert server.answer(COMPLETIONS, body)["usage"]["prompt_tokens_details"]["cached_tokens"] == 64
        over = server.answer("/v1/preflight", completion(list(range(100, 170)) * 9))
        assert (over["fits"], over["prompts"][0]["error"]["n_ctx"]) == (False, 512)
        text = server.answer("/tokenize", {"prompt": "the cat"})
        assert text["tokens"][0] == chatty.id_of(BOS)
        assert server.answer("/detokenize", {"tokens": text["tokens"]})["prompt"] == f"{BOS}the cat"
