"""The EmbedRunner over a real model: one ragged batch of texts without KV cache, then pooling or a classifier.

It must not know requests, the queue or the API.
"""

from collections.abc import Callable, Sequence

import numpy as np
import torch

from servekit.engine.batch import Batch
from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.device.base import Device
from servekit.engine.device.lazy import LazyResult, Mapped
from servekit.engine.graphs import GraphCache
from servekit.engine.host_batch import HostBatch
from servekit.engine.native.kernels import Kernels
from servekit.engine.step import FloatArray

HiddenStates = Callable[[Batch], torch.Tensor]
"""A batch of T tokens -> [T, hidden]."""
Head = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""[T, hidden] and where each text begins [S + 1] -> [S, dim] in float32."""


class ModelEmbedRunner:
    """Texts -> vectors, by a model and a head.

    Small steps are recorded by `graphs` where a device can. `kernels` are those that the model computes with, to be
    closed when the runner is.
    """

    def __init__(
        self,
        hidden_states: HiddenStates,
        head: Head,
        device: Device,
        *,
        graphs: GraphCache | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self._hidden_states = hidden_states
        self._head = head
        self._device = device
        self._graphs = graphs
        self._kernels = kernels

    @torch.inference_mode()
    def embed(self, inputs: Sequence[EmbedInput]) -> LazyResult[FloatArray]:
        """The vectors [n, dim] of n texts, as soon as the device has computed them."""
        is_part = any(text.num_unpooled for text in inputs)
        host = self._batch(inputs, always_types=self._graphs is not None)
        key = self._graphs.key("embed", host) if self._graphs is not None and not is_part else None
        if key is not None:
            host = host.padded(key.num_tokens, key.num_seqs)
        tensors = self._device.upload(host.arrays())
        if key is not None:
            assert self._graphs is not None
            vectors = self._graphs.run(key, host, tensors, self._compute)[: len(inputs)]
        elif is_part:
            vectors = self._compute_part(Batch.of(host, tensors), inputs)
        else:
            vectors = self._compute(Batch.of(host, tensors))
        return Mapped(self._device.fetch(vectors), _as_array)

    def _compute(self, batch: Batch) -> torch.Tensor:
        """What a graph records."""
        assert batch.seq_starts is not None
        return self._head(self._hidden_states(batch), batch.seq_starts)

    def close(self) -> None:
        """End the kernels' threads; memory goes with the last reference."""
        if self._kernels is not None:
            self._kernels.close()

    def _compute_part(self, batch: Batch, inputs: Sequence[EmbedInput]) -> torch.Tensor:
        """The same, of the hidden states that count."""
        skipped = np.array([text.num_unpooled for text in inputs])
        places = np.arange(batch.num_tokens) - np.repeat(batch.cu_seqlens_q[:-1], batch.query_lens)
        kept = np.flatnonzero(places >= np.repeat(skipped, batch.query_lens))
        starts = np.concatenate(([0], np.cumsum(batch.query_lens - skipped))).astype(np.int32)
        rows, seq_starts = self._device.upload([kept, starts])
        return self._head(self._hidden_states(batch)[rows], seq_starts)

    @staticmethod
    def _batch(inputs: Sequence[EmbedInput], *, always_types: bool) -> HostBatch:
        """`always_types`: a recorded step reads types whether a batch has pairs or not."""
        lengths = np.array([len(text.token_ids) for text in inputs], dtype=np.int64)
        ends = np.cumsum(lengths)
        num_tokens = int(ends[-1])
        input_ids = np.fromiter((i for text in inputs for i in text.token_ids), np.int64, num_tokens)
        positions = np.arange(num_tokens) - np.repeat(ends - lengths, lengths)
        types = None
        if always_types or any(text.second_start is not None for text in inputs):
            seconds = np.array([len(t.token_ids) if t.second_start is None else t.second_start for t in inputs])
            types = (positions >= np.repeat(seconds, lengths)).astype(np.int64)
        return HostBatch(
            input_ids=input_ids,
            positions=positions,
            logits_idx=ends - 1,
            slot_mapping=None,
            block_tables=None,
            query_lens=lengths,
            context_lens=lengths,
            block_size=1,
            token_types=types,
        )


def _as_array(tensors: tuple[torch.Tensor, ...]) -> FloatArray:
    array: FloatArray = tensors[0].numpy()
    return array
