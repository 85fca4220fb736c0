"""Text to token ids and token ids to text, for one model. It must not know requests, HTTP or tensors.

A thin layer over the `tokenizers` library: it settles which tokens begin and end a text, keeps client text from
becoming control tokens in a chat, and knows the bytes behind each token. Nothing here changes after loading except
caches, so one Tokenizer serves all threads.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Self, cast

import tokenizers

from servekit.engine.spec.json_files import read_json_if_there
from servekit.engine.text.chat_template import ChatTemplate, Message, load_chat_template, normalise_messages
from servekit.engine.text.detokenizer import Detokenizer
from servekit.engine.text.forged_tokens import ForgedTokens
from servekit.engine.text.tool_format import ToolFormat, tool_format_of
from servekit.errors import InputError, ModelError, UnsupportedError

_SPACE = "▁"
_BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
_SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


class Tokenizer:
    """One model's tokenizer.

    `eos_token_ids` is the union of what generation_config.json, config.json and tokenizer_config.json name.
    `bos_token_id` is None when there is none; `add_bos` says whether encode() puts it first. `vocab_size` counts the
    tokenizer's tokens; the model's logits may have more columns.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        bos_token_id: int | None = None,
        eos_token_ids: frozenset[int] = frozenset(),
        add_bos: bool | None = None,
        chat_template: ChatTemplate | None = None,
    ) -> None:
        self._backend = backend
        self._chat_template = chat_template
        added = backend.get_added_tokens_decoder()
        self._special_ids = frozenset(index for index, token in added.items() if token.special)
        self._added_bytes = {index: token.content.encode("utf-8") for index, token in added.items()}
        special = {token.content for token in added.values() if token.special}
        # Tokens like <tool_call> are not special to the library, but are control tokens where a template writes them.
        # An assistant's own message may hold them by right.
        template_text = chat_template.source if chat_template is not None else ""
        written = {
            token.content for token in added.values() if token.content.strip() and token.content in template_text
        }
        self._forged_by_assistant = ForgedTokens(special)
        self._forged = ForgedTokens(special | written)
        self._bytes = _TokenBytes(backend)
        self._bytes_cache: dict[int, bytes] = {}
        self._num_ids = max([backend.get_vocab_size(), *(index + 1 for index in added)])
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self.bos_token_id = bos_token_id
        self.eos_token_ids = eos_token_ids
        self._backend_adds_bos = bos_token_id is not None and backend.encode("").ids[:1] == [bos_token_id]
        self.add_bos = self._backend_adds_bos if add_bos is None else add_bos and bos_token_id is not None

    @classmethod
    def from_directory(cls, directory: Path) -> Self:
        """The tokenizer of a model folder. Raises ModelError when its files are missing or damaged."""
        backend = load_backend(directory)
        settings = read_json_if_there(directory / "tokenizer_config.json")
        config, generation = (
            read_json_if_there(directory / "config.json"),
            read_json_if_there(directory / "generation_config.json"),
        )
        special_tokens = {
            name: text for name in _SPECIAL_NAMES if (text := _token_text(settings.get(name))) is not None
        }
        eos_ids = {*_ids(generation.get("eos_token_id")), *_ids(config.get("eos_token_id"))}
        eos_ids |= _ids(backend.token_to_id(special_tokens.get("eos_token", "")))
        bos_id = backend.token_to_id(special_tokens.get("bos_token", ""))
        if bos_id is None:
            bos_id = next(iter(_ids(config.get("bos_token_id"))), None)
        source = load_chat_template(directory, settings)
        add_bos = settings.get("add_bos_token")
        return cls(
            backend,
            bos_token_id=bos_id,
            eos_token_ids=frozenset(eos_ids),
            add_bos=add_bos if isinstance(add_bos, bool) else None,
            chat_template=ChatTemplate(source, special_tokens) if source is not None else None,
        )

    @cached_property
    def max_token_chars(self) -> int:
        """The most characters of text that one token can stand for."""
        return max(map(len, self._backend.get_vocab(with_added_tokens=True)), default=1)

    @property
    def has_chat_template(self) -> bool:
        """Whether encode_chat can be used."""
        return self._chat_template is not None

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a raw text; spellings of special tokens in it become those tokens.

        With `add_special_tokens`, a tokenizer that adds BOS gives exactly one, also when the text begins with it; one
        that does not add it neither adds nor removes any. Raises InputError for text that is not valid Unicode.
        """
        ids = self._encode(text, add_special_tokens)
        if not add_special_tokens or self.bos_token_id is None:
            return ids
        if self._backend_adds_bos and ids[:1] == [self.bos_token_id]:
            ids = ids[1:]
        if not self.add_bos:
            return ids
        start = next((index for index, token_id in enumerate(ids) if token_id != self.bos_token_id), len(ids))
        return [self.bos_token_id, *ids[start:]]

    def encode_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **template_kwargs: Any,
    ) -> list[int]:
        """Token ids of a conversation through the model's chat template; the template alone places BOS.

        Control tokens that are spelled inside messages, tools or variables are encoded as ordinary text. Raises
        UnsupportedError when the model has no chat template (or it takes no tools), InputError when the template
        refuses the conversation.
        """
        if self._chat_template is None:
            raise UnsupportedError(
                "this model has no chat template",
                hint="it is a base model: send its prompt to /v1/completions",
                param="messages",
            )
        try:
            marked = [self._marked(message) for message in normalise_messages(messages)]
            tools, template_kwargs = self._forged.mark(tools), self._forged.mark(template_kwargs)
        except RecursionError as error:
            raise InputError("the request is nested too deeply", param="messages") from error
        rendered = self._chat_template.render(
            marked, tools, add_generation_prompt=add_generation_prompt, **template_kwargs
        )
        pieces = self._forged.split(rendered)
        if pieces is None:
            return self._encode(rendered, add_special_tokens=False)
        ids: list[int] = []
        for text, forged in pieces:
            ids += self._encode_forged(text) if forged else self._encode_inside(text, is_first=not ids)
        return ids

    def render_own(self, messages: Sequence[dict[str, Any]]) -> str:
        """The chat template's text of messages that no client wrote. Raises ModelError when there is no template."""
        if self._chat_template is None:
            raise ModelError("the model has no chat template")
        return self._chat_template.render(messages)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that a token stands for, special or not; none for an id that has no token.

        Raises ModelError for a kind of tokenizer whose tokens do not stand for bytes.
        """
        data = self._bytes_cache.get(token_id)
        if data is not None:
            return data
        if not 0 <= token_id < self._num_ids:
            return b""
        data = self._added_bytes.get(token_id)
        if data is None:
            token = self._backend.id_to_token(token_id)
            data = b"" if token is None else self._bytes.of(token)
        self._bytes_cache[token_id] = data
        return data

    def visible_bytes(self, token_id: int) -> bytes:
        """The bytes that a token adds to an answer's text: none for a special token."""
        return b"" if token_id in self._special_ids else self.token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """A token by itself as text; bytes that are no character of their own become U+FFFD."""
        return self.token_bytes(token_id).decode("utf-8", errors="replace")

    def is_special(self, token_id: int) -> bool:
        """Whether a token is one of control, never part of an answer's text."""
        return token_id in self._special_ids

    @cached_property
    def tool_format(self) -> ToolFormat | None:
        """How the model's chat template spells calls of functions; None where it does not, or not in a known way."""
        if self._chat_template is None or not self._chat_template.supports_tools:
            return None
        return tool_format_of(self._chat_template.source, self._control_id)

    def detokenizer(self, *, continues_text: bool = False, shows_control: bool = False) -> Detokenizer:
        """A fresh detokeniser of generated tokens.

        `continues_text`: what follows is read on from text before it, so that a SentencePiece tokenizer's first space
        is a real one and is kept. `shows_control`: control tokens are text like any other.
        """
        strip = self._bytes.strips_leading_space and not continues_text
        visible_bytes = self.token_bytes if shows_control else self.visible_bytes
        return Detokenizer(visible_bytes, strip_leading_space=strip)

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of all `token_ids`; the same as a detokeniser gives piece by piece."""
        detokenizer = Detokenizer(
            self.visible_bytes if skip_special_tokens else self.token_bytes,
            strip_leading_space=self._bytes.strips_leading_space,
        )
        return "".join(map(detokenizer.push, token_ids)) + detokenizer.flush()

    def _control_id(self, spelling: str) -> int | None:
        token_id = self._backend.token_to_id(spelling)
        return token_id if token_id in self._special_ids else None

    def to_json(self) -> str:
        """The whole tokenizer, for a library that reads the format of tokenizer.json."""
        return self._backend.to_str()

    def _marked(self, message: Message) -> Message:
        forged = self._forged_by_assistant if message.get("role") == "assistant" else self._forged
        return cast(Message, forged.mark(message))

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            return self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        except (UnicodeEncodeError, TypeError) as error:
            raise InputError("the text is not valid Unicode: it holds half of a surrogate pair") from error

    def _encode_inside(self, text: str, *, is_first: bool) -> list[int]:
        """The ids of a piece from within a text: without the space that SentencePiece puts before a whole text."""
        if is_first or not self._bytes.strips_leading_space:
            return self._encode(text, add_special_tokens=False)
        line_end = self._encode("\n", add_special_tokens=False)
        ids = self._encode("\n" + text, add_special_tokens=False)
        if ids[: len(line_end)] == line_end:
            return ids[len(line_end) :]
        return self._encode(text, add_special_tokens=False)

    def _encode_forged(self, spelling: str) -> list[int]:
        """The ids of a control token's spelling as ordinary text."""
        ids = self._encode_plain(spelling)
        if self._backend.token_to_id(spelling) not in ids:
            return ids
        # The model's own merges build the token (or take it whole): character by character they cannot.
        return [token_id for char in spelling for token_id in self._encode_plain(char)]

    def _encode_plain(self, text: str) -> list[int]:
        """Normaliser, pre-tokenizer and model alone: no added token is looked for."""
        normaliser, splitter = self._backend.normalizer, self._backend.pre_tokenizer
        normalised = normaliser.normalize_str(text) if normaliser is not None else text
        pieces = [piece for piece, _ in splitter.pre_tokenize_str(normalised)] if splitter is not None else [normalised]
        if pieces and self._bytes.strips_leading_space and not text.startswith((" ", _SPACE)):
            pieces[0] = pieces[0].removeprefix(_SPACE)
        return [token.id for piece in pieces for token in self._backend.model.tokenize(piece)]


