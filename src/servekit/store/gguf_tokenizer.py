"""GGUF metadata -> a tokenizer as the `tokenizers` library stores it. It must not know tensors.

Two kinds are read. `gpt2` is byte-level BPE: the file lists vocabulary and merges, and names the splitting rule its
merges were learned with. `llama` is SentencePiece BPE: the file lists pieces and scores, and merges follow from them.
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from servekit.errors import ModelError
from servekit.store.gguf_metadata import GgufFile

_UNKNOWN, _CONTROL, _USER_DEFINED = 2, 3, 4
_SPECIAL_NAMES = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_SPACE = "▁"

# Contractions, words with one leading mark, numbers, punctuation with its line ends, white space; GPT-4 style. Llama 3
# takes up to three digits together, Qwen one.
_GPT4_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """The tokenizer that `file` describes; BOS and EOS are added by its post-processor where the file says so.

    Raises ModelError for a kind or a splitting rule that is not read.
    """
    kind, tokens = file.scalar("tokenizer.ggml.model"), file.array("tokenizer.ggml.tokens")
    if tokens is None:
        raise ModelError(f"{file.path.name} holds no tokenizer")
    try:
        if kind == "gpt2":
            tokenizer = _byte_level(file, tokens)
        elif kind == "llama":
            tokenizer = _sentencepiece(file, tokens)
        else:
            raise ModelError(f"{file.path.name} has a tokenizer of kind {kind!r}; gpt2 and llama are read")
        _add_special_tokens(file, tokenizer, tokens)
        _add_post_processor(file, tokenizer, tokens)
    except ModelError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ModelError(f"the tokenizer in {file.path.name} cannot be built: {error}") from error
    return tokenizer


def gguf_tokenizer_config(file: GgufFile) -> dict[str, Any]:
    """The dictionary of a tokenizer_config.json, without the chat template."""
    tokens = file.array("tokenizer.ggml.tokens") or []
    config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}
    for name, key in _SPECIAL_NAMES.items():
        token_id = file.scalar(f"tokenizer.ggml.{key}_token_id")
        if token_id is not None:
            config[f"{name}_token"] = _token(file, tokens, token_id)
    config["add_bos_token"] = _adds_bos(file)
    config["add_eos_token"] = bool(file.scalar("tokenizer.ggml.add_eos_token"))
    if (context := file.scalar(f"{file.scalar('general.architecture')}.context_length")) is not None:
        config["model_max_length"] = context
    return config


def gguf_chat_template(file: GgufFile) -> str | None:
    """The chat template's source, or None: base models have none."""
    template = file.scalar("tokenizer.chat_template")
    return template if isinstance(template, str) else None


def _byte_level(file: GgufFile, tokens: list[str]) -> Tokenizer:
    rule = file.scalar("tokenizer.ggml.pre") or "default"
    merges = [_pair(merge) for merge in file.array("tokenizer.ggml.merges") or []]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=rule in ("llama-bpe", "llama3", "llama-v3")))
    tokenizer.pre_tokenizer, tokenizer.normalizer = _splitting(file, rule)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _splitting(file: GgufFile, rule: str) -> tuple[Any, Any]:
    """The pre-tokenizer and normaliser for llama.cpp's name of a splitting rule."""
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    bare = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    if rule in ("gpt-2", "default", "phi-2"):
        return gpt2, None
    if rule in ("smollm", "refact", "starcoder", "command-r", "codeshell"):
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2]), None
    if rule in ("llama-bpe", "llama3", "llama-v3"):
        split = _GPT4_SPLIT.replace("DIGITS", "{1,3}")
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), bare]), None
    if rule in ("qwen2", "deepseek-r1-qwen"):
        split = _GPT4_SPLIT.replace("DIGITS", "")
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), bare]), normalizers.NFC()
    raise ModelError(f"{file.path.name} splits text by the rule {rule!r}, which is not read")


