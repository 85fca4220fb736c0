"""GraphCache: steps recorded while serving, so that a small step is one launch and the first answer waits for none.

Batches are padded to a few sizes. The first batch of a size runs piece by piece, which also warms up what its kernels
choose once; the second is recorded and replayed, later ones only replayed. It must not know models or CUDA.
"""

import logging
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from servekit.config import EngineConfig
from servekit.engine.attention.base import AttentionBackend
from servekit.engine.auto import without_graphs
from servekit.engine.batch import Batch
from servekit.engine.device.base import CapturedGraph, CaptureError, Device
from servekit.engine.host_batch import HostBatch
from servekit.engine.step import GraphStats
from servekit.units import format_bytes

log = logging.getLogger("servekit.engine")

GraphKind = Literal["decode", "mixed", "embed"]

MOST_MEMORY = 2**30
MEMORY_SHARE = 0.05
"""Of what is free beside the weights, up to MOST_MEMORY: tens of graphs of a large model take some hundred MB."""
MAX_FAILURES = 3
"""After so many sizes could not be recorded, no other is tried."""


@dataclass(frozen=True, slots=True)
class GraphKey:
    """One size of batch. In `decode` every sequence has one token, so both numbers are the same."""

    kind: GraphKind
    num_tokens: int
    num_seqs: int


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """The sizes that batches are padded to. Above `max_tokens` the device is the slower side, and graphs gain nothing.

    Sizes grow by a half at most, so that padding wastes no more than a third of a step; a memory-bound one loses less.
    """

    sequences: tuple[int, ...] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
    tokens: tuple[int, ...] = (64, 128, 192, 256, 384, 512)

    @property
    def max_tokens(self) -> int:
        """The eager threshold."""
        return self.tokens[-1]


@dataclass(slots=True)
class _Ready:
    """A recorded step: where it reads, where it writes, and what of the shared memory it uses."""

    inputs: list[torch.Tensor]
    output: torch.Tensor
    graph: CapturedGraph


def plan_graphs(device: Device, backend: AttentionBackend[Any], config: EngineConfig) -> tuple[int, str]:
    """Bytes that recorded steps may take, 0 where none are made, and the reason.

    Raises ConfigError where they are asked for and cannot be had.
    """
    if config.enforce_eager:
        return 0, without_graphs(config, "--enforce-eager")
    if not device.is_queued:
        return 0, without_graphs(config, f"a {device.kind} computes each step as it is launched")
    if not backend.is_capturable:
        return 0, without_graphs(config, f"{backend.name} attention plans its steps on the host")
    memory = min(MOST_MEMORY, int(device.free_memory() * MEMORY_SHARE))
    return memory, f"captured while serving, in at most {format_bytes(memory)}"


