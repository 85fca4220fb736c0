"""What each sampling parameter does to the choice, and that neighbours do not matter."""

import contextlib
from collections import Counter
from collections.abc import Sequence as Seq
from typing import Any

import pytest
import torch

from servekit.engine.core.request import Request, SampledToken, SamplingParams
from servekit.engine.core.sequence import Sequence
from servekit.engine.device.fake import NoWaiting
from servekit.engine.sampler import choose, log_probabilities, read
from servekit.engine.sampling_plan import Draw, plan_sampling, uniforms

_VOCAB = 2000


def _seq(prompt: Seq[int] = (1,), generated: Seq[int] = (), **params: Any) -> Sequence:
    seq = Sequence(Request("r", tuple(prompt), SamplingParams(**params), 0.0), 0, 0.0)
    seq.token_ids += generated
    return seq


def _sample(
    logits: torch.Tensor,
    seqs: Seq[Sequence],
    eos: frozenset[int] = frozenset(),
    pending: Seq[int] | None = None,
    may_wait: bool = True,
) -> list[SampledToken]:
    """What is chosen for `seqs`; `pending` are last tokens that only the device knows, -1 for none."""
    known = [-1] * len(seqs) if pending is None else pending
    draws = [
        Draw(seq, seq.num_output_tokens + (last >= 0), has_pending=last >= 0)
        for seq, last in zip(seqs, known, strict=True)
    ]
    plan = plan_sampling(draws, eos)
    tensors = iter([torch.from_numpy(array) for array in plan.arrays()])
    last_tokens = None if pending is None else torch.tensor(pending)
    with contextlib.nullcontext() if may_wait else NoWaiting():
        token_ids = choose(logits, plan, tensors, pending=last_tokens, may_wait=may_wait)
        found = [token_ids, *log_probabilities(logits, plan, token_ids)] if plan.has_logprobs else [token_ids]
    return read(plan, found)


def _ids(logits: torch.Tensor, seqs: Seq[Sequence], eos: frozenset[int] = frozenset()) -> list[int]:
    return [token.token_id for token in _sample(logits, seqs, eos)]


def _drawn(row: torch.Tensor, num: int = 400, **params: Any) -> Counter[int]:
    """Counts over `num` seeds, drawn as one batch."""
    seqs = [_seq(seed=seed, **params) for seed in range(num)]
    return Counter(_ids(row.expand(num, -1), seqs))


@pytest.fixture
def logits() -> torch.Tensor:
    return torch.randn(8, _VOCAB, generator=torch.Generator().manual_seed(0)) * 3


def test_greedy_takes_the_most_likely(logits: torch.Tensor) -> None:
    assert _ids(logits, [_seq(temperature=0.0)] * 8) == logits.argmax(dim=-1).tolist()


def test_a_greedy_row_stays_greedy_among_random_ones(logits: torch.Tensor) -> None:
    seqs = [_seq(temperature=0.0 if row % 2 else 5.0, seed=row) for row in range(8)]
    assert _ids(logits, seqs)[1::2] == logits.argmax(dim=-1).tolist()[1::2]


def test_a_choice_does_not_depend_on_its_neighbours(logits: torch.Tensor) -> None:
    seqs = [_seq(temperature=1.0 + row, top_p=0.5 + row / 20, top_k=row * 30, seed=row) for row in range(8)]
    alone = [_ids(logits[row : row + 1], seqs[row : row + 1])[0] for row in range(8)]
    assert _ids(logits, seqs) == alone
    assert _ids(logits.flip(0), seqs[::-1]) == alone[::-1]


def test_the_same_seed_and_position_give_the_same_token_and_another_position_another(logits: torch.Tensor) -> None:
    first = [_ids(logits[:1], [_seq(generated=[0] * i, seed=7, temperature=3.0)])[0] for i in range(20)]
    again = [_ids(logits[:1], [_seq(generated=[0] * i, seed=7, temperature=3.0)])[0] for i in range(20)]
    assert first == again
    assert len(set(first)) > 10