def _sentencepiece(file: GgufFile, tokens: list[str]) -> Tokenizer:
    gemma = str(file.scalar("general.architecture")).startswith("gemma")
    if gemma:
        # These files spell runs of spaces with real spaces; text arrives with the visible mark instead.
        tokens = [_SPACE * len(token) if len(token) > 1 and not token.strip(" ") else token for token in tokens]
    types, scores = file.array("tokenizer.ggml.token_type"), file.array("tokenizer.ggml.scores")
    if scores is None or types is None:
        raise ModelError(f"{file.path.name} lists pieces without scores or types")
    ranks = _gemma_ranks(tokens, types) if gemma else scores
    unknown = file.scalar("tokenizer.ggml.unknown_token_id")
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(
        BPE(
            vocabulary,
            _merges(tokens, types, ranks, vocabulary),
            unk_token=None if unknown is None else _token(file, tokens, unknown),
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    spell = normalizers.Replace(" ", _SPACE)
    unspell = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.scalar("tokenizer.ggml.add_space_prefix") in (None, True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spell])
        tokenizer.decoder = decoders.Sequence([*unspell, decoders.Strip(" ", 1, 0)])
    else:
        tokenizer.normalizer = spell
        tokenizer.decoder = decoders.Sequence(unspell)
    return tokenizer


def _gemma_ranks(tokens: list[str], types: list[int]) -> list[float]:
    """Gemma's files give all user-defined pieces one score: those come first, and the longest of them first.

    SentencePiece cuts them out of the text before it merges anything: of 40 spaces 31 are one piece, 9 another. Of the
    other pieces the earlier is better.
    """
    return [
        float(len(token)) if kind == _USER_DEFINED else float(-index)
        for index, (token, kind) in enumerate(zip(tokens, types, strict=True))
    ]


def _merges(
    tokens: list[str], types: list[int], ranks: list[float], vocabulary: dict[str, int]
) -> list[tuple[str, str]]:
    """Every way to join two pieces into a third, best first.

    SentencePiece joins the neighbours whose result scores highest, so a merge ranks by its result.
    """
    joinable = {token for token, kind in zip(tokens, types, strict=True) if kind not in (_UNKNOWN, _CONTROL)}
    found = []
    for index, token in enumerate(tokens):
        if token not in joinable:
            continue
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in joinable and right in joinable:
                found.append((-ranks[index], vocabulary[left], vocabulary[right], left, right))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _add_special_tokens(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    """Register what is matched whole; in one call for each kind, because every call rebuilds the matcher of all."""
    types = file.array("tokenizer.ggml.token_type") or []
    named = {file.scalar(f"tokenizer.ggml.{key}_token_id") for key in _SPECIAL_NAMES.values()}
    special, plain = [], []
    for index, kind in enumerate(types):
        if kind in (_CONTROL, _UNKNOWN) or index in named:
            special.append(AddedToken(tokens[index], normalized=False, special=True))
        elif kind == _USER_DEFINED and tokenizer.token_to_id(tokens[index]) == index:
            plain.append(AddedToken(tokens[index], normalized=False, special=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(plain)


def _add_post_processor(file: GgufFile, tokenizer: Tokenizer, tokens: list[str]) -> None:
    parts, special = ["$A"], []
    if _adds_bos(file):
        bos = file.scalar("tokenizer.ggml.bos_token_id")
        if bos is None:
            raise ModelError(f"{file.path.name} adds a BOS token but names none")
        parts.insert(0, _token(file, tokens, bos))
        special.append((parts[0], bos))
    if file.scalar("tokenizer.ggml.add_eos_token"):
        eos = file.scalar("tokenizer.ggml.eos_token_id")
        if eos is None:
            raise ModelError(f"{file.path.name} adds an EOS token but names none")
        parts.append(_token(file, tokens, eos))
        special.append((parts[-1], eos))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=parts, special_tokens=list(set(special)))


def _adds_bos(file: GgufFile) -> bool:
    stated = file.scalar("tokenizer.ggml.add_bos_token")
    if stated is not None:
        return bool(stated)
    # llama.cpp's rule for files that do not say.
    return file.scalar("tokenizer.ggml.model") == "llama" or file.scalar("tokenizer.ggml.pre") in (
        "llama-bpe",
        "llama3",
        "llama-v3",
    )


def _token(file: GgufFile, tokens: list[str], token_id: int) -> str:
    if not 0 <= token_id < len(tokens):
        raise ModelError(f"{file.path.name} names token {token_id}, but has {len(tokens)} tokens")
    return tokens[token_id]


def _pair(merge: str) -> tuple[str, str]:
    left, _, right = merge.partition(" ")
    return left, right
