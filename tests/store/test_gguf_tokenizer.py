from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from servekit.errors import ModelError
from servekit.store.gguf_metadata import GgufFile
from servekit.store.gguf_tokenizer import gguf_chat_template, gguf_tokenizer, gguf_tokenizer_config
from tests.store.gguf_files import byte_level_vocabulary, sentencepiece_vocabulary, write_gguf


def tokenizer_of(path: Path) -> Tokenizer:
    with GgufFile(path) as file:
        return gguf_tokenizer(file)


def tokens(tokenizer: Tokenizer, text: str) -> list[str]:
    return list(tokenizer.encode(text).tokens)


def with_rule(tmp_path: Path, rule: str, **changes: Any) -> Tokenizer:
    vocabulary = byte_level_vocabulary() | {"pre": rule} | changes
    return tokenizer_of(write_gguf(tmp_path / f"{rule}.gguf", vocabulary=vocabulary))


def test_byte_level_merges_and_special_tokens(tmp_path: Path) -> None:
    tokenizer = with_rule(tmp_path, "smollm")
    assert tokens(tokenizer, "<|im_start|>hello he<|im_end|>") == [
        *("<|im_start|>", "he", "ll", "o", "Ġhe", "<|im_end|>"),
    ]
    assert tokenizer.token_to_id("<|im_end|>") == 2
    assert tokenizer.decode(tokenizer.encode("é → 日 😀").ids) == "é → 日 😀"


@pytest.mark.parametrize(
    ("rule", "text", "expected"),
    [
        # SmolLM's tokenizer parts every digit before anything else, so the space run before one stays whole.
        ("smollm", "  12", ["ĠĠ", "1", "2"]),
        ("gpt-2", "  12", ["Ġ", "Ġ", "12"]),
        ("qwen2", "  12", ["Ġ", "Ġ", "1", "2"]),
        ("llama-bpe", "  12", ["Ġ", "Ġ", "12"]),
        ("llama-bpe", "1231", ["123", "1"]),
        ("qwen2", "ab\n\n12", ["ab", "Ċ", "Ċ", "1", "2"]),
    ],
)
def test_each_splitting_rule(tmp_path: Path, rule: str, text: str, expected: list[str]) -> None:
    vocabulary = byte_level_vocabulary()
    merges = ["Ġ Ġ", "1 2", "12 3", "Ġ 1", "a b"]
    added = [merge.replace(" ", "") for merge in merges]
    tokenizer = with_rule(
        tmp_path,
        rule,
        merges=merges,
        tokens=vocabulary["tokens"] + added,
        types=vocabulary["types"] + [1] * len(added),
    )
    # The BOS that llama-bpe adds by default is not what this is about.
    assert tokenizer.encode(text, add_special_tokens=False).tokens == expected


def test_qwen_composes_characters(tmp_path: Path) -> None:
    tokenizer = with_rule(tmp_path, "qwen2")
    assert tokenizer.encode("e\u0301").ids == tokenizer.encode("\u00e9").ids


def test_llama3_takes_whole_words_from_the_vocabulary(tmp_path: Path) -> None:
    vocabulary = byte_level_vocabulary()
    tokenizer = with_rule(
        tmp_path, "llama-bpe", tokens=[*vocabulary["tokens"], "whole"], types=[*vocabulary["types"], 1]
    )
    assert tokenizer.encode("whole", add_special_tokens=False).tokens == ["whole"]


@pytest.mark.parametrize("rule", ["tekken", "gpt-4o", "made-up"])
def test_an_unknown_rule_is_named(tmp_path: Path, rule: str) -> None:
    with pytest.raises(ModelError, match=repr(rule)):
        with_rule(tmp_path, rule)


