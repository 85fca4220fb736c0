"""Records made by hand for the tests of what is computed from them."""

from servekit.bench.result import Record, Timings


def answered(
    index: int = 0,
    *,
    at: float = 0.0,
    ttft: float = 0.5,
    gap: float = 0.1,
    tokens: int = 3,
    late: float = 0.0,
    timings: Timings | None = None,
) -> Record:
    """A whole answer of `tokens` tokens, one a chunk, that was due `at` and sent `late` seconds after."""
    chunks = [(round(at + ttft + gap * number, 6), number + 1) for number in range(tokens)]
    return Record(
        index=index,
        scheduled_s=at,
        sent_s=at + late,
        first_token_s=chunks[0][0],
        end_s=chunks[-1][0],
        status=200,
        input_tokens=10,
        output_tokens=tokens,
        cached_tokens=0,
        asked_tokens=tokens,
        chunks=chunks,
        timings=timings,
    )


def refused(index: int = 0, *, at: float = 0.0) -> Record:
    """A request that was answered with 429 a hundredth of a second later."""
    return Record(index=index, scheduled_s=at, sent_s=at, end_s=at + 0.01, status=429, error="429: full")
