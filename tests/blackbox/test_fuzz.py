"""Bodies that nobody would write, on every route that reads one: never a 5xx, never a hang, nothing left behind.

FUZZ_EXAMPLES in the environment sets how many.
"""

import json
import os
from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.blackbox.server import Server, running_server
from tests.blackbox.test_tools import HERMES, TOOLS
from tests.blackbox.tiny import make_with_tools
from tests.blackbox.tiny_embedder import make_embedder

NUM_EXAMPLES = int(os.environ.get("FUZZ_EXAMPLES", "5000"))
CONTEXT = 96

scalars = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-3, 300),
    st.sampled_from([2**31, 2**63, -(2**63) - 1, 10**30, 1e308, -0.0, 1e-320]),
    st.floats(allow_nan=False, allow_infinity=False),
    st.text(max_size=12),
    st.sampled_from(
        ["", "text", "json_schema", "json_object", "function", "user", "<|im_end|>", "\x00", "\ufdd0x\ufdd1"]
    ),
)
junk = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
schemas = st.recursive(
    st.sampled_from(
        [
            {},
            True,
            {"type": "integer"},
            {"type": "string", "maxLength": 3},
            {"enum": ["a", 1, None]},
            {"const": {"a": []}},
            {"type": "wizard"},
            {"type": "string", "pattern": "("},
            {"type": "string", "pattern": "^(a|b)*c{2,9}$"},
            {"$ref": "#"},
            {"$ref": "#/$defs/none"},
            {"minimum": 5, "maximum": 1, "type": "number"},
        ]
    ),
    lambda inner: st.one_of(
        st.builds(lambda s: {"type": "array", "items": s, "maxItems": 2}, inner),
        st.builds(lambda s: {"type": "object", "properties": {"a": s}, "required": ["a"]}, inner),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
        st.builds(lambda a, b: {"allOf": [a, b]}, inner, inner),
        st.builds(lambda s: {"not": s}, inner),
    ),
    max_leaves=4,
)
formats = st.one_of(
    junk,
    st.just({"type": "json_object"}),
    st.builds(lambda s: {"type": "json_schema", "json_schema": {"name": "x", "schema": s}}, schemas),
)
tools = st.one_of(
    junk,
    st.just(TOOLS),
    st.lists(
        st.builds(
            lambda n, s: {"type": "function", "function": {"name": n, "parameters": s}},
            st.sampled_from(["f", "g", "a b", ""]),
            schemas,
        ),
        max_size=3,
    ),
)
content = st.one_of(
    st.text(max_size=20),
    st.lists(st.builds(lambda t: {"type": "text", "text": t}, st.text(max_size=9)), max_size=3),
    junk,
)
message = st.one_of(
    st.builds(
        lambda role, text: {"role": role, "content": text},
        st.sampled_from(["user", "assistant", "system", "tool", "developer", "x"]),
        content,
    ),
    junk,
)
good_messages = st.lists(st.builds(lambda text: {"role": "user", "content": text}, st.text(max_size=9)), min_size=1)
messages = st.one_of(*[good_messages] * 4, st.lists(message, min_size=1, max_size=4), junk)
sampling = {
    "temperature": st.floats(-1, 3) | junk,
    "top_p": st.floats(-0.5, 1.5) | junk,
    "top_k": st.integers(-2, 500) | junk,
    "min_p": st.floats(-0.5, 1.5) | junk,
    "n": st.integers(0, 4) | junk,
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=2), max_size=18) | junk,
    "stop_token_ids": st.lists(st.integers(-1, 400), max_size=3) | junk,
    "min_tokens": st.integers(-1, 9) | junk,
    "ignore_eos": st.booleans() | junk,
    "presence_penalty": st.floats(-3, 3) | junk,
    "frequency_penalty": st.floats(-3, 3) | junk,
    "repetition_penalty": st.floats(-1, 3) | junk,
    "logit_bias": st.dictionaries(st.integers(-1, 400).map(str), st.floats(-120, 120), max_size=3) | junk,
    "seed": st.integers() | junk,
    "priority": st.integers(-9, 9) | junk,
    "cache_salt": st.text(max_size=4) | junk,
    "return_token_ids": st.booleans() | junk,
    "stream_options": st.just({"include_usage": True}) | junk,
    "response_format": formats,
    "regex": st.sampled_from(["a+", "[", "(a|b){3}", ""]) | junk,
    "grammar": st.sampled_from(['root ::= "a"', 'start: "a"*', "root ::= root", "\x00"]) | junk,
    "choice": st.lists(st.text(max_size=3), max_size=3) | junk,
    "user": junk,
    "metadata": junk,
    "suffix": junk,
    "wizard": junk,
}
chat_only = {
    "logprobs": st.booleans() | junk,
    "top_logprobs": st.integers(-1, 22) | junk,
    "max_completion_tokens": st.integers(0, 8) | junk,
    "tools": tools,
    "tool_choice": st.sampled_from(["none", "auto", "required", {"type": "function", "function": {"name": "f"}}])
    | junk,
    "parallel_tool_calls": st.booleans() | junk,
}
prompt = st.one_of(
    st.text(max_size=30), st.lists(st.integers(-1, 400), max_size=9), st.lists(st.text(max_size=9), max_size=3), junk
)


texts = st.one_of(
    st.text(max_size=20),
    st.lists(st.text(max_size=9), max_size=4),
    st.lists(st.integers(-1, 400), max_size=9),
    st.lists(st.lists(st.integers(-1, 400), max_size=4), max_size=3),
    junk,
)
similarity = st.just("similarity")
to_embed = {
    "truncate": st.booleans() | junk,
    "truncation_direction": st.sampled_from(["left", "right"]) | junk,
    "wizard": junk,
}


