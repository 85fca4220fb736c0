"""A server that only embeds, as a process, and a chat model with an embedding model beside it."""

import base64
import itertools
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from openai import OpenAI

from tests.blackbox.server import CHAT, Server, running_server, wait_until
from tests.blackbox.tiny import TinyChat
from tests.blackbox.tiny_embedder import LIMIT, SIZE, TinyEmbedder, make_embedder

EMBEDDINGS = "/v1/embeddings"
WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "one", "two", "three", "rained", "নদী", "গান"]
TEXTS = ["cat", "the cat sat on the mat", "one two three four five six seven eight", "নদী গান", "it rained " * 14]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyEmbedder:
    prompts = {"prompts": {"query": "one two ", "document": ""}, "matryoshka_dimensions": [16, 32]}
    return make_embedder(tmp_path_factory.mktemp("models") / "embedder", settings=prompts)


@pytest.fixture(scope="module")
def process(tiny: TinyEmbedder) -> Iterator[Server]:
    with running_server(tiny.directory, "--dtype", "float32") as server:
        yield server


@pytest.fixture
def server(process: Server) -> Iterator[Server]:
    """The module's process, which must be as good after the test as before it."""
    yield process
    assert process.get("/health") == {"status": "ok"}
    assert len(_vectors(process, "cat")) == 1
    assert process.state["open"] == 0


def _vectors(server: Server, given: Any, **fields: Any) -> list[list[float]]:
    data = server.answer(EMBEDDINGS, {"input": given, **fields})["data"]
    assert [row["index"] for row in data] == list(range(len(data)))
    return [row["embedding"] for row in data]


def _close(actual: Any, expected: Any) -> None:
    single = torch.float32
    actual, expected = torch.as_tensor(actual, dtype=single), torch.as_tensor(expected, dtype=single)
    torch.testing.assert_close(actual, expected, atol=1e-5, rtol=0)


def _refused(server: Server, path: str, body: Any) -> tuple[int, Any, Any]:
    response = server.post(path, body)
    error = response.json()["error"]
    return response.status_code, error["param"], error["code"]


def test_base64_is_the_same_numbers_and_float_is_the_default(server: Server) -> None:
    (plain,) = _vectors(server, "cat")
    (same,) = _vectors(server, "cat", encoding_format="float")
    (packed,) = _vectors(server, "cat", encoding_format="base64")
    assert plain == same
    assert isinstance(packed, str)
    assert list(struct.unpack(f"<{SIZE}f", base64.b64decode(packed))) == plain
    assert _refused(server, EMBEDDINGS, {"input": "x", "encoding_format": "hex"})[:2] == (400, "encoding_format")


