"""The three batching policies of the real server differ in when, never in what."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.blackbox.bodies import completion, completion_text
from tests.blackbox.server import COMPLETIONS, Server, running_server
from tests.blackbox.tiny import TinyChat

FLAGS = ("--dtype", "float32", "--kv-memory", "2MiB", "--parallel", "4", "--static-wait", "0.05")
BODIES = [
    completion([10 + i] * (1 + 9 * i), max_tokens=20 + 5 * i, ignore_eos=True, frequency_penalty=1.5) for i in range(10)
]


def answers(server: Server) -> list[str]:
    """The answers to all bodies, asked at once."""
    with ThreadPoolExecutor(len(BODIES)) as pool:
        return list(pool.map(lambda body: completion_text(server.answer(COMPLETIONS, body)), BODIES))


@pytest.fixture(scope="module")
def alone(chatty: TinyChat) -> list[str]:
    """The answers, one after the other."""
    with running_server(chatty.directory, *FLAGS) as server:
        texts = [completion_text(server.answer(COMPLETIONS, body)) for body in BODIES]
        assert len(set(texts)) == len(texts)
        assert answers(server) == texts, "continuous"
    return texts


@pytest.mark.parametrize("policy", ["dynamic", "static"])
def test_policies_give_the_same_answers(chatty: TinyChat, alone: list[str], policy: str) -> None:
    with running_server(chatty.directory, *FLAGS, "--scheduling", policy) as server:
        assert server.get("/props")["config"]["scheduling"] == policy
        assert answers(server) == alone
        # A batch is closed: who comes while it runs waits, though there are free slots.
        with server.open(COMPLETIONS, completion(stream=True, ignore_eos=True, max_tokens=8000)) as wire:
            next(wire.events())
            late = server.open(COMPLETIONS, completion(max_tokens=1))
            state = server.wait_for(lambda state: state["waiting"] == 1)
            assert state["running"] == 1
        assert late.response()[0] == 200
        late.close()
        server.check_serving()
