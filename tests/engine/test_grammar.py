"""Grammars by themselves: what may come next, what is refused, and what is kept. No model."""

import json

import pytest

from servekit.engine.core.request import GrammarSpec, Request, SamplingParams
from servekit.engine.core.sequence import Sequence
from servekit.engine.grammar import MAX_CACHED, Grammars
from servekit.errors import EngineError, InputError, UnsupportedError
from tests.engine.text.byte_tokenizer import EOS, VOCAB_SIZE, byte_tokenizer

PADDED = VOCAB_SIZE + 7
"""A model's vocabulary may be larger than its tokenizer's."""


@pytest.fixture
def grammars() -> Grammars:
    return Grammars(byte_tokenizer().to_json, PADDED, frozenset({EOS}))


def sequence(spec: GrammarSpec, text: str = "") -> Sequence:
    seq = Sequence(Request("r", (1, 2), SamplingParams(grammar=spec), 0.0), 0, 0.0)
    seq.token_ids += byte_tokenizer().encode(text, add_special_tokens=False)
    return seq


def allowed_after(grammars: Grammars, spec: GrammarSpec, text: str) -> set[str | int]:
    grammars.compile(spec)
    (row,) = grammars.allowed([sequence(spec, text)])
    assert row.shape == (PADDED,)
    tokenizer = byte_tokenizer()
    return {i if i == EOS else tokenizer.token_text(i) for i in row.nonzero()[0].tolist()}


REGEX = GrammarSpec("regex", "ab?c", "regex")


@pytest.mark.parametrize(("text", "expected"), [("", {"a"}), ("a", {"b", "c"}), ("ab", {"c"}), ("abc", {EOS})])
def test_what_may_come_next(grammars: Grammars, text: str, expected: set[str | int]) -> None:
    assert allowed_after(grammars, REGEX, text) == expected


def test_every_kind_of_grammar(grammars: Grammars) -> None:
    assert allowed_after(grammars, GrammarSpec("grammar", 'root ::= "x" | "y"'), "") == {"x", "y"}
    assert allowed_after(grammars, GrammarSpec("lark", 'start: "p" | "q" "r"'), "q") == {"r"}
    schema = GrammarSpec("json_schema", '{"enum":[17,"s"]}')
    assert allowed_after(grammars, schema, "") == {"1", '"'}
    assert allowed_after(grammars, schema, "17") == {EOS}


def test_rows_of_a_batch_do_not_mix_and_catching_up_is_the_same(grammars: Grammars) -> None:
    grammars.compile(REGEX)
    seqs = [sequence(REGEX), sequence(REGEX, "ab")]
    first = grammars.allowed(seqs)
    assert (grammars.allowed(seqs) == first).all()
    seqs[0].token_ids += byte_tokenizer().encode("ab", add_special_tokens=False)
    again = grammars.allowed(seqs)
    assert (again[0] == first[1]).all()
    assert (again[1] == first[1]).all()


def test_a_token_that_is_still_on_the_device_counts_once(grammars: Grammars) -> None:
    grammars.compile(REGEX)
    seq = sequence(REGEX)
    ahead = grammars.allowed([seq], {seq: ord("a")})
    again = grammars.allowed([seq], {seq: ord("a")})
    seq.token_ids.append(ord("a"))
    known = grammars.allowed([seq])
    assert (ahead == known).all()
    assert (again == known).all()
    assert known[0].nonzero()[0].tolist() == [ord("b"), ord("c")]


def test_behind_the_end_of_an_answer_everything_may_come(grammars: Grammars) -> None:
    grammars.compile(REGEX)
    seq = sequence(REGEX, "ac")
    assert grammars.allowed([seq], {seq: EOS}).all()
    # Behind the last token that the grammar has, but before the end, only the end may come.
    seq = sequence(REGEX, "a")
    assert grammars.allowed([seq], {seq: ord("c")})[0].nonzero()[0].tolist() == [EOS]


def test_a_token_that_was_not_allowed_fails_its_request(grammars: Grammars) -> None:
    grammars.compile(REGEX)
    with pytest.raises(EngineError):
        grammars.allowed([sequence(REGEX, "b")])


SELF = {"$defs": {"A": {"$ref": "#/$defs/A"}}, "$ref": "#/$defs/A"}


@pytest.mark.parametrize(
    ("schema", "kind"),
    [
        (SELF, InputError),
        ({"type": "string", "pattern": "["}, InputError),
        ({"type": "wizard"}, InputError),
        ({"type": "array", "uniqueItems": True}, UnsupportedError),
        ({"type": "string", "format": "wizard"}, UnsupportedError),
        ({"$ref": "file:///etc/passwd"}, InputError),
        ({"type": "array", "uniqueItems": True, "x-guidance": {"lenient": True}}, UnsupportedError),
        ({"enum": ["a" * 70_000]}, InputError),
        (False, InputError),
    ],
)
def test_a_schema_that_cannot_be_enforced(grammars: Grammars, schema: object, kind: type[InputError]) -> None:
    with pytest.raises(kind) as caught:
        grammars.compile(GrammarSpec("json_schema", json.dumps(schema)))
    assert caught.value.param == "response_format"
    assert len(caught.value.message) < 400


def test_a_pattern_that_would_hang_a_backtracking_engine_is_harmless(grammars: Grammars) -> None:
    spec = GrammarSpec("json_schema", '{"type":"string","pattern":"^(a+)+b$"}')
    assert allowed_after(grammars, spec, '"' + "a" * 200) == {"a", "b"}


@pytest.mark.parametrize("kind", ["regex", "grammar", "lark"])
def test_a_grammar_that_is_none_names_its_field(grammars: Grammars, kind: str) -> None:
    with pytest.raises(InputError) as caught:
        grammars.compile(GrammarSpec(kind, "[((", "regex"))  # type: ignore[arg-type]
    assert caught.value.param == "regex"


def test_what_is_kept_is_bounded_and_what_is_in_use_stays(grammars: Grammars) -> None:
    grammars.hold(REGEX)
    for i in range(1000):
        grammars.compile(GrammarSpec("regex", f"x{i}"))
    assert len(grammars._compiled) == MAX_CACHED + 1
    assert allowed_after(grammars, REGEX, "a") == {"b", "c"}
    grammars.release(REGEX)
    assert len(grammars._compiled) == MAX_CACHED


def test_a_model_without_an_end_cannot_be_constrained() -> None:
    with pytest.raises(UnsupportedError, match="no token that ends"):
        Grammars(byte_tokenizer().to_json, PADDED, frozenset()).compile(REGEX)