def test_uniform_numbers_are_uniform_over_seeds_and_over_positions() -> None:
    for seqs in (
        [_seq(seed=seed) for seed in range(4000)],
        [_seq(seed=3, generated=[0] * i) for i in range(1000)],
        [_seq(seed=-1), _seq(seed=2**64 - 1)],
    ):
        numbers = torch.from_numpy(uniforms([Draw(seq, seq.num_output_tokens) for seq in seqs]))
        assert ((numbers >= 0) & (numbers < 1)).all()
        if len(seqs) > 2:
            counts = torch.histc(numbers.float(), bins=10, min=0, max=1) / len(seqs)
            assert ((counts - 0.1).abs() < 0.04).all()


def test_temperature_follows_the_softmax() -> None:
    row = torch.tensor([0.0, 1.0, 2.0, -30.0])
    counts = _drawn(row, 4000, temperature=2.0)
    expected = (row / 2.0).softmax(dim=0)
    for token_id, probability in enumerate(expected.tolist()):
        assert abs(counts[token_id] / 4000 - probability) < 0.03
    assert counts[3] == 0


def test_a_tiny_temperature_is_greedy_and_does_not_overflow() -> None:
    row = torch.tensor([1e4, -1e4, 1.0001e4])
    assert _drawn(row, 50, temperature=1e-6) == {2: 50}


def test_top_k_keeps_k() -> None:
    row = torch.zeros(_VOCAB)
    row[[5, 17, 900]] = torch.tensor([0.3, 0.2, 0.1])
    assert set(_drawn(row, top_k=3)) == {5, 17, 900}
    assert set(_drawn(row, 20, top_k=1)) == {5}


def test_top_k_above_the_vocabulary_is_off() -> None:
    row = torch.zeros(4)
    assert set(_drawn(row, top_k=50)) == {0, 1, 2, 3}


@pytest.mark.parametrize(("top_p", "kept"), [(0.4, {0}), (0.5, {0}), (0.51, {0, 1}), (0.8, {0, 1}), (0.81, {0, 1, 2})])
def test_top_p_keeps_the_fewest_whose_mass_reaches_p(top_p: float, kept: set[int]) -> None:
    row = torch.tensor([0.5, 0.3, 0.15, 0.05]).log()
    assert set(_drawn(row, top_p=top_p)) == kept


def test_top_p_over_a_flat_distribution_needs_more_candidates_than_are_looked_at_first() -> None:
    row = -torch.arange(_VOCAB) * 1e-4
    counts = _drawn(row, 3000, top_p=0.9)
    probabilities = row.softmax(dim=0)
    num_kept = int((probabilities.cumsum(0) - probabilities < 0.9).sum())
    assert num_kept > 1500
    assert max(counts) < num_kept
    assert len([token_id for token_id in counts if token_id > 1000]) > 500


def test_top_p_applies_to_what_top_k_leaves() -> None:
    row = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    # Of the two that top_k leaves the first has 4/7 of the mass, which is over 0.5.
    assert set(_drawn(row, top_k=2, top_p=0.5)) == {0}
    assert set(_drawn(row, top_k=2, top_p=1.0)) == {0, 1}


def test_min_p_is_a_share_of_the_most_likely() -> None:
    row = torch.tensor([0.5, 0.26, 0.24]).log()
    assert set(_drawn(row, min_p=0.5)) == {0, 1}


def test_logit_bias_forces_and_forbids(logits: torch.Tensor) -> None:
    forced = _seq(temperature=0.0, logit_bias={77: 100.0})
    best = int(logits[1].argmax())
    forbidden = _seq(temperature=0.0, logit_bias={best: -100.0})
    first, second = _ids(logits[:2], [forced, forbidden])
    assert first == 77
    assert second == int(logits[1].topk(2).indices[1])


def test_presence_and_frequency_penalties_count_generated_tokens_only() -> None:
    row = torch.tensor([[3.0, 2.5, 0.0]])
    assert _ids(row, [_seq(prompt=[0, 0], temperature=0.0, presence_penalty=2.0)]) == [0]
    assert _ids(row, [_seq(generated=[0], temperature=0.0, presence_penalty=0.4)]) == [0]
    assert _ids(row, [_seq(generated=[0, 0], temperature=0.0, presence_penalty=0.4)]) == [0]
    assert _ids(row, [_seq(generated=[0, 0], temperature=0.0, frequency_penalty=0.4)]) == [1]
    assert _ids(row, [_seq(generated=[0, 1], temperature=0.0, presence_penalty=0.6)]) == [0]


