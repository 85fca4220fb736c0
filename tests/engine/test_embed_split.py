"""A step's texts dealt to cores: who gets what, and that the vectors come back where they belong."""

import threading
from collections.abc import Sequence

import pytest
import torch

from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.device.lazy import LazyResult
from servekit.engine.embed_split import SplitEmbedRunner, deal
from servekit.engine.step import FakeEmbedRunner, FloatArray


def texts(*lengths: int) -> list[EmbedInput]:
    return [EmbedInput((number, *[0] * (length - 1))) for number, length in enumerate(lengths)]


@pytest.mark.parametrize(
    ("lengths", "num_shares", "shares"),
    [
        ([100, 100, 100, 100], 2, [[0, 2], [1, 3]]),
        ([90, 60, 50, 40, 30], 2, [[0, 3], [1, 2, 4]]),
        ([40, 40, 40], 3, [[0], [1], [2]]),
        pytest.param([200], 2, [[0]], id="one text belongs to all cores"),
        pytest.param([200, 8], 2, [[0, 1]], id="one core would wait for the other"),
        pytest.param([31, 32], 2, [[0, 1]], id="too little to wake threads for"),
        pytest.param([100, 100], 1, [[0, 1]], id="one core"),
        pytest.param([100, 100], 4, [[0, 1]], id="half of the cores would be idle"),
    ],
)
def test_texts_are_dealt_evenly_or_not_at_all(lengths: list[int], num_shares: int, shares: list[list[int]]) -> None:
    assert deal(lengths, num_shares) == shares


def test_vectors_come_in_the_order_of_the_texts() -> None:
    inner = FakeEmbedRunner()
    runner = SplitEmbedRunner(inner, 2)
    try:
        vectors = runner.embed(texts(40, 10, 30, 20)).get()
    finally:
        runner.close()
    assert vectors[:, 0].tolist() == [0, 1, 2, 3]
    assert vectors[:, 2].tolist() == [40, 10, 30, 20]
    assert sorted(inner.steps) == [[30, 20], [40, 10]]


class _Meeting(FakeEmbedRunner):
    """Every call waits for the other one, and notes how many cores torch would use in it."""

    def __init__(self) -> None:
        super().__init__()
        self._meet = threading.Barrier(2)
        self.threads: list[int] = []

    def embed(self, inputs: Sequence[EmbedInput]) -> LazyResult[FloatArray]:
        self._meet.wait(20)
        self.threads.append(torch.get_num_threads())
        return super().embed(inputs)


def test_shares_are_computed_at_once_by_one_core_each_and_other_threads_keep_theirs() -> None:
    before = torch.get_num_threads()
    runner = _Meeting()
    split = SplitEmbedRunner(runner, 2)
    try:
        torch.set_num_threads(2)
        split.embed(texts(50, 50)).get()
        assert runner.threads == [1, 1]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
        split.close()


def test_a_share_that_fails_fails_the_step() -> None:
    runner = SplitEmbedRunner(FakeEmbedRunner(fail_on=1), 2)
    try:
        with pytest.raises(RuntimeError, match="token 1"):
            runner.embed(texts(50, 50))
        assert runner.embed(texts(50)).get().tolist() == [[0, 0, 50]]
    finally:
        runner.close()
