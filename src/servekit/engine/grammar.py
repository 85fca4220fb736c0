"""Grammars that an answer must follow: compiled once, off the engine thread, and asked in each step what may come next.

The work is llguidance's. It must not know requests' text, HTTP or how a token is chosen among those allowed.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING

import llguidance
import numpy as np
import numpy.typing as npt
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask

from servekit.engine.core.request import GrammarSpec
from servekit.engine.core.sequence import Sequence
from servekit.errors import EngineError, InputError, UnsupportedError

if TYPE_CHECKING:
    from llguidance._lib import JsonCompileOptions

MAX_CACHED = 64
"""Compiled grammars kept for the next request; those in use are kept beside them."""

MAX_SPEC_CHARS = 64 * 1024
MAX_ERROR_CHARS = 300

_JSON_OPTIONS: "JsonCompileOptions" = {
    # A weak model would otherwise go on for ever between two tokens of JSON.
    "whitespace_pattern": r"[\x20\x0A\x0D\x09]{0,16}",
    "lenient": False,
}


@dataclass(slots=True)
class _Compiled:
    matcher: LLMatcher
    num_users: int = 0


class Grammars:
    """All grammars of one engine. `hold` and `compile` are called by the API's threads, `allowed` by the engine's.

    `eos_token_ids` end an answer; a grammar allows them exactly where the answer may end. `make_tokenizer` is asked
    once, when the first grammar comes: it takes most of a second for a large vocabulary.
    """

    def __init__(self, make_tokenizer: Callable[[], str], vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._make_tokenizer = make_tokenizer
        self._vocab_size = vocab_size
        self._eos_token_ids = eos_token_ids
        self._tokenizer: LLTokenizer | None = None
        self._limits = LLParserLimits(
            initial_lexer_fuel=500_000,
            step_lexer_fuel=200_000,
            step_max_items=50_000,
            max_lexer_states=50_000,
            max_grammar_size=100_000,
            verbose_errors=False,
        )
        self._lock = threading.Lock()
        self._compiled: OrderedDict[GrammarSpec, _Compiled] = OrderedDict()
        self._states: dict[Sequence, LLMatcher] = {}
        self._num_consumed: dict[Sequence, int] = {}

    def compile(self, spec: GrammarSpec) -> None:
        """Make a grammar ready. Slow at the first call; call it in a worker thread.

        Raises InputError for a grammar that is wrong, too large, or that no text satisfies, UnsupportedError for a
        keyword that cannot be enforced or a model that cannot be constrained. `param` names the grammar's field.
        """
        with self._lock:
            if spec in self._compiled:
                self._compiled.move_to_end(spec)
                return
        compiled = _Compiled(self._matcher(spec))
        with self._lock:
            self._compiled.setdefault(spec, compiled)
            self._evict()

    def hold(self, spec: GrammarSpec) -> None:
        """Keep a grammar until `release`; it is compiled now if it is not there."""
        self.compile(spec)
        with self._lock:
            entry = self._compiled.get(spec)
            if entry is None:
                entry = self._compiled[spec] = _Compiled(self._matcher(spec))
            entry.num_users += 1

    def release(self, spec: GrammarSpec) -> None:
        """One user less."""
        with self._lock:
            entry = self._compiled.get(spec)
            if entry is not None:
                entry.num_users -= 1
                self._evict()

    def allowed(
        self, seqs: Seq[Sequence], pending: Mapping[Sequence, int] = MappingProxyType({})
    ) -> npt.NDArray[np.bool_]:
        """Which tokens may come next: one row of the vocabulary for each sequence, all of which have a grammar.

        `pending` are last tokens that have been chosen, but that no sequence holds yet. Behind one that ended its
        answer everything may come: it is thrown away.

        What a sequence has generated since the last call is taken in first, so a step that is computed again, and a
        sequence that was preempted, cost nothing and change nothing. Raises EngineError for a grammar that has become
        too complex.
        """
        for seq in [seq for seq in self._states if seq.is_finished]:
            del self._states[seq], self._num_consumed[seq]
        masks = np.zeros((len(seqs), (self._vocab_size + 31) // 32), dtype=np.int32)
        for row, seq in enumerate(seqs):
            if pending.get(seq) in self._eos_token_ids:
                masks[row] = -1
                continue
            matcher = self._caught_up(seq, pending.get(seq))
            fill_next_token_bitmask(matcher, masks, row)
            if matcher.is_error():
                raise EngineError(f"the grammar could not be followed: {matcher.get_error()[:MAX_ERROR_CHARS]}")
        bits = np.unpackbits(masks.view(np.uint8), axis=1, count=self._vocab_size, bitorder="little")
        return bits.astype(np.bool_)

    def _caught_up(self, seq: Sequence, pending: int | None) -> LLMatcher:
        matcher = self._states.get(seq)
        if matcher is None:
            spec = seq.request.sampling.grammar
            assert spec is not None, f"{seq} has no grammar"
            with self._lock:
                matcher = self._compiled[spec].matcher.deep_copy()
            self._states[seq], self._num_consumed[seq] = matcher, 0
        start = seq.num_prompt_tokens + self._num_consumed[seq]
        new = seq.token_ids[start:]
        # A step that is computed again may come back to a token that has been taken in already.
        if pending is not None and start <= seq.num_tokens:
            new = [*new, pending]
        if new and not matcher.consume_tokens(new):
            raise EngineError(f"the grammar could not be followed: {matcher.get_error()[:MAX_ERROR_CHARS]}")
        self._num_consumed[seq] += len(new)
        return matcher

    def _matcher(self, spec: GrammarSpec) -> LLMatcher:
        if len(spec.text) > MAX_SPEC_CHARS:
            raise InputError(f"{spec.param}: more than {MAX_SPEC_CHARS} characters", param=spec.param)
        tokenizer = self._ready_tokenizer(spec)
        matcher = LLMatcher(tokenizer, _source(spec), log_level=0, limits=self._limits)
        if not matcher.is_error():
            mask = np.frombuffer(matcher.compute_bitmask(), dtype=np.uint8)
            if matcher.is_error() or mask.any():
                _raise_error(matcher, spec)
                return matcher
            raise InputError(f"{spec.param}: no text satisfies it", param=spec.param)
        _raise_error(matcher, spec)
        return matcher

    def _ready_tokenizer(self, spec: GrammarSpec) -> LLTokenizer:
        if not self._eos_token_ids:
            raise UnsupportedError("this model has no token that ends an answer", param=spec.param)
        with self._lock:
            if self._tokenizer is None:
                try:
                    self._tokenizer = LLTokenizer(
                        self._make_tokenizer(), n_vocab=self._vocab_size, eos_token=sorted(self._eos_token_ids)
                    )
                except Exception as error:  # the library raises what its parts raise
                    raise UnsupportedError(
                        f"this model's tokenizer cannot be constrained: {error}", param=spec.param
                    ) from None
            return self._tokenizer

    def _evict(self) -> None:
        idle = [spec for spec, entry in self._compiled.items() if not entry.num_users]
        for spec in idle[: max(0, len(idle) - MAX_CACHED)]:
            del self._compiled[spec]


def _source(spec: GrammarSpec) -> str:
    """llguidance's own form. Raises InputError."""
    try:
        if spec.kind == "json_schema":
            return LLMatcher.grammar_from_json_schema(spec.text, overrides=_JSON_OPTIONS)
        if spec.kind == "regex":
            return LLMatcher.grammar_from_regex(spec.text)
        if spec.kind == "lark":
            return LLMatcher.grammar_from_lark(spec.text)
        return str(llguidance.grammar_from("grammar", spec.text))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{spec.param}: {str(error)[:MAX_ERROR_CHARS]}", param=spec.param) from None


def _raise_error(matcher: LLMatcher, spec: GrammarSpec) -> None:
    if matcher.is_error():
        message = matcher.get_error().strip()[:MAX_ERROR_CHARS]
        kind = UnsupportedError if message.startswith(("Unimplemented", "Unknown")) else InputError
        raise kind(f"{spec.param}: {message}", param=spec.param)
