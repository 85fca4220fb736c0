"""What is asked: prompts and lengths, each a matter of the seed alone."""

from collections import Counter
from itertools import islice
from pathlib import Path

import msgspec
import pytest

from servekit.bench.bodies import BodyMaker
from servekit.bench.workload import output_lengths, parse_outputs, read_prompts
from servekit.errors import ConfigError


def test_lengths_are_balanced_and_independent_of_prompts() -> None:
    lengths = list(islice(output_lengths([32, 64, 128], seed=3), 300))

    assert Counter(lengths) == {32: 100, 64: 100, 128: 100}
    assert lengths[:30] != [32, 64, 128] * 10
    assert lengths == list(islice(output_lengths([32, 64, 128], seed=3), 300))


@pytest.mark.parametrize("name", ["en", "bn"])
def test_builtin_prompts_come_all_before_any_comes_again(name: str) -> None:
    source = read_prompts(f"builtin:{name}")
    found = list(islice(source.prompts(0, 0, "1"), len(source.texts)))

    assert len(source.texts) >= 20
    assert sorted(found) == sorted(source.texts)
    assert found == list(islice(source.prompts(0, 0, "2"), len(source.texts)))


def test_random_prompts_have_as_many_words_as_asked_and_differ_between_rates() -> None:
    source = read_prompts("random:50")
    at_one, at_two = (list(islice(source.prompts(0, 0, point), 3)) for point in ("1", "2"))

    assert [len(prompt.split()) for prompt in at_one] == [50, 50, 50]
    assert not set(at_one) & set(at_two)
    assert at_one == list(islice(source.prompts(0, 0, "1"), 3))


def test_prompts_from_files(tmp_path: Path) -> None:
    text, lines = tmp_path / "a.txt", tmp_path / "a.jsonl"
    text.write_text("one\n\ntwo\n", encoding="utf-8")
    lines.write_text('"one"\n{"prompt": "two"}\n{"text": "ক"}\n', encoding="utf-8")

    assert read_prompts(str(text)).texts == ("one", "two")
    assert read_prompts(str(lines)).texts == ("one", "two", "ক")


@pytest.mark.parametrize("source", ["builtin:xx", "random:", "random:0", "random:-3", "missing.txt"])
def test_an_unknown_source_is_refused(source: str) -> None:
    with pytest.raises(ConfigError, match="--prompts"):
        read_prompts(source)


@pytest.mark.parametrize("text", ["", "0", "32,", "x", "-4", "1.5"])
def test_output_lengths_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--outputs"):
        parse_outputs(text)


def test_a_chat_body_asks_for_its_length_and_for_usage() -> None:
    body = msgspec.json.decode(BodyMaker("chat", "m").make(iter(["hello"]), 32))

    assert body == {
        "model": "m",
        "messages": [{"role": "user", "content": "hello"}],
        "max_tokens": 32,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "ignore_eos": True,
    }


def test_a_salt_is_unique_and_stands_at_the_beginning() -> None:
    maker = BodyMaker("completions", "m", "servekit", is_salted=True)
    first, second = (msgspec.json.decode(maker.make(iter(["hello"]), 8)) for _ in range(2))

    assert first["prompt"].endswith("] hello")
    assert first["prompt"][:10] != second["prompt"][:10]
    assert first["cache_salt"] in first["prompt"]


def test_what_a_server_refused_is_left_out_and_extra_fields_win() -> None:
    maker = BodyMaker("chat", "m", extra={"temperature": 1.0, "top_p": 0.5}, left_out={"ignore_eos"})
    body = msgspec.json.decode(maker.make(iter(["hello"]), 8))

    assert "ignore_eos" not in body
    assert (body["temperature"], body["top_p"]) == (1.0, 0.5)


def test_rerank_takes_the_next_prompts_as_documents() -> None:
    body = msgspec.json.decode(BodyMaker("rerank", "m").make(iter("abcdefg"), 8))

    assert body == {"model": "m", "query": "a", "documents": ["b", "c", "d", "e"]}