def body(required: dict[str, Any], optional: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Mostly few fields: with many, nearly every body is refused for the first of them."""
    few = st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True)
    return few.flatmap(lambda names: st.fixed_dictionaries(required | {name: optional[name] for name in names}))


stream = {"stream": st.booleans()}
small = {"max_tokens": st.one_of(*[st.integers(1, 6)] * 4, st.integers(-1, 200), junk)}
requests = st.one_of(
    st.tuples(st.just("/v1/chat/completions"), body({"messages": messages, **stream, **small}, sampling | chat_only)),
    st.tuples(
        st.just("/v1/completions"),
        body(
            {"prompt": prompt, **stream, **small},
            sampling | {"echo": st.booleans() | junk, "logprobs": st.integers(-1, 9)},
        ),
    ),
    st.tuples(st.just("/v1/preflight"), body({"messages": messages, **small}, sampling | chat_only)),
    st.tuples(st.just("/v1/preflight"), body({"prompt": prompt, **small}, sampling)),
    st.tuples(
        st.just("/v1/responses"),
        body(
            {"input": content | messages, **stream, "max_output_tokens": small["max_tokens"]},
            {
                "text": st.builds(lambda f: {"format": f}, formats) | junk,
                "tools": junk,
                "instructions": st.text(max_size=5) | junk,
                "store": junk,
                "include": junk,
                "tool_choice": junk,
            },
        ),
    ),
    st.tuples(
        st.just("/v1/messages"),
        body(
            {"model": st.just("tiny"), "messages": messages, **stream, **small},
            {
                "system": content,
                "stop_sequences": st.lists(st.text(max_size=2), max_size=3) | junk,
                "tools": st.builds(lambda s: [{"name": "f", "input_schema": s}], schemas) | junk,
                "tool_choice": st.sampled_from([{"type": "any"}, {"type": "tool", "name": "f"}]) | junk,
                "thinking": junk,
            },
        ),
    ),
    st.tuples(st.just("/tokenize"), body({"prompt": content}, {"messages": messages, "add_special_tokens": junk})),
    st.tuples(
        st.just("/detokenize"), body({"tokens": st.lists(st.integers(-1, 400), max_size=9) | junk}, {"model": junk})
    ),
    st.tuples(
        st.just("/v1/embeddings"),
        body(
            {"input": texts},
            {
                "encoding_format": st.sampled_from(["float", "base64", "hex"]) | junk,
                "dimensions": st.integers(-1, 70) | junk,
                "input_type": st.sampled_from(["query", "document"]) | junk,
                "model": st.sampled_from(["tiny", "embedder"]) | junk,
                **to_embed,
            },
        ),
    ),
    st.tuples(
        st.sampled_from(["/rerank", "/v1/rerank"]),
        body(
            {"query": st.text(max_size=9) | junk, "documents": texts, "method": similarity},
            {"top_n": st.integers(-1, 5) | junk, "return_documents": st.booleans() | junk, "method": junk, **to_embed},
        ),
    ),
    st.tuples(
        st.just("/score"), body({"text_1": texts, "text_2": texts, "method": similarity}, {"method": junk, **to_embed})
    ),
    st.tuples(st.sampled_from(["/v1/chat/completions", "/v1/messages", "/tokenize", "/v1/embeddings", "/score"]), junk),
)
pieces = st.sampled_from([b"", b"\xff", b"{", b"]", b'"', b"\\u", b"1e999", b"\x00"])
mutations = st.one_of(*[st.just([])] * 4, st.lists(st.tuples(st.floats(0, 1), pieces), max_size=2))


@pytest.fixture(scope="module")
def process(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("fuzz")
    model = make_with_tools(folder / "tiny", HERMES, [])
    embedder = make_embedder(folder / "embedder")
    flags = (
        "--dtype",
        "float32",
        "--kv-memory",
        "2MiB",
        "--max-model-len",
        str(CONTEXT),
        "--served-model-name",
        "tiny",
        "--embedding-model",
        str(embedder.directory),
    )
    with running_server(model.directory, *flags, "--log-level", "warning") as server:
        yield server


def test_nothing_makes_the_server_fail(server: Server) -> None:
    seen: dict[int, int] = {}

    @settings(max_examples=NUM_EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(requests, mutations)
    def ask(request: tuple[str, Any], changes: list[tuple[float, bytes]]) -> None:
        path, fields = request
        raw = json.dumps(fields, ensure_ascii=True).encode()
        for where, piece in changes:
            at = int(where * len(raw))
            raw = raw[:at] + piece + raw[at + 1 :]
        response = server.http.post(path, content=raw, headers={"content-type": "application/json"})
        seen[response.status_code] = seen.get(response.status_code, 0) + 1
        check(response, (path, raw))

    ask()
    assert seen.get(200, 0) > NUM_EXAMPLES // 20, seen
    assert "Traceback" not in server.log, server.log_tail
    server.wait_idle()


def check(response: httpx.Response, asked: Any) -> None:
    """Raise AssertionError unless it is an answer, or a refusal in the API's shape."""
    assert response.status_code < 500, (asked, response.text)
    if response.status_code != 200:
        fields = {"message", "type"} if asked[0] == "/v1/messages" else {"message", "type", "param", "code"}
        assert fields <= set(response.json()["error"]), asked
    elif response.headers["content-type"].startswith("text/event-stream"):
        assert '"error"' not in response.text or '"error":null' in response.text, (asked, response.text)
    else:
        response.json()
