"""What a request would meet if it came now, worked out without admitting it. It must not know times or text."""

from collections.abc import Iterable
from dataclasses import dataclass

from servekit.engine.core.block_pool import BlockPool
from servekit.engine.core.prefix_cache import PrefixCache
from servekit.engine.core.request import Request
from servekit.engine.core.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Preview:
    """A request's place, as of between two steps.

    `num_cached_tokens` of its prompt are in the prefix cache, and it needs `num_new_blocks` beside theirs until its
    first token. `queue_position` waiting requests would go before it. Until that token, `num_tokens_ahead` prompt
    tokens are computed, its own included, after at most `num_steps_to_slot` steps of waiting for a slot (as many as
    there are if every running answer goes on to its limit).
    """

    num_prompt_tokens: int
    num_cached_tokens: int
    num_new_blocks: int
    num_free_blocks: int
    num_free_slots: int
    queue_position: int
    num_tokens_ahead: int
    num_steps_to_slot: int


def preview(
    request: Request,
    running: Iterable[Sequence],
    waiting: Iterable[Sequence],
    cache: PrefixCache,
    pool: BlockPool,
    *,
    ordinal: int,
    max_num_seqs: int,
    max_context_len: int,
) -> Preview:
    """Look at everything and change nothing. `ordinal` is the one that the request would get."""
    seq = Sequence(request, ordinal, request.arrival_time)
    cached = cache.match(seq)
    num_cached_tokens = len(cached) * pool.block_size
    running = list(running)
    before = [other for other in waiting if other.order < seq.order]
    behind = sum(other.num_tokens - other.num_computed_tokens for other in [*running, *before])
    num_free_slots = max_num_seqs - len(running) - len(before)
    num_steps_to_slot = 0
    if num_free_slots <= 0:
        remaining = sorted(_num_tokens_left(other, max_context_len) for other in running)
        num_steps_to_slot = remaining[min(-num_free_slots, len(remaining) - 1)]
    return Preview(
        num_prompt_tokens=seq.num_tokens,
        num_cached_tokens=num_cached_tokens,
        num_new_blocks=pool.num_blocks_for(seq.num_tokens + 1) - len(cached),
        num_free_blocks=pool.num_free_without(cached),
        num_free_slots=max(0, max_num_seqs - len(running)),
        queue_position=len(before),
        num_tokens_ahead=behind + seq.num_tokens - num_cached_tokens,
        num_steps_to_slot=num_steps_to_slot,
    )


def _num_tokens_left(seq: Sequence, max_context_len: int) -> int:
    room = max_context_len - seq.num_tokens
    max_tokens = seq.request.sampling.max_tokens
    return room if max_tokens is None else min(room, max_tokens - seq.num_output_tokens)