def test_a_string_a_list_and_token_ids(server: Server, tiny: TinyEmbedder) -> None:
    text = "the cat sat"
    answer = server.answer(EMBEDDINGS, {"input": text})
    assert answer["object"] == "list"
    assert answer["model"] == "embedder"
    num_tokens = len(tiny.ids(text))
    assert answer["usage"] == {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    expected = answer["data"][0]["embedding"]
    whole, bare = tiny.ids(text), tiny.ids(text)[1:-1]
    for given in ([text], whole, bare, [whole], [bare]):
        _close(_vectors(server, given), [expected])
    assert len(_vectors(server, [1, 2, 3])) == 1
    assert len(_vectors(server, [[1, 2], [3]])) == 2
    # Special tokens that ids come without are added, and counted.
    assert server.answer(EMBEDDINGS, {"input": [5, 6, 7]})["usage"]["prompt_tokens"] == 5


@pytest.mark.parametrize(
    "given", [["a", [1]], [1, [1]], [1.0], [True], [10_000], [-1], [[-1]], [], [[]], "", ["a", ""], 7, None, [None]]
)
def test_what_is_no_input_is_refused(server: Server, given: Any) -> None:
    status, param, _ = _refused(server, EMBEDDINGS, {"input": given})
    assert status == 400
    assert param.startswith("input")


def test_more_inputs_than_one_request_may_have(server: Server) -> None:
    assert len(_vectors(server, ["cat"] * 2048, encoding_format="base64")) == 2048
    assert _refused(server, EMBEDDINGS, {"input": ["cat"] * 2049})[:2] == (400, "input")


def test_alone_together_and_reversed_are_the_oracles_vectors(server: Server, tiny: TinyEmbedder) -> None:
    expected = tiny.vectors(TEXTS)
    together = server.answer(EMBEDDINGS, {"input": TEXTS})
    alone = [server.answer(EMBEDDINGS, {"input": text}) for text in TEXTS]
    _close([row["embedding"] for row in together["data"]], expected)
    _close([one["data"][0]["embedding"] for one in alone], expected)
    _close(_vectors(server, TEXTS[::-1]), expected.flip(0))
    sums = sum(one["usage"]["prompt_tokens"] for one in alone)
    assert together["usage"]["prompt_tokens"] == sums == sum(len(tiny.ids(text)) for text in TEXTS)


def test_too_long_is_refused_with_both_numbers_and_cut_only_on_request(server: Server, tiny: TinyEmbedder) -> None:
    fits = "cat " * (LIMIT - 2)
    assert len(tiny.ids(fits)) == LIMIT
    _close(_vectors(server, fits), tiny.vectors([fits]))
    for num_words, given, index in (
        (LIMIT - 1, "cat " * (LIMIT - 1), 0),
        (4 * LIMIT - 2, ["cat", "cat " * (4 * LIMIT - 2), "mat"], 1),
    ):
        response = server.post(EMBEDDINGS, {"input": given})
        error = response.json()["error"]
        assert (response.status_code, error["param"], error["code"]) == (400, "input", "context_length_exceeded")
        assert (error["n_prompt_tokens"], error["n_ctx"]) == (num_words + 2, LIMIT)
        assert f"input[{index}]" in error["message"]
    long = "mat " + fits + "sat"
    _close(_vectors(server, long, truncate=True), tiny.vectors(["mat " + "cat " * (LIMIT - 3)]))
    left = _vectors(server, long, truncate=True, truncation_direction="left")
    _close(left, tiny.vectors(["cat " * (LIMIT - 3) + "sat"]))
    alone = {"input": "cat", "truncation_direction": "left"}
    assert _refused(server, EMBEDDINGS, alone)[:2] == (400, "truncation_direction")


def test_queries_and_documents_have_their_prompts(server: Server, tiny: TinyEmbedder) -> None:
    _close(_vectors(server, "cat", input_type="query"), tiny.vectors(["one two cat"]))
    _close(_vectors(server, "cat", input_type="document"), tiny.vectors(["cat"]))


def test_vectors_are_cut_and_then_normalised(server: Server, tiny: TinyEmbedder) -> None:
    expected = torch.nn.functional.normalize(tiny.vectors(TEXTS)[:, :16], dim=-1)
    _close(_vectors(server, TEXTS, dimensions=16), expected)
    _close(_vectors(server, TEXTS, dimensions=SIZE), tiny.vectors(TEXTS))
    for size in (17, SIZE + 1, 0):
        assert _refused(server, EMBEDDINGS, {"input": "cat", "dimensions": size})[:2] == (400, "dimensions")


def test_an_embedding_server_does_not_write_and_does_not_score(server: Server) -> None:
    messages = [{"role": "user", "content": "hi"}]
    assert _refused(server, CHAT, {"messages": messages}) == (400, "model", "unsupported_value")
    assert _refused(server, "/v1/completions", {"prompt": "hi"}) == (400, "model", "unsupported_value")
    pairs = {"query": "cat", "documents": ["mat"]}
    assert _refused(server, "/rerank", pairs) == (400, "model", "unsupported_value")
    assert _refused(server, EMBEDDINGS, {"model": "other", "input": "x"}) == (404, "model", "model_not_found")


def test_similarity_ranks_only_when_it_is_asked_for(server: Server, tiny: TinyEmbedder) -> None:
    documents = ["mat", "cat", "it rained"]
    query = tiny.vectors(["one two cat"])
    expected = (tiny.vectors(documents) @ query.T)[:, 0].tolist()
    body = {"query": "cat", "documents": documents, "method": "similarity", "return_documents": True}
    results = server.answer("/v1/rerank", body)["results"]
    assert [r["index"] for r in results] == sorted(range(3), key=lambda i: -expected[i])
    assert [r["document"] for r in results] == [{"text": documents[r["index"]]} for r in results]
    _close([r["relevance_score"] for r in results], sorted(expected, reverse=True))
    scores = server.answer("/score", {"text_1": "cat", "text_2": documents, "method": "similarity"})["data"]
    _close([s["score"] for s in scores], expected)


def test_the_openai_client(server: Server, tiny: TinyEmbedder) -> None:
    with OpenAI(base_url=f"{server.url}/v1", api_key="none") as client:
        answer = client.embeddings.create(model="embedder", input=TEXTS)
        _close([row.embedding for row in answer.data], tiny.vectors(TEXTS))


def test_models_props_and_metrics(server: Server) -> None:
    (model,) = server.get("/v1/models")["data"]
    assert (model["id"], model["max_model_len"]) == ("embedder", LIMIT)
    props = server.get("/props")
    about = props["embedding"]
    assert (about["task"], about["family"], about["size"], about["max_tokens"]) == ("embed", "bert", SIZE, LIMIT)
    assert props["reasons"]["pooling"] == "mean: 1_Pooling/config.json"
    before = props["embedding_state"]
    server.answer(EMBEDDINGS, {"input": ["cat", "mat"]})
    after = server.get("/props")["embedding_state"]
    assert (after["sequences"] - before["sequences"], after["tokens"] - before["tokens"]) == (2, 6)
    assert (after["last_sequences"], after["last_tokens"]) == (2, 6)
    assert all(after[name] > 0 for name in ("queue_seconds", "device_seconds", "tokenise_seconds"))
    text = server.http.get("/metrics").text
    assert 'servekit:embedding_batch_tokens{model_name="embedder"} 6.0' in text
    assert "servekit:embedding_tokenise_seconds_total" in text


def test_a_client_that_leaves_takes_its_texts_along(server: Server) -> None:
    wire = server.open(EMBEDDINGS, {"input": ["cat " * 60] * 2048})
    wait_until(lambda: server.state["open"] == 1, lambda: "the request never arrived")
    wire.close()
    wait_until(lambda: server.state["open"] == 0, lambda: "the request stayed")
    # The engine hears of it between two steps.
    wait_until(lambda: server.get("/props")["embedding_state"]["waiting"] == 0, lambda: "its texts stayed in line")


@pytest.mark.parametrize(("pooling", "normalise"), [("cls", True), ("lasttoken", True), ("mean", False)])
def test_the_files_decide_the_pooling_and_the_length(tmp_path: Path, pooling: str, normalise: bool) -> None:
    tiny = make_embedder(tmp_path / "other", pooling=pooling, normalise=normalise)
    with running_server(tiny.directory, "--dtype", "float32") as server:
        vectors = np.array(_vectors(server, TEXTS))
        lengths = np.linalg.norm(vectors, axis=1, keepdims=True)
        assert np.allclose(lengths, 1, atol=1e-5) is normalise
        _close(vectors / lengths, tiny.vectors(TEXTS, pooling))
        assert _refused(server, EMBEDDINGS, {"input": "x", "dimensions": 16}) == (
            400,
            "dimensions",
            "unsupported_value",
        )


def test_a_cross_encoder_scores_pairs_and_embeds_nothing(tmp_path: Path) -> None:
    tiny = make_embedder(tmp_path / "scorer", head="AutoModelForSequenceClassification", num_labels=1)
    documents = ["the mat", "cat", "one two three four " * 3]
    expected = tiny.scores([("the cat sat", document) for document in documents])
    with running_server(tiny.directory, "--dtype", "float32") as server:
        body: dict[str, Any] = {"query": "the cat sat", "documents": [{"text": documents[0]}, *documents[1:]]}
        answer = server.answer("/rerank", body)
        order = sorted(range(3), key=lambda i: -expected[i])
        assert [r["index"] for r in answer["results"]] == order
        _close([r["relevance_score"] for r in answer["results"]], [expected[i] for i in order])
        assert [r["index"] for r in server.answer("/v1/rerank", {**body, "top_n": 1})["results"]] == order[:1]
        one = server.answer("/score", {"text_1": ["the cat sat"] * 3, "text_2": documents})
        _close([s["score"] for s in one["data"]], expected)
        assert _refused(server, "/score", {"text_1": ["a"] * 2, "text_2": documents})[:2] == (400, "text_1")
        assert _refused(server, EMBEDDINGS, {"input": "x"}) == (400, "model", "unsupported_value")
        long = {"query": "cat", "documents": ["mat", "cat " * 200]}
        assert _refused(server, "/rerank", long) == (400, "documents", "context_length_exceeded")
        assert len(server.answer("/rerank", {**long, "truncate": True})["results"]) == 2


def test_chat_and_embeddings_from_one_process(chatty: TinyChat, tiny: TinyEmbedder) -> None:
    flags = ("--embedding-model", str(tiny.directory), "--dtype", "float32")
    with running_server(chatty.directory, *flags) as server:
        assert [model["id"] for model in server.get("/v1/models")["data"]] == ["chatty", "embedder"]
        _close(_vectors(server, TEXTS, model="embedder"), tiny.vectors(TEXTS))
        chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 8, "ignore_eos": True}
        assert _refused(server, EMBEDDINGS, {"model": "chatty", "input": "x"}) == (400, "model", "unsupported_value")
        assert _refused(server, CHAT, {**chat, "model": "embedder"}) == (400, "model", "unsupported_value")
        alone = server.answer(CHAT, {**chat, "max_tokens": 300, "temperature": 0})
        beside: list[Any] = []
        writer = threading.Thread(
            target=lambda: beside.append(server.answer(CHAT, {**chat, "max_tokens": 300, "temperature": 0}))
        )
        writer.start()
        many = [" ".join(itertools.islice(itertools.cycle(WORDS), i % 20 + 1)) for i in range(400)]
        _close(_vectors(server, many), tiny.vectors(many))
        writer.join()
        assert beside[0]["choices"] == alone["choices"]
        server.check_serving()


def test_prompts_are_logged_only_where_that_was_asked_for(tiny: TinyEmbedder) -> None:
    for flags, is_there in (((), False), (("--log-prompts",), True), (("--log-prompts", "--log-format", "json"), True)):
        with running_server(tiny.directory, *flags, "--api-key", "hidden", env={}) as server:
            key = {"authorization": "Bearer hidden"}
            body = {"input": "the secret cat\nsat"}
            assert server.http.post(EMBEDDINGS, json=body, headers=key).status_code == 200
            server.wait_for_log(EMBEDDINGS)
            log = server.log
        assert ("the secret cat" in log) is is_there
        assert "hidden" not in log


def test_a_chat_server_embeds_nothing_and_stays_well(chatty: TinyChat) -> None:
    with running_server(chatty.directory) as server:
        assert _refused(server, EMBEDDINGS, {"input": "x"}) == (400, "model", "unsupported_value")
        assert _refused(server, "/rerank", {"query": "x", "documents": ["y"]}) == (400, "model", "unsupported_value")
        server.check_serving()
