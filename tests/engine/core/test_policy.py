"""WaitingLine and Admission: who is next, and when."""

import pytest

from servekit.engine.core.policy import Admission, WaitingLine
from servekit.engine.core.sequence import Sequence

from .harness import make_request


def make_sequence(name: str, ordinal: int, *, priority: int = 0, now: float = 0.0) -> Sequence:
    return Sequence(make_request(name, 1, priority=priority), ordinal, now)


def names(line: WaitingLine) -> str:
    return "".join(line.pop().request.request_id for _ in range(len(line)))


def joiners(admission: Admission, now: float, num_running: int = 0) -> str:
    """All who may join at that moment."""
    found = ""
    while (seq := admission.peek(now, num_running)) is not None:
        assert admission.pop() is seq
        found += seq.request.request_id
        num_running += 1
    return found


def test_lower_priority_goes_first_then_arrival() -> None:
    line = WaitingLine()
    for name, ordinal, priority in (("c", 2, 0), ("a", 4, -1), ("d", 3, 0), ("e", 0, 5), ("b", 1, 0)):
        line.push(make_sequence(name, ordinal, priority=priority))
    assert names(line) == "abcde"
    assert line.peek() is None


def test_leaving_from_anywhere_and_twice() -> None:
    line = WaitingLine()
    seqs = [make_sequence(name, ordinal) for ordinal, name in enumerate("abcdef")]
    for seq in seqs:
        line.push(seq)
    for seq in (seqs[0], seqs[3], seqs[3]):
        line.discard(seq)
    assert (len(line), {seq.request.request_id for seq in line}) == (4, set("bcef"))
    assert line.peek() is seqs[1]
    assert names(line) == "bcef"


def test_those_who_left_behind_a_blocked_head_are_not_kept() -> None:
    line = WaitingLine()
    line.push(make_sequence("head", 0))
    for ordinal in range(1, 2001):
        seq = make_sequence("x", ordinal)
        line.push(seq)
        line.discard(seq)
    assert len(line) == 1
    assert len(line._heap) <= 2


def test_a_preempted_sequence_comes_back_at_its_old_place() -> None:
    line = WaitingLine()
    old = make_sequence("a", 0)
    line.push(old)
    line.pop()
    line.push(make_sequence("b", 1))
    line.push(old)
    assert names(line) == "ab"


def test_waiting_twice_is_an_assertion() -> None:
    line = WaitingLine()
    seq = make_sequence("a", 0)
    line.push(seq)
    with pytest.raises(AssertionError, match="waits twice"):
        line.push(seq)


def test_continuous_lets_anybody_join_at_any_time() -> None:
    admission = Admission("continuous", 3, 0.5)
    admission.add(make_sequence("a", 0))
    assert (len(admission), admission.deadline(0)) == (1, None)
    assert joiners(admission, 0.0) == "a"
    admission.add(make_sequence("b", 1))
    assert joiners(admission, 0.0, num_running=1) == "b"


def test_dynamic_takes_who_waits_and_nobody_joins_later() -> None:
    admission = Admission("dynamic", 3, 0.5)
    for ordinal, name in enumerate("ab"):
        admission.add(make_sequence(name, ordinal))
    assert admission.deadline(0) is None
    assert joiners(admission, 0.0) == "ab"
    admission.add(make_sequence("c", 2))
    assert joiners(admission, 9.0, num_running=1) == ""
    assert joiners(admission, 9.0) == "c"


def test_a_batch_has_at_most_max_num_seqs_members() -> None:
    admission = Admission("dynamic", 3, 0.5)
    for ordinal, name in enumerate("abcde"):
        admission.add(make_sequence(name, ordinal))
    assert joiners(admission, 0.0) == "abc"
    assert len(admission) == 2
    assert joiners(admission, 0.0) == "de"


def test_members_that_did_not_fit_join_their_batch_and_not_the_next() -> None:
    admission = Admission("dynamic", 3, 0.5)
    for ordinal, name in enumerate("abc"):
        admission.add(make_sequence(name, ordinal))
    first = admission.peek(0.0, 0)
    assert first is not None
    admission.pop()
    admission.add(make_sequence("urgent", 3, priority=-1))
    assert len(admission) == 3
    assert joiners(admission, 1.0, num_running=1) == "bc"
    admission.resume(first)
    assert joiners(admission, 1.0, num_running=2) == "a"
    assert joiners(admission, 1.0) == "urgent"


def test_static_waits_for_a_full_batch_or_for_the_oldest_to_have_waited() -> None:
    admission = Admission("static", 3, 0.5)
    admission.add(make_sequence("b", 0, now=1.0))
    admission.add(make_sequence("a", 1, priority=-1, now=1.2))
    assert (admission.deadline(0), admission.deadline(2)) == (1.5, None)
    assert joiners(admission, 1.49) == ""
    admission.add(make_sequence("c", 2, now=1.49))
    assert admission.deadline(0) is None
    assert joiners(admission, 1.49) == "abc"
    admission.add(make_sequence("d", 3, now=2.0))
    assert joiners(admission, 2.4) == ""
    assert joiners(admission, 2.5) == "d"
    assert admission.deadline(0) is None


def test_static_counts_the_wait_from_the_oldest_that_is_still_there() -> None:
    admission = Admission("static", 3, 0.5)
    gone, left = make_sequence("a", 0, now=1.0), make_sequence("b", 1, now=1.4)
    admission.add(gone)
    admission.add(left)
    admission.discard(gone)
    assert admission.deadline(0) == 1.4 + 0.5


def test_an_aborted_member_of_a_batch_is_gone() -> None:
    admission = Admission("dynamic", 2, 0.5)
    seqs = [make_sequence(name, ordinal) for ordinal, name in enumerate("ab")]
    for seq in seqs:
        admission.add(seq)
    assert admission.peek(0.0, 0) is seqs[0]
    admission.discard(seqs[0])
    admission.discard(seqs[0])
    assert (len(admission), joiners(admission, 0.0)) == (1, "b")
