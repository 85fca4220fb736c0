"""Choosing tokens on the CPU kernels: the rules of the sampler, on every instruction set."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from servekit.engine.core.request import Request, SamplingParams
from servekit.engine.core.sequence import Sequence
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.library import Library, load_library
from servekit.engine.native_sampler import NativeSampler
from servekit.engine.sampler import choose, log_probabilities, read
from servekit.engine.sampling_plan import Draw, SamplingPlan, plan_sampling

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
    ids: list[int] = NativeSampler(kernels).pick(np.array(scores, dtype=np.float32), _plan(rows)).tolist()
    return ids


def test_without_a_plan_the_first_of_the_largest_wins(kernels: Kernels) -> None:
    scores = np.full((3, 50), -1.0, dtype=np.float32)
    scores[0, 49] = scores[1, 7] = scores[1, 30] = 2.0
    scores[2] = -np.inf
    scores[2, 16] = -3.0
    assert NativeSampler(kernels).pick(scores, SamplingPlan((), None, None, ())).tolist() == [49, 7, 16]


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
    ours = torch.from_numpy(NativeSampler(kernels).pick(scores.numpy(), plan))

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


_MOVING: list[dict[str, Any]] = [
    {"presence_penalty": 1.5},
    {"frequency_penalty": -0.7, "logit_bias": {3: 4.0, 9: -100.0}},
    {"repetition_penalty": 1.3, "logprobs": 3},
    {"repetition_penalty": 0.8, "presence_penalty": 0.2, "frequency_penalty": 0.4, "logprobs": 0},
    {"min_tokens": 9, "stop_token_ids": frozenset({5})},
    {"min_tokens": 2, "temperature": 0.9, "logprobs": 20},
    {},
]


def test_what_moves_scores_moves_them_as_in_torch(kernels: Kernels) -> None:
    """Seeds make a draw of every request that is not greedy the same one."""
    generator = torch.Generator().manual_seed(7)
    scores = torch.randn(10 * len(_MOVING), 50, generator=generator) * 3
    before = scores.clone()
    draws = []
    for i in range(len(scores)):
        params = SamplingParams(**{"temperature": float(i % 2), "seed": i, **_MOVING[i % len(_MOVING)]})
        seq = Sequence(Request(str(i), (4, 5, 5, 8), params, 0.0), 0, 0.0)
        seq.token_ids += [9, 3, 9, i % 50]
        draws.append(Draw(seq, 4))
    plan = plan_sampling(draws, frozenset({0, 1}))
    ours = NativeSampler(kernels).sample(scores.numpy(), plan)
    token_ids = choose(scores, plan, iter([torch.from_numpy(array) for array in plan.arrays()]))
    theirs = read(plan, [token_ids, *log_probabilities(scores, plan, token_ids)])
    assert [token.token_id for token in ours] == [token.token_id for token in theirs]
    for one, other in zip(ours, theirs, strict=True):
        assert (one.logprob is None) == (other.logprob is None)
        if one.logprob is not None and other.logprob is not None:
            assert one.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-5)
            assert [token_id for token_id, _ in one.logprob.top] == [token_id for token_id, _ in other.logprob.top]
            assert [p for _, p in one.logprob.top] == pytest.approx([p for _, p in other.logprob.top], abs=1e-5)
    assert torch.equal(scores, before)


def test_a_grammar_leaves_only_what_it_allows(kernels: Kernels) -> None:
    scores = np.array([[5.0, 4.0, 3.0], [5.0, 4.0, 3.0], [5.0, 4.0, 3.0]], dtype=np.float32)
    plan = SamplingPlan((), None, None, grammar_rows=(0, 2))
    allowed = np.array([[False, True, True], [False, False, True]])
    assert [token.token_id for token in NativeSampler(kernels).sample(scores, plan, allowed)] == [1, 0, 2]
    assert scores[0, 0] == 5.0