class _TokenBytes:
    """How a tokenizer spells bytes in its tokens, read off its decoder."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        decoder = _state(backend.decoder)
        steps = decoder.get("decoders", [decoder])
        self._kinds = [step.get("type") for step in steps]
        self._alphabet = _byte_alphabet() if "ByteLevel" in self._kinds else None
        self._has_byte_tokens = "ByteFallback" in self._kinds
        self.strips_leading_space = any(
            (step.get("type") == "Strip" and step.get("content") == " " and step.get("start", 0) > 0)
            or (step.get("type") == "Metaspace" and step.get("prepend_scheme") != "never")
            for step in steps
        )

    def of(self, token: str) -> bytes:
        if self._alphabet is not None:
            try:
                return bytes(self._alphabet[char] for char in token)
            except KeyError:
                return token.encode("utf-8")
        if self._has_byte_tokens or "Metaspace" in self._kinds:
            match = _BYTE_TOKEN.fullmatch(token) if self._has_byte_tokens else None
            return bytes([int(match[1], 16)]) if match else token.replace(_SPACE, " ").encode("utf-8")
        raise ModelError(f"text cannot be rebuilt from this tokenizer's tokens (decoder {self._kinds})")


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's spelling of bytes: printable Latin-1 as itself, the others from U+0100 on, in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {chr(byte): byte for byte in printable} | {chr(0x100 + index): byte for index, byte in enumerate(others)}


def load_backend(directory: Path) -> tokenizers.Tokenizer:
    """The library's tokenizer of a model folder. Raises ModelError when its files are missing or damaged."""
    file = directory / "tokenizer.json"
    if file.is_file():
        try:
            return tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises bare Exceptions
            raise ModelError(f"tokenizer.json cannot be read: {error}") from error
    try:
        from transformers import AutoTokenizer

        slow = AutoTokenizer.from_pretrained(directory, use_fast=True, trust_remote_code=False, local_files_only=True)
        return cast(tokenizers.Tokenizer, slow.backend_tokenizer)
    except Exception as error:
        raise ModelError(
            f"{directory.name} has no tokenizer.json, and its other tokenizer files cannot be converted: {error}"
        ) from error


def _state(component: Any) -> dict[str, Any]:
    return {} if component is None else cast(dict[str, Any], json.loads(component.__getstate__()))


def _token_text(value: Any) -> str | None:
    """A token's text in tokenizer_config.json: a string, or an object with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    return text if isinstance(text, str) else None


def _ids(value: Any) -> set[int]:
    """An id, a list of ids, or null, as config files write it."""
    values = value if isinstance(value, list) else [value]
    return {item for item in values if isinstance(item, int) and not isinstance(item, bool)}
