"""Batch: everything one step works on, ragged and without padding. It is handed down as an argument, never ambient."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from servekit.engine.core.scheduler import ScheduleOutput

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Batch:
    """T tokens of S sequences, one sequence after the other.

    Tensors are int64 on the compute device; the two host arrays let attention plan without asking the device.
    `slot_mapping` is None exactly when there is no KV cache: attention then stays inside the batch.
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

    @property
    def cu_seqlens_q(self) -> IntArray:
        """[S + 1] host: where each sequence's tokens begin."""
        return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(self.query_lens)))


class BatchBuilder:
    """Turns what the scheduler decided into a Batch on `device`."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device

    def build(self, output: ScheduleOutput) -> Batch:
        """The batch of one step, in the scheduler's order."""
        scheduled = output.scheduled
        query_lens = np.array([s.num_new_tokens for s in scheduled], dtype=np.int64)
        starts = np.array([s.seq.num_computed_tokens for s in scheduled], dtype=np.int64)
        context_lens = starts + query_lens
        ends = np.cumsum(query_lens)
        num_tokens = int(ends[-1])

        input_ids = np.empty(num_tokens, dtype=np.int64)
        num_blocks = -(-context_lens // self._block_size)
        block_tables = np.zeros((len(scheduled), int(num_blocks.max())), dtype=np.int64)
        for row, (s, end) in enumerate(zip(scheduled, ends.tolist(), strict=True)):
            start, count = s.seq.num_computed_tokens, s.num_new_tokens
            if count == 1:
                input_ids[end - 1] = s.seq.token_ids[start]
            else:
                input_ids[end - count : end] = s.seq.token_ids[start : start + count]
            used = int(num_blocks[row])
            block_tables[row, :used] = s.seq.block_table[:used]

        rows = np.repeat(np.arange(len(scheduled)), query_lens)
        positions = np.arange(num_tokens) - np.repeat(ends - query_lens, query_lens) + starts[rows]
        blocks = block_tables[rows, positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        needs_sample = np.array([s.needs_sample for s in scheduled], dtype=bool)
        return Batch(
            input_ids=self._tensor(input_ids),
            positions=self._tensor(positions),
            logits_idx=self._tensor(ends[needs_sample] - 1),
            slot_mapping=self._tensor(slots),
            block_tables=self._tensor(block_tables),
            query_lens=query_lens,
            context_lens=context_lens,
            block_size=self._block_size,
            num_tokens=num_tokens,
            num_seqs=len(scheduled),
        )

    def _tensor(self, values: IntArray) -> torch.Tensor:
        return torch.from_numpy(values).to(self._device, non_blocking=True)
