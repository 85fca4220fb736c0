"""Which texts go into which step: exact chunks, without a model."""

from servekit.engine.core.embed_queue import EmbedInput, EmbedQueue, EmbedRequest


def request(name: str, *lengths: int) -> EmbedRequest:
    return EmbedRequest(name, tuple(EmbedInput((7,) * length) for length in lengths), 0.0)


def filled(*requests: EmbedRequest) -> EmbedQueue:
    queue = EmbedQueue()
    for item in requests:
        queue.add(item)
    return queue


def taken(queue: EmbedQueue, budget: int, *, at_least_one: bool = False) -> list[tuple[str, tuple[int, ...]]]:
    return [(c.request.request_id, c.rows) for c in queue.take(budget, at_least_one=at_least_one)]


def test_small_requests_share_a_step_in_the_order_they_came() -> None:
    queue = filled(request("a", 4, 3), request("b", 2), request("c", 5))
    assert taken(queue, 10) == [("a", (1, 0)), ("b", (0,))]
    assert taken(queue, 10) == [("c", (0,))]
    assert taken(queue, 10) == []
    assert len(queue) == 0


def test_a_large_request_is_split_and_lets_others_in_between() -> None:
    queue = filled(request("large", *[4] * 6), request("small", 2))
    # Stable among equals from the end: which of its texts go first is the request's own affair.
    assert taken(queue, 10) == [("large", (5, 4))]
    assert taken(queue, 10) == [("small", (0,)), ("large", (3, 2))]
    assert taken(queue, 10) == [("large", (1, 0))]
    assert len(queue) == 0


def test_a_request_waits_for_one_chunk_of_each_that_is_before_it() -> None:
    queue = filled(request("a", *[8] * 50), request("b", *[8] * 50), request("c", 8))
    assert [taken(queue, 8)[0][0] for _ in range(3)] == ["a", "b", "c"]


def test_nobody_overtakes_a_text_that_does_not_fit() -> None:
    queue = filled(request("long", 9), request("short", 1))
    assert taken(queue, 5) == []
    assert taken(queue, 5, at_least_one=True) == [("long", (0,))]
    assert taken(queue, 5) == [("short", (0,))]


def test_at_least_one_means_one() -> None:
    queue = filled(request("a", 9, 9), request("b", 9))
    assert taken(queue, 5, at_least_one=True) == [("a", (1,))]
    assert taken(queue, 0, at_least_one=True) == [("b", (0,))]


def test_short_texts_go_first() -> None:
    queue = filled(request("a", 5, 1, 3))
    assert taken(queue, 4) == [("a", (1, 2))]
    assert taken(queue, 9) == [("a", (0,))]


def test_what_was_removed_is_not_taken() -> None:
    queue = filled(request("a", *[4] * 3), request("b", 1))
    queue.take(4)
    queue.remove("a")
    queue.remove("unknown")
    assert taken(queue, 10) == [("b", (0,))]


def test_take_all_empties_the_line() -> None:
    queue = filled(request("a", 1), request("b", 1))
    assert [item.request_id for item in queue.take_all()] == ["a", "b"]
    assert len(queue) == 0