def test_bos_and_eos_follow_the_file(tmp_path: Path) -> None:
    def encoded(name: str, extra: dict[str, Any], rule: str = "smollm") -> list[str]:
        vocabulary = byte_level_vocabulary() | {"pre": rule}
        return tokens(tokenizer_of(write_gguf(tmp_path / f"{name}.gguf", vocabulary=vocabulary, extra=extra)), "o")

    assert encoded("silent", {}) == ["o"]
    assert encoded("no", {"tokenizer.ggml.add_bos_token": False}) == ["o"]
    assert encoded("bos", {"tokenizer.ggml.add_bos_token": True}) == ["<|im_start|>", "o"]
    assert encoded("eos", {"tokenizer.ggml.add_eos_token": True}) == ["o", "<|im_end|>"]
    assert encoded("llama3", {}, "llama-bpe") == ["<|im_start|>", "o"]


def test_sentencepiece_merges_follow_the_scores(tmp_path: Path) -> None:
    tokenizer = tokenizer_of(write_gguf(tmp_path / "m.gguf", vocabulary=sentencepiece_vocabulary()))
    # ▁h scores higher than hi, so the word-initial h joins its space before the i.
    assert tokens(tokenizer, "hi") == ["<s>", "▁hi"]
    assert tokens(tokenizer, "hihi") == ["<s>", "▁hi", "hi"]
    assert tokens(tokenizer, " hi") == ["<s>", "▁", "▁hi"]
    assert tokens(tokenizer, "é") == ["<s>", "▁", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer.encode("hi é").ids) == "hi é"


def test_gemma_spells_runs_of_spaces(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary()
    # As in Gemma's files: before the ordinary pieces, with real spaces, all of score 0.
    for column, values in (("tokens", ["  ", "\n\n", "\n"]), ("types", [4] * 3), ("scores", [0.0] * 3)):
        vocabulary[column][259:259] = values
    path = write_gguf(
        tmp_path / "m.gguf",
        architecture="gemma3",
        vocabulary=vocabulary,
        extra={"tokenizer.ggml.add_space_prefix": False},
    )
    tokenizer = tokenizer_of(path)
    assert tokens(tokenizer, "hi  hi\n\n\nhi") == ["<s>", "hi", "▁▁", "hi", "\n\n", "\n", "hi"]
    assert tokenizer.decode(tokenizer.encode(" hi  \n\nhi").ids) == " hi  \n\nhi"


def test_gemma_takes_the_longest_run_of_spaces_first(tmp_path: Path) -> None:
    vocabulary = sentencepiece_vocabulary()
    for column, values in (("tokens", ["  ", "   ", "    "]), ("types", [4] * 3), ("scores", [-1000.0] * 3)):
        vocabulary[column][259:259] = values
    path = write_gguf(
        tmp_path / "m.gguf",
        architecture="gemma3",
        vocabulary=vocabulary,
        extra={"tokenizer.ggml.add_space_prefix": False},
    )
    tokenizer = tokenizer_of(path)
    # Joining pairs first would end in runs of four, two and three.
    assert tokens(tokenizer, " " * 9) == ["<s>", "▁▁▁▁", "▁▁▁▁", "▁"]
    assert tokens(tokenizer, " " * 5 + "hi") == ["<s>", "▁▁▁▁", "▁hi"]
    assert tokenizer.decode(tokenizer.encode(" " * 7 + "hi").ids) == " " * 7 + "hi"


def test_a_tokenizer_of_another_kind_is_named(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="'bert'"):
        tokenizer_of(write_gguf(tmp_path / "m.gguf", vocabulary=byte_level_vocabulary() | {"model": "bert"}))


def test_merges_of_unknown_tokens_are_a_clear_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="cannot be built"):
        with_rule(tmp_path, "gpt-2", merges=["no such"])


def test_the_settings_name_the_special_tokens(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", chat_template="{{ x }}")
    with GgufFile(path) as file:
        assert gguf_tokenizer_config(file) == {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "clean_up_tokenization_spaces": False,
            "bos_token": "<|im_start|>",
            "eos_token": "<|im_end|>",
            "unk_token": "<|endoftext|>",
            "add_bos_token": False,
            "add_eos_token": False,
            "model_max_length": 128,
        }
        assert gguf_chat_template(file) == "{{ x }}"


def test_a_token_id_outside_the_vocabulary_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", vocabulary=byte_level_vocabulary() | {"eos": 100_000})
    with GgufFile(path) as file, pytest.raises(ModelError, match="names token 100000"):
        gguf_tokenizer_config(file)
