"""An answer read piece by piece, with times that the test gives: exact numbers, no clock."""

import json

import pytest

from servekit.bench.reader import AnswerReader
from servekit.bench.result import Record, Timings
from servekit.bench.times import chunk_gaps, inter_token_latencies, time_per_output_token, time_to_first_token
from servekit.bench.tokens import cumulative_tokens, estimate_tokens
from tests.bench.fake_server import DONE, ROLE, chat_event, event, usage_event


def read(*pieces: tuple[float, bytes], status: int = 200, content_type: str = "text/event-stream") -> Record:
    """The record of an answer whose pieces came at these times; it was due and sent at 0."""
    reader = AnswerReader()
    reader.on_head(status, content_type)
    for at, piece in pieces:
        reader.on_piece(at, piece)
    record = Record(index=0, scheduled_s=0.0, sent_s=0.0, end_s=reader.end)
    reader.fill(record, 0.0, estimate_tokens)
    return record


END = chat_event(finish_reason="length")


@pytest.mark.parametrize("content", [{"content": ""}, {"content": None}, {}])
def test_only_text_is_a_first_token(content: dict[str, str | None]) -> None:
    record = read(
        (0.0, event({"choices": [{"delta": {"role": "assistant", **content}}]})),
        (0.1, chat_event("")),
        (0.2, b": ping\n\n"),
        (0.3, usage_event(5, 0)),
        (0.5, chat_event("Hi")),
        (0.6, END + usage_event(5, 1) + DONE),
    )

    assert time_to_first_token(record) == 0.5
    assert record.chunks == [(0.5, 1)]
    assert record.end_s == 0.6
    assert record.ok


@pytest.mark.parametrize(
    "delta",
    [
        {"content": "a"},
        {"reasoning_content": "a"},
        {"reasoning": "a"},
        {"refusal": "a"},
        {"tool_calls": [{"index": 0, "function": {"name": "f", "arguments": ""}}]},
        {"tool_calls": [{"index": 0, "function": {"arguments": "{"}}]},
    ],
)
def test_every_kind_of_text_counts(delta: dict[str, object]) -> None:
    record = read((0.25, event({"choices": [{"delta": delta}]})), (0.5, END + DONE))

    assert record.first_token_s == 0.25


def test_chunks_of_several_tokens_are_counted_by_usage() -> None:
    chunks = [(1.0 + 0.1 * position, chat_event("four tokens here now")) for position in range(10)]
    record = read((0.0, ROLE), *chunks, (2.0, END + usage_event(7, 40, cached=5) + DONE))

    assert (record.input_tokens, record.output_tokens, record.cached_tokens) == (7, 40, 5)
    assert not record.estimated
    assert [count for _, count in record.chunks] == list(range(4, 44, 4))
    assert time_per_output_token(record) == pytest.approx(0.9 / 39)
    assert chunk_gaps(record) == pytest.approx([0.1] * 9)
    assert inter_token_latencies(record) == pytest.approx([0.025] * 36)


def test_without_usage_the_joined_text_is_counted_and_marked() -> None:
    record = read(*((0.1 * n, chat_event(text)) for n, text in enumerate(["Hel", "lo", " world"])), (0.4, END + DONE))

    assert (record.output_tokens, record.estimated) == (2, True)


def test_token_ids_and_running_usage_are_exact() -> None:
    ids = read(
        (0.1, chat_event("ab", token_ids=[1, 2, 3])),
        (0.2, chat_event("", token_ids=[4])),
        (0.3, chat_event("c", token_ids=[5])),
        (0.4, END + usage_event(3, 5) + DONE),
    )
    running = [
        event({"choices": [{"delta": {"content": "x"}}], "usage": {"prompt_tokens": 3, "completion_tokens": count}})
        for count in (1, 5, 6)
    ]
    usage = read(*((0.1 * n, data) for n, data in enumerate(running)), (0.4, END + DONE))

    assert ids.chunks == [(0.1, 3), (0.3, 5)]
    assert [count for _, count in usage.chunks] == [1, 5, 6]


def test_a_character_in_two_pieces_is_one() -> None:
    whole = chat_event(" আমি") + END + usage_event(3, 2) + DONE
    for cut in range(1, len(whole)):
        record = read((0.1, whole[:cut]), (0.2, whole[cut:]))
        assert record.ok, (cut, record.error)
        assert len(record.chunks) == 1
        assert record.output_tokens == 2


@pytest.mark.parametrize("line_end", [b"\n", b"\r\n", b"\r"])
def test_every_line_end_ends_an_event(line_end: bytes) -> None:
    data = (chat_event("a") + END + DONE).replace(b"\n", line_end) + b": end"

    assert read((0.1, data)).ok


def test_an_error_in_the_stream_is_a_failure() -> None:
    record = read((0.1, chat_event("a")), (0.2, event({"error": {"message": "the engine died", "code": "x"}}) + DONE))

    assert not record.ok
    assert record.error == "the engine died"
    assert record.status == 200


def test_a_stream_that_just_ends_is_a_failure() -> None:
    assert read((0.1, chat_event("a"))).error == "the stream ended without [DONE] and without a finish_reason"
    assert read((0.1, chat_event("a") + END)).ok


def test_a_refusal_is_a_failure_with_its_reason() -> None:
    record = read((0.1, b'{"error": {"message": "too many"}}'), status=429, content_type="application/json")

    assert (record.status, record.error) == (429, "429: too many")
    assert record.first_token_s is None


def test_a_server_that_does_not_stream_has_no_first_token() -> None:
    answer = {"choices": [{"message": {"content": "hello"}}], "usage": {"prompt_tokens": 3, "completion_tokens": 2}}
    record = read((0.7, json.dumps(answer).encode()), content_type="application/json")

    assert (record.ok, record.first_token_s, record.output_tokens, record.chunks) == (True, None, 2, [])


def test_the_servers_own_timings_are_kept() -> None:
    timings = {"queue_ms": 1500.0, "prompt_ms": 250.0, "predicted_ms": 1000.0, "preemptions": 2, "prompt_n": 9}
    record = read((0.1, chat_event("a")), (0.2, event({"choices": [], "timings": timings}) + END + DONE))

    assert record.timings == Timings(queue_s=1.5, prefill_s=0.25, decode_s=1.0, preemptions=2)


@pytest.mark.parametrize(
    ("chars", "total", "expected"),
    [([1, 1, 1], 3, [1, 2, 3]), ([1, 3], 6, [2, 6]), ([5], 1, [1]), ([1, 1, 1], 2, [1, 2, 2]), ([], 0, [])],
)
def test_tokens_are_spread_by_characters(chars: list[int], total: int, expected: list[int]) -> None:
    assert cumulative_tokens(chars, [None] * len(chars), total) == expected
