"""Four suites for an embedding server, from one text at a time to many clients at once.

Owns the suites, the texts and the check that the vectors are right, which comes before any timing: a fast server with
wrong vectors is no result. Everything goes over HTTP, so any OpenAI-compatible server can be measured.
"""

import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, Final

import msgspec

from servekit.bench.answers import refusal_reason
from servekit.bench.arrivals import stream
from servekit.bench.bodies import ENDPOINTS
from servekit.bench.client import Client, Planned
from servekit.bench.workload import common_words, random_prompt
from servekit.errors import InputError, ModelError, NegativeResult, UnavailableError

PATH: Final = ENDPOINTS["embeddings"]
SUITES: Final = ("latency", "scoring", "throughput", "concurrency")
PROCESSES: Final = 4
_CHECK_LENGTHS: Final = (3, 17, 60, 128)
_FEW_WORDS: Final = 16
_MANY_WORDS: Final = 64


@dataclass(frozen=True, slots=True)
class Case:
    """Requests of `batch` texts with `tokens` tokens each, from `clients` that wait for each answer."""

    suite: str
    tokens: int
    batch: int
    clients: int = 1

    @property
    def label(self) -> str:
        """For people."""
        clients = f", {self.clients} clients" if self.clients > 1 else ""
        return f"{self.suite}: {self.batch} x {self.tokens} tokens{clients}"


def cases_of(suite: str) -> list[Case]:
    """The cases of one suite.

    latency: one text, one after the other. scoring: a query's candidates in one request. throughput: full batches from
    four processes. concurrency: single texts from 1 to 16 clients.
    """
    if suite == "latency":
        return [Case(suite, tokens, 1) for tokens in (128, 512, 4096)]
    if suite == "scoring":
        return [Case(suite, 512, batch) for batch in (5, 25, 50)]
    if suite == "throughput":
        return [Case(suite, tokens, 100, PROCESSES) for tokens in (512, 1024, 4096)]
    return [Case(suite, 512, 1, clients) for clients in (1, 2, 4, 8, 16)]


class Texts:
    """Random texts of a length in the server's own tokens, all different.

    `words` has for each length in tokens the number of words that came out as it; see `calibrate`.
    """

    def __init__(self, seed: int, words: Mapping[int, int]) -> None:
        self._seed = seed
        self._words = words
        self._vocabulary = common_words()

    def bodies(self, model: str, case: Case) -> Iterator[bytes]:
        """Endless request bodies of one case."""
        rng = stream(self._seed, 0, f"embed/{case.label}")
        while True:
            texts = [self.text(rng, case.tokens) for _ in range(case.batch)]
            yield msgspec.json.encode({"model": model, "input": texts})

    def text(self, rng: random.Random, tokens: int) -> str:
        """One text."""
        return random_prompt(rng, self._words.get(tokens, tokens), self._vocabulary)


async def embed(client: Client, model: str, texts: Sequence[str]) -> tuple[list[list[float]], int | None]:
    """Vectors in the order of the texts, and the tokens that the server counted.

    Raises NegativeResult when the server has no embeddings, ModelError when the answer is none, UnavailableError when
    there is no answer.
    """
    body = msgspec.json.encode({"model": model, "input": list(texts), "encoding_format": "float"})
    try:
        status, answer = await client.post(PATH, body)
    except OSError as error:
        raise UnavailableError(
            f"{client.address.url}{PATH} does not answer: {error or type(error).__name__}"
        ) from error
    if status in (400, 404, 405, 422, 501):
        raise NegativeResult(
            f"{client.address.url} makes no embeddings with {model!r}: {status}: {refusal_reason(answer)}",
            hint="serve an embedding model, or name one with --model",
        )
    if status != 200:
        raise UnavailableError(f"{client.address.url}{PATH} answered {status}: {refusal_reason(answer)}")
    return _read_vectors(answer, len(texts))


@dataclass(frozen=True, slots=True)
class Calibration:
    """Words that make a text of each length in the server's own tokens, and why it refuses the other lengths."""

    words: Mapping[int, int]
    refused: Mapping[int, str]


async def calibrate(client: Client, model: str, lengths: Sequence[int], seed: int) -> Calibration:
    """Find the number of common words for each length; as many words as tokens where the server counts none."""
    rng, vocabulary = stream(seed, 0, "embed/calibrate"), common_words()

    async def tokens_of(num_words: int) -> int | None:
        return (await embed(client, model, [random_prompt(rng, num_words, vocabulary)]))[1]

    few, many = await tokens_of(_FEW_WORDS), await tokens_of(_MANY_WORDS)
    slope, offset = 1.0, 0.0
    if few and many and many > few:
        slope = (many - few) / (_MANY_WORDS - _FEW_WORDS)
        offset = many - slope * _MANY_WORDS  # what the server adds to every text
    words, refused = {}, {}
    for length in sorted(set(lengths)):
        count = max(1, int((length - offset) / slope))
        try:
            tokens = await tokens_of(count)
            words[length] = count if not tokens else max(1, count + int((length - tokens) / slope))
        except NegativeResult as error:
            refused[length] = error.message
    return Calibration(words, refused)


