"""Prefill and decode rates of many systems in one run: at each point they take turns, and only one runs at a time."""

import random
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

import tokenizers

from benchmarks.cpu_peers.process import Worker, WorkerFailed
from benchmarks.cpu_peers.systems import System
from benchmarks.cpu_peers.table import Outcome
from benchmarks.cpu_peers.worker import Run, Tokens
from servekit.store.resolve import find_model

_SEED = 0
_QUESTION = "The capital of France is"  # to be continued, which every model can do, with a chat template or without
_ANSWER_TOKENS = 8
_WARM_UP_TOKENS = 4
# Ids below are special in many vocabularies.
_FIRST_ORDINARY_ID = 256


@dataclass(frozen=True, slots=True)
class Point:
    """A batch of prompts of one length, and how many tokens each gets.

    The prefill rate is that of one prompt up to its first token. The decode rate counts the tokens after the first
    of each sequence, over the time between every sequence's first token and every sequence's last.
    """

    kind: str
    batch: int
    prompt_tokens: int
    output_tokens: int

    @property
    def name(self) -> str:
        """`prefill 512` by its tokens, `decode 16` by its batch."""
        return f"{self.kind} {self.prompt_tokens if self.kind == 'prefill' else self.batch}"

    def rate(self, run: Run) -> float:
        """Tokens a second."""
        if self.kind == "prefill":
            return self.batch * self.prompt_tokens / run.first_s
        return self.batch * (self.output_tokens - 1) / (run.last_s - run.first_s)


def prefill_point(prompt_tokens: int) -> Point:
    """One prompt and its first token."""
    return Point("prefill", 1, prompt_tokens, 1)


def decode_point(batch: int, prompt_tokens: int, output_tokens: int) -> Point:
    """A batch that is prefilled together and decodes together."""
    return Point("decode", batch, prompt_tokens, output_tokens)


def random_prompts(point: Point, vocab_size: int) -> Tokens:
    """The same in every process and every run: fixed by the point's shape."""
    rng = random.Random(f"{_SEED} {point.batch} {point.prompt_tokens}")
    ids = range(_FIRST_ORDINARY_ID, vocab_size)
    return [[rng.choice(ids) for _ in range(point.prompt_tokens)] for _ in range(point.batch)]


class Line:
    """The systems that take turns, and what was found of each. One that fails is named and left out from then on."""

    def __init__(self, systems: Sequence[System], model: str, logs: Path) -> None:
        self.outcomes = [Outcome(system.name, system.role, status=system.missing) for system in systems]
        self._systems = systems
        self._tokenizer = tokenizers.Tokenizer.from_file(str(find_model(model).directory / "tokenizer.json"))
        self._logs = logs
        self._workers: dict[str, Worker] = {}

    @contextmanager
    def started(self) -> Iterator[None]:
        """Load everyone, one after the other, and ask each the same question. They end with the context."""
        self._logs.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            for system, outcome in zip(self._systems, self.outcomes, strict=True):
                if outcome.status is not None:
                    _say(f"{system.name}: {outcome.status}")
                    continue
                try:
                    worker = stack.enter_context(Worker(system, self._logs / f"{system.name.replace(' ', '-')}.log"))
                    outcome.version, outcome.load_s = worker.version, worker.load_s
                    outcome.text = self._ask(worker)
                except WorkerFailed as error:
                    outcome.status = str(error)
                else:
                    self._workers[system.name] = worker
                _say(f"{system.name}: {outcome.status or outcome.text!r}")
            if not self._workers:
                raise SystemExit("nothing can be measured")
            yield

    def warm_up(self, points: Sequence[Point]) -> None:
        """Each shape once, not counted: some peers compile for it."""
        for point in points:
            _say(f"warm-up: {point.name}")
            for outcome in self._going():
                self._run(outcome, point, min(point.output_tokens, _WARM_UP_TOKENS))

    def measure(self, points: Sequence[Point], round_: int, suffix: str = "") -> None:
        """One value for each point and system. Whoever goes first moves on by one with the round.

        `suffix` marks values that belong apart, as a point of their own.
        """
        for point in points:
            going = self._going()
            for outcome in going[round_ % len(going) :] + going[: round_ % len(going)]:
                run = self._run(outcome, point, point.output_tokens)
                if run is not None:
                    outcome.rates.setdefault(point.name + suffix, []).append(point.rate(run))
            shown = ", ".join(f"{o.name} {o.rates[point.name + suffix][-1]:.0f}" for o in self._going())
            _say(f"round {round_ + 1}, {point.name}{suffix}: {shown}")

    def _going(self) -> list[Outcome]:
        return [outcome for outcome in self.outcomes if outcome.status is None]

    def _run(self, outcome: Outcome, point: Point, num_tokens: int) -> Run | None:
        worker = self._workers[outcome.name]
        try:
            run = worker.run(random_prompts(point, self._tokenizer.get_vocab_size()), num_tokens)
        except WorkerFailed as error:
            outcome.status = str(error)
            return None
        outcome.peak_bytes = worker.peak_bytes()
        return run

    def _ask(self, worker: Worker) -> str:
        prompt: list[int] = self._tokenizer.encode(_QUESTION).ids
        text: str = self._tokenizer.decode(worker.run([prompt], _ANSWER_TOKENS).tokens[0])
        return text


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
