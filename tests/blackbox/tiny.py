"""Two tiny random models with real tokenizers, written as a user would have them on disk.

Random weights make a byte-level tokenizer emit arbitrary bytes, so every answer is a fuzzer of the text path. CHATTY
takes any role and has a BOS token that both its tokenizer and its template put first; STRICT has no BOS and a template
that refuses system messages, tools and two turns of one role in a row.
"""

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers.convert_slow_tokenizer import bytes_to_unicode

from tests.engine.families import make_tiny

CONTEXT = 8192
BOS, START, END = "<|bos|>", "<|im_start|>", "<|im_end|>"
BYTES_PER_TOKEN = 512
"""Keys and values of one token in float32: 2 layers x 2 x 2 heads x 16 x 4 bytes."""

_TURNS = (
    "{% for message in messages %}{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
CHATTY_TEMPLATE = "{{ bos_token }}" + _TURNS
STRICT_TEMPLATE = (
    "{% for message in messages %}"
    "{% if message.role not in ('user', 'assistant') %}"
    "{{ raise_exception('no role but user and assistant, please') }}{% endif %}"
    "{% if (message.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('turns must alternate') }}{% endif %}{% endfor %}"
) + _TURNS

_TRAINING = [
    "the cat sat on the mat and the other cats sat there",
    "এক দুই তিন, আমি বাংলায় গান গাই",
    "日本語の文字、日本の本",
    "😀 😃 😄 👨‍👩‍👧 é è ê",
    "system user assistant messages answer answers",
]


@dataclass(frozen=True)
class TinyChat:
    """A model folder, and its tokenizer to compute what must come out."""

    directory: Path
    tokenizer: Tokenizer

    def ids(self, text: str) -> list[int]:
        """Token ids of a text, without BOS; spellings of special tokens become those tokens."""
        ids: list[int] = self.tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def id_of(self, token: str) -> int:
        """The id of one token, which must exist."""
        token_id = self.tokenizer.token_to_id(token)
        assert token_id is not None
        return int(token_id)

    def byte_ids(self, text: str) -> list[int]:
        """The ids of the single-byte tokens that spell `text`."""
        alphabet = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        return [self.id_of(char) for char in alphabet.pre_tokenize_str(text)[0][0]]

    def bytes_of(self, token_ids: Iterable[int]) -> bytes:
        """What ordinary tokens stand for."""
        byte_of: dict[str, int] = {char: byte for byte, char in bytes_to_unicode().items()}  # type: ignore[no-untyped-call]
        return bytes(byte_of[char] for token_id in token_ids for char in self.tokenizer.id_to_token(token_id) or "")

    def text(self, token_ids: list[int]) -> str:
        """Tokens as text, special ones included."""
        text: str = self.tokenizer.decode(token_ids, skip_special_tokens=False)
        return text


def make_chatty(directory: Path) -> TinyChat:
    """Write the model that takes everything."""
    return _make(directory, CHATTY_TEMPLATE, has_bos=True)


def make_strict(directory: Path) -> TinyChat:
    """Write the model whose template refuses much."""
    return _make(directory, STRICT_TEMPLATE, has_bos=False)


def make_with_tools(directory: Path, template: str, control: list[AddedToken]) -> TinyChat:
    """Write a model with a template of its own, and with more control tokens."""
    return _make(directory, template, has_bos=False, control=control)


def _make(directory: Path, template: str, *, has_bos: bool, control: Iterable[AddedToken] = ()) -> TinyChat:
    tokenizer = _train(has_bos=has_bos)
    tokenizer.add_special_tokens(list(control))
    end = tokenizer.token_to_id(END)
    directory.mkdir(parents=True)
    make_tiny(
        "llama",
        directory,
        vocab_size=tokenizer.get_vocab_size(),
        num_hidden_layers=2,
        max_position_embeddings=CONTEXT,
        bos_token_id=tokenizer.token_to_id(BOS),
        eos_token_id=end,
        pad_token_id=end,
    )
    tokenizer.save(str(directory / "tokenizer.json"))
    settings: dict[str, Any] = {"chat_template": template, "eos_token": END, "pad_token": END}
    settings |= {"bos_token": BOS} if has_bos else {"add_bos_token": False, "bos_token": START}
    _write_json(directory / "tokenizer_config.json", settings)
    _write_json(directory / "generation_config.json", {"eos_token_id": [end]})
    return TinyChat(directory, tokenizer)


def _train(*, has_bos: bool) -> Tokenizer:
    """Byte-level BPE with a hundred merges, so that tokens cross both characters and words."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [AddedToken(text, special=True) for text in ([BOS] if has_bos else []) + [START, END]]
    trainer = trainers.BpeTrainer(
        vocab_size=256 + len(special) + 100,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_TRAINING, trainer)
    if has_bos:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{BOS} $A", special_tokens=[(BOS, tokenizer.token_to_id(BOS))]
        )
    return tokenizer


def _write_json(file: Path, content: dict[str, Any]) -> None:
    file.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
