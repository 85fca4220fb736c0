"""HostBatch: what one step works on, ragged and without padding, as arrays on the host. It must not know torch."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from servekit.engine.core.scheduler import ScheduleOutput

IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class HostBatch:
    """T tokens of S sequences, one sequence after the other.

    `slot_mapping` is None exactly when there is no KV cache: attention then stays inside the batch.
    """

    input_ids: IntArray  # [T]
    positions: IntArray  # [T]
    logits_idx: IntArray  # [number of sequences that need a token]: index of their last token
    slot_mapping: IntArray | None  # [T] block_id * block_size + offset
    block_tables: IntArray | None  # [S, M], padded with the null block 0
    query_lens: IntArray  # [S] tokens of this step
    context_lens: IntArray  # [S] tokens visible to the last one, this step's included
    block_size: int
    token_types: IntArray | None = None  # [T] which text of a pair a token is of, for encoders that tell them apart
    token_sources: IntArray | None = None  # [T] slot whose last token this is, where only the device knows it; -1

    @property
    def num_tokens(self) -> int:
        """T."""
        return len(self.input_ids)

    @property
    def num_seqs(self) -> int:
        """S."""
        return len(self.query_lens)

    @property
    def cu_seqlens_q(self) -> IntArray:
        """[S + 1] where each sequence's tokens begin."""
        return starts_of(self.query_lens)

    def arrays(self) -> list[npt.NDArray[Any]]:
        """What a device needs, in the order in which `Batch.of` takes it back; the block tables come last."""
        lengths = (self.cu_seqlens_q.astype(np.int32), self.context_lens.astype(np.int32))
        optional = (self.token_types, self.token_sources, self.slot_mapping, self.block_tables)
        return [
            self.input_ids,
            self.positions,
            self.logits_idx,
            *lengths,
            *(array for array in optional if array is not None),
        ]

    def padded(self, num_tokens: int, num_seqs: int) -> "HostBatch":
        """The same with dummy sequences behind it, up to `num_tokens` and `num_seqs`; a logits row for each sequence.

        A dummy token is id 0 at position 0, and what it stores goes to the null block, which nobody reads. So dummies
        see only each other and stay finite. At least one dummy sequence must be there to hold dummy tokens.
        """
        more_tokens, more_seqs = num_tokens - self.num_tokens, num_seqs - self.num_seqs
        assert more_tokens >= 0, "a bucket is smaller than its batch"
        assert more_seqs > 0 or (more_seqs == more_tokens == 0), "dummy tokens need a dummy sequence"
        # One token each as far as they go; the last dummy takes what is left.
        dummies = np.zeros(more_seqs, dtype=np.int64)
        dummies[:more_tokens] = 1
        if more_seqs:
            dummies[-1] += max(0, more_tokens - more_seqs)

        def longer(array: IntArray | None, num: int, fill: int = 0) -> IntArray | None:
            return None if array is None else np.concatenate((array, np.full(num, fill, dtype=np.int64)))

        def longer_(array: IntArray, num: int) -> IntArray:
            return np.concatenate((array, np.zeros(num, dtype=np.int64)))

        tables = self.block_tables
        if tables is not None and more_seqs:
            # The longest dummy has its whole table in the null block.
            more_columns = max(0, -(-int(dummies[-1]) // self.block_size) - tables.shape[1])
            tables = np.pad(tables, ((0, more_seqs), (0, more_columns)))
        return replace(
            self,
            input_ids=longer_(self.input_ids, more_tokens),
            positions=longer_(self.positions, more_tokens),
            logits_idx=longer_(self.logits_idx, num_seqs - len(self.logits_idx)),
            slot_mapping=longer(self.slot_mapping, more_tokens),
            block_tables=tables,
            query_lens=np.concatenate((self.query_lens, dummies)),
            context_lens=np.concatenate((self.context_lens, dummies)),
            token_types=longer(self.token_types, more_tokens),
            token_sources=longer(self.token_sources, more_tokens, -1),
        )


class BatchBuilder:
    """Turns what the scheduler decided into a HostBatch.

    With `follows_device` a token that is still being chosen is taken from its sequence's slot on the device.
    """

    def __init__(self, block_size: int, *, follows_device: bool = False) -> None:
        self._block_size = block_size
        self._follows_device = follows_device

    def nothing(self) -> HostBatch:
        """A batch of no sequences, to be padded."""
        none = np.zeros(0, dtype=np.int64)
        return HostBatch(
            input_ids=none,
            positions=none,
            logits_idx=none,
            slot_mapping=none,
            block_tables=np.zeros((0, 1), dtype=np.int64),
            query_lens=none,
            context_lens=none,
            block_size=self._block_size,
            token_sources=none if self._follows_device else None,
        )

    def build(self, output: ScheduleOutput) -> HostBatch:
        """The batch of one step, in the scheduler's order."""
        scheduled = output.scheduled
        query_lens = np.array([s.num_new_tokens for s in scheduled], dtype=np.int64)
        starts = np.array([s.start for s in scheduled], dtype=np.int64)
        context_lens = starts + query_lens
        ends = np.cumsum(query_lens)
        num_tokens = int(ends[-1])

        input_ids = np.empty(num_tokens, dtype=np.int64)
        sources = np.full(num_tokens, -1, dtype=np.int64) if self._follows_device else None
        num_blocks = -(-context_lens // self._block_size)
        block_tables = np.zeros((len(scheduled), int(num_blocks.max())), dtype=np.int64)
        for row, (s, end) in enumerate(zip(scheduled, ends.tolist(), strict=True)):
            start, count, token_ids = s.start, s.num_new_tokens, s.seq.token_ids
            if sources is not None and s.end > len(token_ids):
                assert s.end == len(token_ids) + 1, f"{s.seq} is more than one token ahead"
                sources[end - 1] = s.seq.slot
                input_ids[end - 1] = 0
                input_ids[end - count : end - 1] = token_ids[start:]
            elif count == 1:
                input_ids[end - 1] = token_ids[start]
            else:
                input_ids[end - count : end] = token_ids[start : start + count]
            used = int(num_blocks[row])
            block_tables[row, :used] = s.seq.block_table[:used]

        rows, positions = np.arange(len(scheduled)), starts
        if num_tokens > len(scheduled):
            rows = np.repeat(rows, query_lens)
            positions = np.arange(num_tokens) - np.repeat(ends - query_lens, query_lens) + starts[rows]
        blocks = block_tables[rows, positions // self._block_size]
        slots = blocks * self._block_size + positions % self._block_size
        needs_sample = np.array([s.needs_sample for s in scheduled], dtype=bool)
        return HostBatch(
            input_ids=input_ids,
            positions=positions,
            logits_idx=ends[needs_sample] - 1,
            slot_mapping=slots,
            block_tables=block_tables,
            query_lens=query_lens,
            context_lens=context_lens,
            block_size=self._block_size,
            token_sources=sources,
        )


def starts_of(lengths: IntArray) -> IntArray:
    """[S + 1]: where each of S pieces begins that lie one after the other."""
    return np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(lengths)))
