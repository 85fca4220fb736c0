"""The times of one request, from its record; None where the record has none. Seconds throughout.

TTFT and E2E count from the scheduled arrival, as whoever waits counts them; `from_send` counts from the send.
"""

from itertools import pairwise

from servekit.bench.result import Record


def time_to_first_token(record: Record, *, from_send: bool = False) -> float | None:
    """TTFT: until the first chunk that shows text."""
    start = _start(record, from_send)
    return None if record.first_token_s is None or start is None else record.first_token_s - start


def end_to_end(record: Record, *, from_send: bool = False) -> float | None:
    """E2E: until the last byte of the answer."""
    start = _start(record, from_send)
    return None if record.end_s is None or start is None else record.end_s - start


def time_per_output_token(record: Record) -> float | None:
    """TPOT: (last token - first token) / (tokens - 1). None for fewer than two tokens."""
    if record.first_token_s is None or record.output_tokens is None or record.output_tokens < 2:
        return None
    last = record.chunks[-1][0] if record.chunks else record.end_s
    return None if last is None else (last - record.first_token_s) / (record.output_tokens - 1)


def inter_token_latencies(record: Record) -> list[float]:
    """ITL: one value for each token after the first chunk; the tokens of a chunk share the gap before it equally."""
    if not record.chunks:
        return []
    values: list[float] = []
    before, tokens_before = record.chunks[0]
    for at, tokens in record.chunks[1:]:
        if tokens > tokens_before:
            values += [(at - before) / (tokens - tokens_before)] * (tokens - tokens_before)
            before, tokens_before = at, tokens
    return values


def chunk_gaps(record: Record) -> list[float]:
    """The gaps between chunks, as a reader of the stream sees them."""
    times = [at for at, _ in record.chunks]
    return [later - earlier for earlier, later in pairwise(times)]


def _start(record: Record, from_send: bool) -> float | None:
    return record.sent_s if from_send else record.scheduled_s