def test_repetition_penalty_counts_the_prompt_and_shrinks_towards_zero_from_both_sides() -> None:
    assert _ids(torch.tensor([[3.0, 2.0]]), [_seq(prompt=[0], temperature=0.0, repetition_penalty=2.0)]) == [1]
    assert _ids(torch.tensor([[-1.0, -1.5]]), [_seq(prompt=[0], temperature=0.0, repetition_penalty=2.0)]) == [1]


def test_min_tokens_forbids_every_stop_until_it_is_reached() -> None:
    row = torch.tensor([[5.0, 4.0, 3.0, 2.0]])
    stops: dict[str, Any] = {"temperature": 0.0, "min_tokens": 2, "stop_token_ids": frozenset({1})}
    assert _ids(row, [_seq(**stops)], eos=frozenset({0})) == [2]
    assert _ids(row, [_seq(ignore_eos=True, **stops)], eos=frozenset({0})) == [0]
    assert _ids(row, [_seq(generated=[2, 2], **stops)], eos=frozenset({0})) == [0]


def test_logprobs_are_the_models_own_whatever_was_adjusted(logits: torch.Tensor) -> None:
    seqs = [
        _seq(temperature=0.0, logprobs=2, logit_bias={9: 100.0}),
        _seq(temperature=0.0),
        _seq(temperature=0.0, logprobs=0),
    ]
    first, second, third = _sample(logits[:3], seqs)
    expected = logits[:3].log_softmax(dim=-1)
    assert first.logprob is not None
    assert third.logprob is not None
    assert second.logprob is None
    assert first.token_id == first.logprob.token_id == 9
    assert first.logprob.logprob == pytest.approx(expected[0, 9].item(), abs=1e-5)
    values, ids = expected[0].topk(2)
    assert [token_id for token_id, _ in first.logprob.top] == ids.tolist()
    assert [value for _, value in first.logprob.top] == pytest.approx(values.tolist(), abs=1e-5)
    assert third.logprob.top == ()


_EVERY_PARAMETER: list[dict[str, Any]] = [
    {"temperature": 0.0},
    {"temperature": 0.7, "seed": 1},
    {"temperature": 0.9, "seed": 2, "top_p": 0.8},
    {"temperature": 1.3, "seed": 3, "top_k": 7, "top_p": 0.5},
    {"temperature": 1.0, "seed": 4, "min_p": 0.1},
    {"temperature": 0.0, "repetition_penalty": 1.7, "presence_penalty": 0.5, "frequency_penalty": 1.5},
    {"temperature": 2.0, "seed": 5, "frequency_penalty": 2.0, "logit_bias": {3: 5.0, 4: -100.0}},
    {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": frozenset({8}), "logprobs": 4, "presence_penalty": 2.0},
]


def test_nothing_waits_for_the_device_and_the_choice_is_the_same(logits: torch.Tensor) -> None:
    seqs = [_seq(prompt=[5, 6], generated=[9, 9], **params) for params in _EVERY_PARAMETER]
    waiting = _sample(logits, seqs, eos=frozenset({1}))
    assert _sample(logits, seqs, eos=frozenset({1}), may_wait=False) == waiting


@pytest.mark.parametrize("last", [5, 9, 77], ids=["in-the-prompt", "in-the-answer", "new"])
def test_a_token_that_only_the_device_knows_counts_like_any_other(logits: torch.Tensor, last: int) -> None:
    steep = logits.clone()
    steep[:, last] = steep.max() + 0.3
    known = [_seq(prompt=[5, 6], generated=[9, 4, last], **params) for params in _EVERY_PARAMETER]
    behind = [_seq(prompt=[5, 6], generated=[9, 4], **params) for params in _EVERY_PARAMETER]
    eos = frozenset({1})
    assert _sample(steep, behind, eos, pending=[last] * 8, may_wait=False) == _sample(steep, known, eos)
    # Rows whose last token is known stay as they are beside others.
    half = [known[row] if row % 2 else behind[row] for row in range(8)]
    assert _sample(steep, half, eos, pending=[-1 if row % 2 else last for row in range(8)]) == _sample(
        steep, known, eos
    )
