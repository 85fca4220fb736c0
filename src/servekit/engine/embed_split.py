"""SplitEmbedRunner: the texts of a step dealt to the cores, each of which computes its share alone.

Texts do not depend on each other, so cores that compute whole texts never wait for one another between two layers, as
threads that share every matrix product must. On a machine that does other things as well, that waiting is most of the
time. It must not know models.
"""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager

import numpy as np
import torch

from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.device.lazy import LazyResult, Ready
from servekit.engine.step import EmbedRunner, FloatArray

MIN_TOKENS = 64
"""Tokens of a step below which waking threads costs more than they save."""
_SHARED_EFFICIENCY = 0.7
"""What is left of a core when all share one product; a deal that keeps the cores busier than that is taken."""


class SplitEmbedRunner:
    """An EmbedRunner over another one, whose `embed` may be called by several threads at once, for a CPU.

    A step that cannot be dealt evenly, a single text above all, is computed by all cores together: torch gets
    `num_threads` for it, also where it has fewer between steps, beside a model whose kernels have threads of their own.
    """

    def __init__(self, inner: EmbedRunner, num_threads: int) -> None:
        self._inner = inner
        self._num_threads = num_threads
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="servekit-embed")
        self._start()

    def embed(self, inputs: Sequence[EmbedInput]) -> LazyResult[FloatArray]:
        """The vectors [n, dim], complete when this returns."""
        shares = deal([len(text.token_ids) for text in inputs], self._num_threads)
        if len(shares) == 1:
            with _torch_threads(self._num_threads):
                return self._inner.embed(inputs)
        parts = [self._pool.submit(self._compute, [inputs[i] for i in share]) for share in shares]
        vectors = _in_order(parts, shares)
        return Ready(vectors)

    def close(self) -> None:
        """End the threads."""
        self._pool.shutdown()
        self._inner.close()

    def _compute(self, inputs: Sequence[EmbedInput]) -> FloatArray:
        return self._inner.embed(inputs).get()

    def _start(self) -> None:
        """Start all threads and give each one core. torch keeps that number for each thread, and a default for new
        ones, which setting it changes as well."""
        default = torch.get_num_threads()
        together = threading.Barrier(self._num_threads)

        def take_one_core() -> None:
            together.wait()
            torch.get_num_threads()  # takes over the default, which would otherwise come later and win
            torch.set_num_threads(1)

        for started in [self._pool.submit(take_one_core) for _ in range(self._num_threads)]:
            started.result()
        torch.set_num_threads(default)


def deal(lengths: Sequence[int], num_shares: int) -> list[list[int]]:
    """The places of texts in shares of about equal tokens, or one share of all where dealing would not pay.

    The longest text goes first, each to the share that has least (Graham's rule); within a share order is kept.
    """
    everything = [list(range(len(lengths)))]
    total = sum(lengths)
    if num_shares == 1 or len(lengths) == 1 or total < MIN_TOKENS:
        return everything
    shares: list[list[int]] = [[] for _ in range(num_shares)]
    sizes = [0] * num_shares
    for place in sorted(range(len(lengths)), key=lambda place: -lengths[place]):
        least = sizes.index(min(sizes))
        shares[least].append(place)
        sizes[least] += lengths[place]
    if max(sizes) * num_shares * _SHARED_EFFICIENCY > total:
        return everything
    return [sorted(share) for share in shares if share]


def _in_order(parts: Sequence[Future[FloatArray]], shares: Sequence[Sequence[int]]) -> FloatArray:
    """All vectors in the order of the texts; every part is waited for, also when one has failed."""
    errors = [error for part in parts if (error := part.exception()) is not None]
    if errors:
        raise errors[0]
    rows = [part.result() for part in parts]
    vectors = np.empty((sum(len(share) for share in shares), rows[0].shape[1]), dtype=np.float32)
    for share, values in zip(shares, rows, strict=True):
        vectors[list(share)] = values
    return vectors


@contextmanager
def _torch_threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
