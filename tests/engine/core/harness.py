"""A model for scheduler tests: it keeps no numbers, but notices every wrong read of the paged memory."""

from collections.abc import Sequence as Seq

from servekit.engine.core.request import Request, SampledToken, SamplingParams, Update
from servekit.engine.core.scheduler import ScheduleOutput, Scheduler, SchedulerConfig

VOCAB_SIZE = 1000


def make_request(
    request_id: str,
    prompt: int | Seq[int],
    max_tokens: int | None = None,
    *,
    priority: int = 0,
    cache_salt: str = "",
    sampling: SamplingParams | None = None,
) -> Request:
    """A request with a prompt, or with a prompt of so many tokens that no other request id shares."""
    if isinstance(prompt, int):
        first = VOCAB_SIZE * sum(ord(char) * 131**place for place, char in enumerate(request_id))
        prompt = range(first, first + prompt)
    if sampling is None:
        sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens)
    return Request(request_id, tuple(prompt), sampling, 0.0, priority, cache_salt)


def make_scheduler(
    *,
    max_num_seqs: int = 8,
    max_num_batched_tokens: int = 64,
    max_model_len: int = 256,
    num_blocks: int = 33,
    block_size: int = 4,
    **rest: object,
) -> Scheduler:
    """A small scheduler: 32 usable blocks of 4 tokens unless told otherwise."""
    return Scheduler(
        SchedulerConfig(max_num_seqs, max_num_batched_tokens, max_model_len, num_blocks, block_size, **rest)  # type: ignore[arg-type]
    )


def state_after(state: int, token_id: int) -> int:
    """What a position's keys and values stand for: its own token and every token before it."""
    return hash((state, token_id)) & 0x7FFFFFFF


def choose(state: int) -> int:
    """The next token that the model finds most likely."""
    return state % VOCAB_SIZE


def solo(prompt: Seq[int], num_tokens: int) -> list[int]:
    """What the model answers without a scheduler, without paging and without anybody beside it."""
    state = 0
    for token_id in prompt:
        state = state_after(state, token_id)
    answer: list[int] = []
    for _ in range(num_tokens):
        answer.append(choose(state))
        state = state_after(state, answer[-1])
    return answer


class PagedModel:
    """Writes each position's state into its block, and asserts on reading that the state is the right one.

    All reads of a step come before all its writes, so a block that is matched in the step that computes it is noticed.
    """

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._memory: dict[tuple[int, int], int] = {}

    def step(self, output: ScheduleOutput) -> list[SampledToken | None]:
        """Compute a step: a token for each sequence that reaches its end."""
        states = []
        for item in output.scheduled:
            state = 0
            for position in range(item.seq.num_computed_tokens):
                state = state_after(state, item.seq.token_ids[position])
                cell = self._cell(item.seq.block_table, position)
                assert self._memory.get(cell) == state, f"{item.seq} reads foreign contents at {position}"
            states.append(state)
        tokens: list[SampledToken | None] = []
        for item, state in zip(output.scheduled, states, strict=True):
            start = item.seq.num_computed_tokens
            for position in range(start, start + item.num_new_tokens):
                state = state_after(state, item.seq.token_ids[position])
                self._memory[self._cell(item.seq.block_table, position)] = state
            tokens.append(SampledToken(choose(state)) if item.needs_sample else None)
        return tokens

    def _cell(self, block_table: list[int], position: int) -> tuple[int, int]:
        return block_table[position // self._block_size], position % self._block_size


def shape(output: ScheduleOutput) -> list[tuple[str, int]]:
    """A step as (request id, new tokens)."""
    return [(item.seq.request.request_id, item.num_new_tokens) for item in output.scheduled]


def advance(scheduler: Scheduler, now: float = 0.0, token_id: int | None = None) -> tuple[ScheduleOutput, list[Update]]:
    """Schedule and apply one step in which every sequence that gets a token gets `token_id`, or one like no other."""
    output = scheduler.schedule(now)
    tokens = [
        SampledToken(token_id if token_id is not None else -(1000 * item.seq.ordinal + item.seq.num_tokens))
        if item.needs_sample
        else None
        for item in output.scheduled
    ]
    updates = scheduler.apply(output, tokens, now)
    scheduler.check_integrity()
    return output, updates


def run_to_end(scheduler: Scheduler, model: PagedModel, now: float = 0.0) -> dict[str, list[int]]:
    """Step until nothing is left; the answer of each request."""
    answers: dict[str, list[int]] = {}
    while scheduler.has_work:
        output = scheduler.schedule(now)
        assert not output.is_empty, "there is work, but nothing to compute"
        for update in scheduler.apply(output, model.step(output), now):
            answers.setdefault(update.request_id, []).extend(update.token_ids)
        scheduler.check_integrity()
        now += 1.0
    return answers
