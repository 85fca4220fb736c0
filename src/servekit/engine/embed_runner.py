"""The EmbedRunner over a real model: one ragged batch of texts without KV cache, then pooling or a classifier.

It must not know requests, the queue or the API.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch

from servekit.engine.batch import Batch, IntArray
from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.device.base import Device
from servekit.engine.device.lazy import LazyResult
from servekit.engine.native.kernels import Kernels
from servekit.engine.step import FloatArray

HiddenStates = Callable[[Batch], torch.Tensor]
"""A batch of T tokens -> [T, hidden]."""
Head = Callable[[torch.Tensor, IntArray], torch.Tensor]
"""[T, hidden] and where each text begins [S + 1] -> [S, dim] in float32."""


class ModelEmbedRunner:
    """Texts -> vectors, by a model and a head.

    `threads` is how many torch may use during a step, where it has fewer between steps: beside a model whose kernels
    have threads of their own. None leaves torch as it is. `kernels` are those that the model computes with.
    """

    def __init__(
        self,
        hidden_states: HiddenStates,
        head: Head,
        device: Device,
        threads: int | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self._hidden_states = hidden_states
        self._head = head
        self._device = device
        self._threads = threads
        self._kernels = kernels

    @torch.inference_mode()
    def embed(self, inputs: Sequence[EmbedInput]) -> LazyResult[FloatArray]:
        """The vectors [n, dim] of n texts, as soon as the device has computed them."""
        batch = self._batch(inputs)
        with _torch_threads(self._threads):
            vectors = self._head(self._hidden_states(batch), batch.cu_seqlens_q)
        return _OnHost(self._device.fetch(vectors))

    def close(self) -> None:
        """End the kernels' threads; memory goes with the last reference."""
        if self._kernels is not None:
            self._kernels.close()

    def _batch(self, inputs: Sequence[EmbedInput]) -> Batch:
        lengths = np.array([len(text.token_ids) for text in inputs], dtype=np.int64)
        ends = np.cumsum(lengths)
        num_tokens = int(ends[-1])
        input_ids = np.fromiter((i for text in inputs for i in text.token_ids), np.int64, num_tokens)
        positions = np.arange(num_tokens) - np.repeat(ends - lengths, lengths)
        types = None
        if any(text.second_start is not None for text in inputs):
            seconds = np.array([len(t.token_ids) if t.second_start is None else t.second_start for t in inputs])
            types = self._tensor((positions >= np.repeat(seconds, lengths)).astype(np.int64))
        return Batch(
            input_ids=self._tensor(input_ids),
            positions=self._tensor(positions),
            logits_idx=self._tensor(ends - 1),
            slot_mapping=None,
            block_tables=None,
            query_lens=lengths,
            context_lens=lengths,
            block_size=1,
            num_tokens=num_tokens,
            num_seqs=len(inputs),
            token_types=types,
        )

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device.torch_device, non_blocking=True)


@contextmanager
def _torch_threads(count: int | None) -> Iterator[None]:
    if count is None:
        yield
        return
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _OnHost:
    """A fetched tensor as an array."""

    def __init__(self, tensor: LazyResult[torch.Tensor]) -> None:
        self._tensor = tensor

    def ready(self) -> bool:
        """Whether `get()` would return at once."""
        return self._tensor.ready()

    def get(self) -> FloatArray:
        """The values."""
        array: FloatArray = self._tensor.get().numpy()
        return array
