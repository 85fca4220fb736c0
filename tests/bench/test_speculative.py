"""Expected tokens of a pass, and where drafting stops to pay."""

import json

import pytest

from servekit.bench.speculative import best, expected_tokens, speculate
from servekit.cli.main import run
from servekit.errors import ConfigError


def test_the_textbook_number() -> None:
    assert round(expected_tokens(0.8, 4), 2) == 3.36


@pytest.mark.parametrize(("alpha", "k", "tokens"), [(0.0, 4, 1.0), (1.0, 4, 5.0), (0.5, 1, 1.5)])
def test_the_ends(alpha: float, k: int, tokens: float) -> None:
    assert expected_tokens(alpha, k) == tokens


def test_at_the_break_even_cost_nothing_is_won() -> None:
    free = speculate(0.8, 4)

    assert free.break_even_draft_cost == pytest.approx(0.5904)
    assert free.speedup is None
    assert speculate(0.8, 4, free.break_even_draft_cost).speedup == pytest.approx(1.0)
    assert (speculate(0.8, 4, 0.1).speedup or 0) > 1


def test_a_costly_draft_should_be_short() -> None:
    assert best([speculate(0.6, k, 0.2) for k in (1, 2, 4, 8)]).k == 2
    assert best([speculate(0.6, k, 0.0) for k in (1, 2, 4, 8)]).k == 8


@pytest.mark.parametrize(
    ("alpha", "k", "cost", "param"), [(1.2, 4, None, "alpha"), (0.5, 0, None, "k"), (0.5, 1, -1.0, "draft_cost")]
)
def test_a_wrong_value_is_named(alpha: float, k: int, cost: float | None, param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        speculate(alpha, k, cost)
    assert caught.value.param == param


def test_not_a_number_is_refused() -> None:
    with pytest.raises(ConfigError):
        speculate(float("nan"), 4)


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "speculative", "--alpha", "0.8", "--k", "4", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["speculative"]
    assert round(found["tokens_per_pass"], 2) == 3.36

    assert run(["bench", "speculative", "--alpha", "0.8"]) == 0
    assert "3.36" in capsys.readouterr().out

    assert run(["bench", "speculative", "--alpha", "0.8", "--k", "x"]) == 2
