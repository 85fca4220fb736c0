"""One sequence: a request's tokens and where the engine stands with them.

Owns the state that changes from step to step. It must not know who schedules it, which blocks are free, or torch.
"""

from enum import Enum, auto

from servekit.engine.core.request import FinishReason, Request


class SequenceStatus(Enum):
    """Where a sequence stands. A preempted one waits like a new one, but keeps the tokens it has generated."""

    WAITING = auto()
    RUNNING = auto()
    PREEMPTED = auto()
    FINISHED = auto()


class Sequence:
    """One choice of one request: prompt and generated tokens, and how many of them have their keys and values stored.

    There are no phases. `num_computed_tokens` catches up with `num_tokens` step by step: a prompt is many tokens
    behind, a decoding sequence one. Two sequences are equal only when they are the same object.

    While a step is in flight, `num_launched_tokens` are being computed beyond the computed ones, and
    `num_pending_tokens` are being chosen beyond the known ones: nobody on the host knows yet which they are.

    `ordinal` is the order of arrival and unique. `block_table` holds pool block ids, position `p` lies in entry
    `p // block_size`. `num_cached_tokens` is what the prefix cache gave when the sequence was first admitted. `slot` is
    a small index that is the sequence's own while it runs, else -1. Times are in seconds of one monotonic clock.
    """

    __slots__ = (
        "arrival_time",
        "block_hashes",
        "block_table",
        "finish_reason",
        "first_scheduled_time",
        "first_token_time",
        "num_batch_mates",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_launched_tokens",
        "num_pending_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_published_blocks",
        "num_steps",
        "order",
        "ordinal",
        "request",
        "slot",
        "status",
        "token_ids",
    )

    def __init__(self, request: Request, ordinal: int, now: float) -> None:
        self.request = request
        self.ordinal = ordinal
        self.order = (request.priority, ordinal)  # the lower goes first, the highest is preempted first
        self.token_ids = list(request.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_launched_tokens = 0
        self.num_pending_tokens = 0
        self.num_cached_tokens = 0
        self.block_table: list[int] = []
        self.block_hashes: list[bytes] = []  # of the first full blocks, as far as the prefix cache needed them
        self.num_published_blocks = 0  # leading blocks of the table that the prefix cache has dealt with
        self.status = SequenceStatus.WAITING
        self.finish_reason: FinishReason | None = None
        self.num_preemptions = 0
        self.num_steps = 0
        self.num_batch_mates = 0  # over all its steps, itself included
        self.slot = -1
        self.arrival_time = now
        self.first_scheduled_time: float | None = None
        self.first_token_time: float | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and generated tokens."""
        return len(self.token_ids)

    @property
    def num_output_tokens(self) -> int:
        """Generated tokens."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def is_finished(self) -> bool:
        """Whether no more tokens will be computed for it."""
        return self.status is SequenceStatus.FINISHED

    def __repr__(self) -> str:
        return (
            f"Sequence({self.request.request_id!r}, {self.status.name}, "
            f"computed {self.num_computed_tokens}/{self.num_tokens}, blocks {self.block_table})"
        )
