"""The EmbedRunner over a real model: one ragged batch of texts without KV cache, then pooling or a classifier.

It must not know requests, the queue or the API.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from servekit.engine.batch import Batch, IntArray
from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.device.base import Device
from servekit.engine.device.lazy import LazyResult
from servekit.engine.step import FloatArray

HiddenStates = Callable[[Batch], torch.Tensor]
"""A batch of T tokens -> [T, hidden]."""
Head = Callable[[torch.Tensor, IntArray], torch.Tensor]
"""[T, hidden] and where each text begins [S + 1] -> [S, dim] in float32."""


class ModelEmbedRunner:
    """Texts -> vectors, by a model and a head."""

    def __init__(self, hidden_states: HiddenStates, head: Head, device: Device) -> None:
        self._hidden_states = hidden_states
        self._head = head
        self._device = device

    @torch.inference_mode()
    def embed(self, inputs: Sequence[EmbedInput]) -> LazyResult[FloatArray]:
        """The vectors [n, dim] of n texts, as soon as the device has computed them."""
        batch = self._batch(inputs)
        hidden, cu_seqlens = self._hidden_states(batch), batch.cu_seqlens_q
        if any(text.num_unpooled for text in inputs):
            hidden, cu_seqlens = self._pooled_part(hidden, batch, inputs)
        vectors = self._head(hidden, cu_seqlens)
        return _OnHost(self._device.fetch(vectors))

    def close(self) -> None:
        """Memory goes with the last reference."""

    def _pooled_part(
        self, hidden: torch.Tensor, batch: Batch, inputs: Sequence[EmbedInput]
    ) -> tuple[torch.Tensor, IntArray]:
        """The hidden states that count, and where each text begins among them."""
        skipped = np.array([text.num_unpooled for text in inputs])
        positions = np.arange(batch.num_tokens) - np.repeat(batch.cu_seqlens_q[:-1], batch.query_lens)
        kept = np.flatnonzero(positions >= np.repeat(skipped, batch.query_lens))
        lengths = batch.query_lens - skipped
        return hidden[self._tensor(kept)], np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))

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
