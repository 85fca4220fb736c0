"""Sequence: counts and identity."""

from servekit.engine.core.sequence import Sequence, SequenceStatus

from .harness import make_request


def test_a_new_sequence_waits_with_its_prompt_and_nothing_else() -> None:
    seq = Sequence(make_request("a", [7, 8, 9], priority=2), ordinal=5, now=1.5)
    assert (seq.token_ids, seq.num_prompt_tokens, seq.num_tokens, seq.num_output_tokens) == ([7, 8, 9], 3, 3, 0)
    assert (seq.num_computed_tokens, seq.num_cached_tokens, seq.block_table, seq.slot) == (0, 0, [], -1)
    assert (seq.status, seq.finish_reason, seq.is_finished) == (SequenceStatus.WAITING, None, False)
    assert (seq.order, seq.arrival_time, seq.first_scheduled_time, seq.first_token_time) == ((2, 5), 1.5, None, None)


def test_generated_tokens_count_as_output_and_leave_the_request_alone() -> None:
    seq = Sequence(make_request("a", [7, 8]), 0, 0.0)
    seq.token_ids.append(3)
    assert (seq.num_tokens, seq.num_output_tokens, seq.num_prompt_tokens) == (3, 1, 2)
    assert seq.request.prompt_token_ids == (7, 8)


def test_sequences_of_one_request_are_different() -> None:
    request = make_request("a", 3)
    first, second = Sequence(request, 0, 0.0), Sequence(request, 0, 0.0)
    assert first != second
    assert len({first, second}) == 2


def test_repr_shows_what_a_log_needs() -> None:
    seq = Sequence(make_request("a", 3), 0, 0.0)
    seq.block_table = [4]
    seq.num_computed_tokens = 2
    assert repr(seq) == "Sequence('a', WAITING, computed 2/3, blocks [4])"
