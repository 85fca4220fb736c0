"""What is asked: prompts and output lengths, each from a random stream of its own. It must not know when or of whom.

Lengths are the same at every rate of a seed. Random prompts differ between rates, so that one measured point does not
find its prompts in the prefix cache because an earlier one has left them there.
"""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path

import msgspec

from servekit.bench.arrivals import stream
from servekit.errors import ConfigError

BUILTIN = ("en", "bn")

_MAX_TOKENS = 1_000_000


@dataclass(frozen=True, slots=True)
class PromptSource:
    """Where prompts come from: `texts` in shuffled order, over and over, or `random_tokens` words each, always new."""

    name: str
    texts: tuple[str, ...] = ()
    random_tokens: int = 0

    def prompts(self, seed: int, repeat: int, point: str) -> Iterator[str]:
        """Endless prompts; `point` names the rate they are for."""
        if self.random_tokens:
            rng, words = stream(seed, repeat, f"prompts/{point}"), common_words()
            while True:
                yield random_prompt(rng, self.random_tokens, words)
        rng = stream(seed, repeat, "prompts")
        while True:
            yield from rng.sample(self.texts, len(self.texts))


def read_prompts(source: str) -> PromptSource:
    """`builtin:en`, `builtin:bn`, `random:TOKENS`, or a file: text with one prompt a line, or JSON lines.

    A JSON line is a string or an object with `prompt` or `text`. Raises ConfigError naming --prompts.
    """
    kind, _, rest = source.partition(":")
    if kind == "builtin":
        if rest not in BUILTIN:
            raise _wrong(f"{source!r} is not known", f"known is {', '.join(f'builtin:{name}' for name in BUILTIN)}")
        return PromptSource(source, tuple(_packaged(rest).splitlines()))
    if kind == "random":
        if not rest.isdecimal() or not 1 <= int(rest) <= _MAX_TOKENS:
            raise _wrong(f"{source!r} has no number of tokens", "write it like random:512")
        return PromptSource(source, random_tokens=int(rest))
    return PromptSource(source, _read_file(Path(source)))


def common_words() -> list[str]:
    """Frequent English words, which nearly every vocabulary has as one token with the space before them."""
    return _packaged("words").splitlines()


def random_prompt(rng: random.Random, num_tokens: int, words: Sequence[str]) -> str:
    """`num_tokens` of the common words."""
    return " ".join(rng.choices(words, k=num_tokens))


def output_lengths(lengths: Sequence[int], seed: int, repeat: int = 0) -> Iterator[int]:
    """Endless lengths: every cycle has each of `lengths` once, in an order of its own."""
    rng = stream(seed, repeat, "lengths")
    while True:
        yield from rng.sample(lengths, len(lengths))


def parse_outputs(text: str) -> list[int]:
    """`32,64,128` as whole numbers. Raises ConfigError naming --outputs."""
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdecimal() and 1 <= int(part) <= _MAX_TOKENS for part in parts):
        raise ConfigError(f"--outputs: {text!r} is not a list of lengths", hint="write it like 32,64", param="outputs")
    return [int(part) for part in parts]


def _packaged(name: str) -> str:
    return files("servekit.bench").joinpath("prompts", f"{name}.txt").read_text(encoding="utf-8")


def _read_file(path: Path) -> tuple[str, ...]:
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise _wrong(
            f"{path} cannot be read: {error.strerror}", "give a file, builtin:en, builtin:bn or random:512"
        ) from error
    except UnicodeDecodeError as error:
        raise _wrong(f"{path} is not UTF-8: {error}", None) from error
    is_json = path.suffix in (".jsonl", ".ndjson", ".json")
    found = [
        _json_prompt(line, path, number) if is_json else line
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not found:
        raise _wrong(f"{path} has no prompts", None)
    return tuple(found)


def _json_prompt(line: str, path: Path, number: int) -> str:
    try:
        row = msgspec.json.decode(line)
    except msgspec.DecodeError as error:
        raise _wrong(f"line {number} of {path} is not JSON: {error}", None) from error
    if isinstance(row, dict):
        row = row.get("prompt", row.get("text"))
    if not isinstance(row, str) or not row:
        raise _wrong(f"line {number} of {path} has no prompt", 'write a string, or {"prompt": "..."}')
    return row


def _wrong(message: str, hint: str | None) -> ConfigError:
    return ConfigError(f"--prompts: {message}", hint=hint, param="prompts")
