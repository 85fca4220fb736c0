"""A byte-level tokenizer for tests: token id = byte, 256 ends a text, 257 and 258 frame a message."""

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from servekit.engine.text.chat_template import ChatTemplate
from servekit.engine.text.tokenizer import Tokenizer

EOS = 256
VOCAB_SIZE = 259
_TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}:{{ m.content }}<|stop|>{% endfor %}<|start|>"


def byte_tokenizer() -> Tokenizer:
    """Every byte is a token, so token counts and texts can be written down by hand."""
    alphabet = {char: index for index, char in enumerate(_alphabet_in_byte_order())}
    backend = tokenizers.Tokenizer(models.BPE(vocab=alphabet, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|eos|>", "<|start|>", "<|stop|>"])
    return Tokenizer(backend, eos_token_ids=frozenset({EOS}), chat_template=ChatTemplate(_TEMPLATE, {}))


def _alphabet_in_byte_order() -> list[str]:
    """The character that stands for each byte."""
    spelt = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    by_byte: dict[int, str] = {}
    for char in map(chr, range(0x800)):
        ((spelling, _),) = spelt.pre_tokenize_str(char) if char else [("", (0, 0))]
        by_byte.update(zip(char.encode(), spelling, strict=True))
    others = [char for char in pre_tokenizers.ByteLevel.alphabet() if char not in by_byte.values()]
    # Bytes that no two-byte text has, in the order of their code points, which is byte order.
    missing = [byte for byte in range(256) if byte not in by_byte]
    by_byte.update(zip(missing, sorted(others), strict=True))
    return [by_byte[byte] for byte in range(256)]