@dataclass(frozen=True, slots=True)
class Agreement:
    """The least cosine similarity of vectors that should be the same, over `texts` texts."""

    against: str
    texts: int
    least: float


async def check_vectors(
    client: Client, model: str, *, seed: int, reference: "Reference | None", min_cosine: float
) -> list[Agreement]:
    """Each text alone and in a batch of mixed lengths, and each against the reference's vector for it.

    Raises NegativeResult when a cosine is below `min_cosine`.
    """
    rng, vocabulary = stream(seed, 0, "embed/check"), common_words()
    texts = [random_prompt(rng, length, vocabulary) for length in _CHECK_LENGTHS]
    alone = [(await embed(client, model, [text]))[0][0] for text in texts]
    together, _ = await embed(client, model, texts)
    found = [_agreement("the same text in a batch", alone, together)]
    if reference is not None:
        known = reference.texts or texts
        vectors = [(await embed(client, model, [text]))[0][0] for text in known]
        found.append(_agreement(reference.name, vectors, await reference.vectors(known)))
    for agreement in found:
        if not agreement.least >= min_cosine:
            raise NegativeResult(
                f"the vectors are wrong: against {agreement.against} the cosine is only {agreement.least:.5f}, "
                f"and --min-cosine asks for {min_cosine:g}; nothing was timed"
            )
    return found


@dataclass(frozen=True, slots=True)
class Reference:
    """Where right vectors come from: known `texts` with their `known` vectors, or another server that is asked."""

    name: str
    texts: tuple[str, ...] = ()
    known: tuple[tuple[float, ...], ...] = ()
    client: Client | None = None
    model: str = ""

    async def vectors(self, texts: Sequence[str]) -> list[list[float]]:
        """The right vectors."""
        if self.client is None:
            return [list(vector) for vector in self.known]
        return (await embed(self.client, self.model, texts))[0]


def read_reference(path: str) -> Reference:
    """JSON lines of `text` and `embedding`, as another library made them. Raises InputError."""
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
        rows = [msgspec.json.decode(line, type=_ReferenceRow) for line in lines if line.strip()]
    except (OSError, UnicodeDecodeError, msgspec.DecodeError) as error:
        raise InputError(
            f"the reference {path} cannot be read: {error}",
            hint='write JSON lines of {"text": "...", "embedding": [...]}',
            param="reference",
        ) from error
    if not rows:
        raise InputError(f"the reference {path} has no texts", param="reference")
    return Reference(path, tuple(row.text for row in rows), tuple(tuple(row.embedding) for row in rows))


class _ReferenceRow(msgspec.Struct):
    text: str
    embedding: list[float]


def cosine(left: Sequence[float], right: Sequence[float]) -> float:
    """Cosine similarity; NaN for a zero vector or different lengths."""
    if len(left) != len(right):
        return math.nan
    lengths = math.sqrt(math.fsum(a * a for a in left) * math.fsum(b * b for b in right))
    return math.fsum(a * b for a, b in zip(left, right, strict=True)) / lengths if lengths > 0 else math.nan


def planned(bodies: Iterator[bytes]) -> Iterator[Planned]:
    """Requests for a closed loop."""
    for index in count():
        yield Planned(index, PATH, next(bodies))


def _agreement(against: str, left: Sequence[Sequence[float]], right: Sequence[Sequence[float]]) -> Agreement:
    cosines = [cosine(a, b) for a, b in zip(left, right, strict=True)]
    worst = min(cosines, key=lambda value: -math.inf if math.isnan(value) else value)
    return Agreement(against, len(cosines), worst)


def _read_vectors(answer: bytes, expected: int) -> tuple[list[list[float]], int | None]:
    try:
        document: Any = msgspec.json.decode(answer)
        rows = sorted(document["data"], key=lambda row: row["index"])
        vectors = [[float(value) for value in row["embedding"]] for row in rows]
        usage = document.get("usage") or {}
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ModelError(f"{PATH} does not answer with embeddings: {error!r}") from error
    if len(vectors) != expected or not all(vectors):
        raise ModelError(f"{PATH} answered {len(vectors)} vectors to {expected} texts, or empty ones")
    tokens = usage.get("prompt_tokens")
    return vectors, tokens if isinstance(tokens, int) else None
