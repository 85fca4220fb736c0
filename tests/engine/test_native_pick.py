"""Choosing tokens on the CPU kernels: the rules of the sampler, on every instruction set."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from servekit.engine.core.request import Request, SamplingParams
from servekit.engine.core.sequence import Sequence
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.library import Library, load_library
from servekit.engine.native_pick import NativePick
from servekit.engine.sampler import choose
from servekit.engine.sampling_plan import Draw, SamplingPlan

_LIBRARY, _ = load_library()
_ISAS = [] if _LIBRARY is None else list(_LIBRARY.isas)
pytestmark = pytest.mark.skipif(_LIBRARY is None, reason="the CPU kernels are not built")

_EVERYTHING = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniform": 0.5, "greedy": 0.0}


@pytest.fixture(params=_ISAS)
def kernels(request: pytest.FixtureRequest) -> Iterator[Kernels]:
    library: Library | None = _LIBRARY
    assert library is not None
    made = Kernels(library, 2, request.param)
    yield made
    made.close()


def _plan(rows: list[dict[str, float]]) -> SamplingPlan:
    columns = [list({**_EVERYTHING, **row}.values()) for row in rows]
    return SamplingPlan((), None, np.array(columns, dtype=np.float64), ())


def _pick(kernels: Kernels, scores: list[list[float]], rows: list[dict[str, float]]) -> list[int]:
    ids: list[int] = NativePick(kernels)(torch.tensor(scores), _plan(rows)).tolist()
    return ids


def test_without_a_plan_the_first_of_the_largest_wins(kernels: Kernels) -> None:
    scores = torch.full((3, 50), -1.0)
    scores[0, 49] = scores[1, 7] = scores[1, 30] = 2.0
    scores[2] = float("-inf")
    scores[2, 16] = -3.0
    assert NativePick(kernels)(scores, SamplingPlan((), None, None, ())).tolist() == [49, 7, 16]


def test_a_number_falls_into_the_token_whose_share_it_lies_in(kernels: Kernels) -> None:
    shares = [0.1, 0.2, 0.0, 0.3, 0.4]
    scores = [[float(np.log(share)) if share else float("-inf") for share in shares]] * 6
    uniforms = [0.0, 0.05, 0.15, 0.35, 0.65, 0.9999999]
    assert _pick(kernels, scores, [{"uniform": u} for u in uniforms]) == [0, 0, 1, 3, 4, 4]


@pytest.mark.parametrize(
    ("limit", "allowed"),
    [
        ({"top_k": 1}, {4}),
        ({"top_k": 2}, {3, 4}),
        ({"top_p": 0.39}, {4}),
        ({"top_p": 0.41}, {3, 4}),
        ({"top_p": 0.71}, {1, 3, 4}),
        ({"min_p": 0.6}, {3, 4}),
        # top_p counts within what top_k leaves: 0.4 of 0.7 is under 0.6, 0.3 more is over.
        ({"top_k": 2, "top_p": 0.5}, {4}),
        ({"top_k": 2, "top_p": 0.6}, {3, 4}),
        ({"temperature": 1e-6}, {4}),
        ({"greedy": 1.0}, {4}),
        ({}, {0, 1, 3, 4}),
    ],
)
def test_what_is_cut_off_is_never_drawn(kernels: Kernels, limit: dict[str, float], allowed: set[int]) -> None:
    scores = [[float(np.log(share)) if share else float("-inf") for share in (0.1, 0.2, 0.0, 0.3, 0.4)]] * 200
    rows = [{**limit, "uniform": (i + 0.5) / 200} for i in range(200)]
    assert set(_pick(kernels, scores, rows)) == allowed


def test_equal_weights_survive_together(kernels: Kernels) -> None:
    rows: list[dict[str, float]] = [{"top_k": 1, "uniform": (i + 0.5) / 40} for i in range(40)]
    assert set(_pick(kernels, [[0.0, 1.0, 1.0, 0.5]] * 40, rows)) == {1, 2}


def test_it_chooses_as_torch_does(kernels: Kernels) -> None:
    generator = torch.Generator().manual_seed(5)
    vocab = 3001
    scores = torch.randn(400, vocab, generator=generator) * 3
    random = np.random.default_rng(5)
    rows = [
        {
            "temperature": float(random.choice([0.2, 0.7, 1.0, 1.5])),
            "top_k": int(random.choice([0, 1, 5, 40, 3000])),
            "top_p": float(random.choice([0.1, 0.5, 0.9, 0.95, 1.0])),
            "min_p": float(random.choice([0.0, 0.05, 0.3])),
            "uniform": float(random.random()),
            "greedy": float(i % 10 == 0),
        }
        for i in range(400)
    ]
    plan = _plan(rows)
    assert plan.random is not None
    ours = NativePick(kernels)(scores, plan)

    params = [torch.from_numpy(plan.random)]
    theirs = choose(scores, _with_params(plan, rows), iter(params))
    # Sums are rounded differently: a number on the edge of two tokens may go to either.
    assert int((ours != theirs).sum()) <= 2


def _with_params(plan: SamplingPlan, rows: list[dict[str, float]]) -> SamplingPlan:
    """The plan as torch's sampler reads it, which asks the requests what any of them wants."""
    draws = []
    for i, row in enumerate(rows):
        sampling = SamplingParams(
            temperature=0.0 if row["greedy"] else row["temperature"],
            top_k=int(row["top_k"]),
            top_p=row["top_p"],
            min_p=row["min_p"],
        )
        draws.append(Draw(Sequence(Request(str(i), (1,), sampling, 0.0), i, 0.0), 0))
    return SamplingPlan(tuple(draws), None, plan.random, ())
