"""Batch: a HostBatch on the device that computes it. It is handed down as an argument, never ambient."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from servekit.engine.host_batch import HostBatch, IntArray, starts_of


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences, one sequence after the other.

    Tensors are int64 on the compute device, lengths int32; the two host arrays let attention plan without asking the
    device. `slot_mapping` is None exactly when there is no KV cache: attention then stays inside the batch.
    `longest` is (query, context) where the host arrays do not say it: in a captured batch they are of another step.
    """

    input_ids: torch.Tensor  # [T]
    positions: torch.Tensor  # [T]
    logits_idx: torch.Tensor  # [number of sequences that need a token]: index of their last token
    slot_mapping: torch.Tensor | None  # [T] block_id * block_size + offset
    block_tables: torch.Tensor | None  # [S, M], padded with the null block 0
    query_lens: IntArray  # [S] host: tokens of this step
    context_lens: IntArray  # [S] host: tokens visible to the last one, this step's included
    block_size: int
    num_tokens: int
    num_seqs: int
    token_types: torch.Tensor | None = None  # [T] which text of a pair a token is of, for encoders that tell them apart
    token_sources: torch.Tensor | None = None  # [T] slot whose last token this is, where only the device knows it; -1
    seq_starts: torch.Tensor | None = None  # [S + 1] int32: where each sequence's tokens begin
    seq_lens: torch.Tensor | None = None  # [S] int32: context_lens on the device
    longest: tuple[int, int] | None = None

    @property
    def cu_seqlens_q(self) -> IntArray:
        """[S + 1] host: where each sequence's tokens begin."""
        return starts_of(self.query_lens)

    @property
    def max_query_len(self) -> int:
        """No sequence has more tokens in this step."""
        return int(self.query_lens.max()) if self.longest is None else self.longest[0]

    @property
    def max_context_len(self) -> int:
        """No sequence sees more tokens."""
        return int(self.context_lens.max()) if self.longest is None else self.longest[1]

    @classmethod
    def of(cls, host: HostBatch, tensors: Sequence[torch.Tensor], longest: tuple[int, int] | None = None) -> "Batch":
        """The Batch whose tensors are `host.arrays()` on some device. `longest` is as above."""
        input_ids, positions, logits_idx, seq_starts, seq_lens, *rest = tensors
        optional = (host.token_types, host.token_sources, host.slot_mapping, host.block_tables)
        there = iter(rest)
        types, sources, slots, tables = (None if array is None else next(there) for array in optional)
        return cls(
            input_ids=input_ids,
            positions=positions,
            logits_idx=logits_idx,
            slot_mapping=slots,
            block_tables=tables,
            query_lens=host.query_lens,
            context_lens=host.context_lens,
            block_size=host.block_size,
            num_tokens=host.num_tokens,
            num_seqs=host.num_seqs,
            token_types=types,
            token_sources=sources,
            seq_starts=seq_starts,
            seq_lens=seq_lens,
            longest=longest,
        )

    def on_host(self) -> HostBatch:
        """The same as arrays. Only for a batch whose tensors are the host's: they are shared, not copied."""

        def array(tensor: torch.Tensor | None) -> IntArray | None:
            return None if tensor is None else tensor.numpy()

        return HostBatch(
            input_ids=self.input_ids.numpy(),
            positions=self.positions.numpy(),
            logits_idx=self.logits_idx.numpy(),
            slot_mapping=array(self.slot_mapping),
            block_tables=array(self.block_tables),
            query_lens=self.query_lens,
            context_lens=self.context_lens,
            block_size=self.block_size,
            token_types=array(self.token_types),
            token_sources=array(self.token_sources),
        )
