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
        """The batch of one step, in the scheduler's order.

        Gathered in lists, and made arrays at the end: in a decoding step a dozen operations on tiny arrays would take
        longer than all of its integers.
        """
        size = self._block_size
        longest = max(-(-item.end // size) for item in output.scheduled)
        input_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        tables: list[int] = []
        logits_idx: list[int] = []
        pending: list[tuple[int, int]] = []
        for item in output.scheduled:
            seq, start, end = item.seq, item.start, item.end
            input_ids += seq.token_ids[start:end]
            if end > len(seq.token_ids):
                assert self._follows_device, f"{seq} has a token that the host does not know"
                assert end == len(seq.token_ids) + 1, f"{seq} is more than one token ahead"
                pending.append((len(input_ids), seq.slot))
                input_ids.append(0)
            positions += range(start, end)
            used = -(-end // size)
            for place in range(start // size, used):
                base = (seq.block_table[place] - place) * size
                slots += range(base + max(start, place * size), base + min(end, (place + 1) * size))
            tables += seq.block_table[:used]
            tables += [0] * (longest - used)
            if item.needs_sample:
                logits_idx.append(len(input_ids) - 1)
        sources = np.full(len(input_ids), -1, dtype=np.int64) if self._follows_device else None
        if sources is not None:
            for token, slot in pending:
                sources[token] = slot
        return HostBatch(
            input_ids=_ints(input_ids),
            positions=_ints(positions),
            logits_idx=_ints(logits_idx),
            slot_mapping=_ints(slots),
            block_tables=_ints(tables).reshape(-1, longest),
            query_lens=_ints([item.num_new_tokens for item in output.scheduled]),
            context_lens=_ints([item.end for item in output.scheduled]),
            block_size=size,
            token_sources=sources,
        )


def _ints(values: list[int]) -> IntArray:
    return np.array(values, dtype=np.int64)


def starts_of(lengths: IntArray) -> IntArray:
    """[S + 1]: where each of S pieces begins that lie one after the other."""
    starts = np.zeros(len(lengths) + 1, dtype=np.int64)
    np.cumsum(lengths, out=starts[1:])
    return starts