class GraphCache:
    """Recorded steps of one model, the least recently used given up beyond `memory` bytes.

    `max_num_seqs` is the most sequences that a step can have, `max_context_len` the most tokens that one can see, and
    `max_blocks` the length of a block table. `failure` says why the last recording failed.
    """

    def __init__(
        self,
        device: Device,
        *,
        memory: int,
        max_num_seqs: int,
        max_context_len: int,
        max_blocks: int = 0,
        limits: GraphLimits | None = None,
    ) -> None:
        self._device = device
        self._memory = memory
        self._limits = limits or GraphLimits()
        self._max_num_seqs = max_num_seqs
        self._max_context_len = max_context_len
        self._max_blocks = max_blocks
        self._warm: set[GraphKey] = set()
        self._failed: set[GraphKey] = set()
        self._ready: OrderedDict[GraphKey, _Ready] = OrderedDict()
        self._tables: torch.Tensor | None = None
        self._outputs: dict[bool, torch.Tensor] = {}  # one for text, one for embeddings
        self._stats = GraphStats()
        self.failure: str | None = None

    def key(self, kind: Literal["text", "embed"], batch: HostBatch) -> GraphKey | None:
        """The size that `batch` is padded to; None when it runs as it is, and is counted as such."""
        key = self._key(kind, batch)
        if key is None or key in self._failed or (len(self._failed) >= MAX_FAILURES and key not in self._ready):
            self._stats = replace(self._stats, eager=self._stats.eager + 1)
            return None
        return key

    def decode_keys(self) -> list[GraphKey]:
        """Every size of a decoding step, the largest first: smaller graphs then fit into its memory."""
        largest = _bucket(self._limits.sequences, self._max_num_seqs)
        sizes = [size for size in self._limits.sequences if largest is None or size <= largest]
        return [GraphKey("decode", size, size) for size in reversed(sizes)]

    def stats(self) -> GraphStats:
        """The numbers as of now."""
        return replace(self._stats, graphs=len(self._ready), bytes=self._num_bytes)

    def run(
        self,
        key: GraphKey,
        batch: HostBatch,
        tensors: Sequence[torch.Tensor],
        compute: Callable[[Batch], torch.Tensor],
    ) -> torch.Tensor:
        """`compute` of a batch that is padded to `key`: rows [num_seqs, ...], good until the next call.

        `tensors` are the batch's arrays on the device. `compute` must be the same for a kind at every call.
        """
        ready = self._ready.get(key)
        if ready is None and key in self._warm:
            ready = self._try_capture(key, batch, tensors, compute)
        if ready is None:
            self._stats = replace(self._stats, warm_ups=self._stats.warm_ups + 1)
            self._warm.add(key)
            result = compute(Batch.of(batch, tensors, self._longest(key)))
            self._make_room_for_output(key.kind, result)
            return result
        self._ready.move_to_end(key)
        self._fill(ready.inputs, tensors)
        ready.graph.replay()
        self._stats = replace(self._stats, replays=self._stats.replays + 1)
        return ready.output

    def _key(self, kind: Literal["text", "embed"], batch: HostBatch) -> GraphKey | None:
        if kind == "text" and batch.num_tokens == batch.num_seqs == len(batch.logits_idx):
            size = _bucket(self._limits.sequences, batch.num_seqs)
            return None if size is None else GraphKey("decode", size, size)
        num_tokens = _bucket(self._limits.tokens, batch.num_tokens)
        # One more, so that there is a sequence for the tokens that are added.
        num_seqs = _bucket(self._limits.sequences, batch.num_seqs + 1)
        if num_tokens is None or num_seqs is None:
            return None
        return GraphKey("mixed" if kind == "text" else "embed", num_tokens, num_seqs)

    def _longest(self, key: GraphKey) -> tuple[int, int]:
        """The longest query and context that any batch of this size may have."""
        query = 1 if key.kind == "decode" else key.num_tokens
        if key.kind == "embed":
            return query, key.num_tokens
        return query, max(query, self._max_context_len)

    @property
    def _num_bytes(self) -> int:
        return sum(ready.graph.num_bytes for ready in self._ready.values())

    def _try_capture(
        self,
        key: GraphKey,
        batch: HostBatch,
        tensors: Sequence[torch.Tensor],
        compute: Callable[[Batch], torch.Tensor],
    ) -> _Ready | None:
        began = time.monotonic()
        try:
            ready = self._capture(key, batch, tensors, compute)
        except CaptureError as error:
            self._fail(key, str(error))
            return None
        seconds = self._stats.capture_seconds + time.monotonic() - began
        self._stats = replace(self._stats, captures=self._stats.captures + 1, capture_seconds=seconds)
        if ready.graph.num_bytes > self._memory:
            self._fail(key, f"it takes {ready.graph.num_bytes:,} bytes, and all graphs may take {self._memory:,}")
            return None
        self._ready[key] = ready
        while self._num_bytes > self._memory:
            self._ready.popitem(last=False)
            self._stats = replace(self._stats, evictions=self._stats.evictions + 1)
        return ready

    def _capture(
        self,
        key: GraphKey,
        batch: HostBatch,
        tensors: Sequence[torch.Tensor],
        compute: Callable[[Batch], torch.Tensor],
    ) -> _Ready:
        inputs = [self._device.buffer(tuple(tensor.shape), tensor.dtype) for tensor in tensors]
        if batch.block_tables is not None:
            inputs[-1] = self._block_tables(key, tensors[-1], batch.block_size)
        output = self._outputs[key.kind == "embed"][: key.num_seqs]
        static = Batch.of(batch, inputs, self._longest(key))

        def record() -> None:
            output.copy_(compute(static))

        self._fill(inputs, tensors)
        return _Ready(inputs, output, self._device.capture(record))

    def _block_tables(self, key: GraphKey, like: torch.Tensor, block_size: int) -> torch.Tensor:
        """All graphs read their tables from the same place: they are the only large input."""
        if self._tables is None:
            rows = max(key.num_seqs, _bucket(self._limits.sequences, self._max_num_seqs + 1) or 0)
            columns = max(self._max_blocks, -(-self._limits.max_tokens // block_size))  # a dummy's may be the longest
            self._tables = self._device.buffer((rows, columns), like.dtype)
        return self._tables[: key.num_seqs]

    def _make_room_for_output(self, kind: GraphKind, result: torch.Tensor) -> None:
        """All graphs write to the same place, outside of the memory that they share as scratch."""
        is_embed = kind == "embed"
        if is_embed not in self._outputs:
            largest = self._limits.sequences[-1]
            rows = largest if is_embed else _bucket(self._limits.sequences, self._max_num_seqs + 1) or largest
            self._outputs[is_embed] = self._device.buffer((rows, *result.shape[1:]), result.dtype)

    @staticmethod
    def _fill(inputs: Sequence[torch.Tensor], tensors: Sequence[torch.Tensor]) -> None:
        """Bring this batch to where the graph reads. Of block tables only the columns in use are brought."""
        for target, source in zip(inputs, tensors, strict=True):
            (target if target.shape == source.shape else target[:, : source.shape[1]]).copy_(source)

    def _fail(self, key: GraphKey, why: str) -> None:
        log.warning("a step of %s could not be recorded and runs piece by piece: %s", key, why)
        self.failure = why
        self._failed.add(key)
        self._stats = replace(self._stats, failures=self._stats.failures + 1)


def _bucket(sizes: Sequence[int], num: int) -> int | None:
    """The smallest size that holds `num`."""
    return next((size for size in sizes if size >= num), None)
