"""BlockPool: exact block ids, the eviction order, and that misuse is noticed."""

from collections.abc import Callable

import pytest

from servekit.engine.core.block_pool import BlockPool


def take(pool: BlockPool, num_blocks: int) -> list[int]:
    block_ids = pool.allocate(num_blocks)
    assert block_ids is not None
    return block_ids


def counts(pool: BlockPool) -> tuple[int, int, int]:
    pool.check_integrity()
    return pool.num_live, pool.num_cached, pool.num_free


def test_blocks_are_handed_out_in_order_and_never_the_null_block() -> None:
    pool = BlockPool(num_blocks=6, block_size=16)
    assert (pool.num_usable, counts(pool)) == (5, (0, 0, 5))
    assert take(pool, 3) == [1, 2, 3]
    assert take(pool, 2) == [4, 5]
    assert counts(pool) == (5, 0, 0)


def test_allocation_is_all_or_nothing() -> None:
    pool = BlockPool(4, 16)
    assert take(pool, 2) == [1, 2]
    assert pool.allocate(2) is None
    assert counts(pool) == (2, 0, 1)
    assert pool.allocate(0) == []
    assert take(pool, 1) == [3]


def test_a_released_block_without_a_hash_is_empty_and_the_next_one_used() -> None:
    pool = BlockPool(6, 16)
    block_ids = take(pool, 3)
    pool.release(block_ids)
    assert counts(pool) == (0, 0, 5)
    assert take(pool, 5) == [1, 2, 3, 4, 5]


def test_released_blocks_with_a_hash_are_cached_and_evicted_tail_first() -> None:
    pool = BlockPool(6, 16)
    block_ids = take(pool, 3)
    for block_id in block_ids:
        assert pool.set_hash(block_id, b"h%d" % block_id)
    pool.release(block_ids)
    assert counts(pool) == (0, 3, 5)
    assert take(pool, 2) == [4, 5]  # empty ones first
    assert take(pool, 1) == [3]
    assert [pool.lookup(b"h%d" % block_id) for block_id in (1, 2, 3)] == [1, 2, None]
    assert take(pool, 2) == [2, 1]
    assert counts(pool) == (5, 0, 0)


def test_eviction_is_least_recently_used() -> None:
    pool = BlockPool(4, 16)
    first, second, third = take(pool, 3)
    for block_id in (first, second, third):
        pool.set_hash(block_id, b"h%d" % block_id)
        pool.release([block_id])
    pool.touch([first])
    pool.release([first])
    assert take(pool, 3) == [second, third, first]


def test_a_touched_block_leaves_the_eviction_order_until_its_last_reference_goes() -> None:
    pool = BlockPool(3, 16)
    (block_id,) = take(pool, 1)
    pool.set_hash(block_id, b"h")
    pool.release([block_id])
    assert pool.num_free_without([block_id]) == 1
    pool.touch([block_id])
    pool.touch([block_id])
    assert pool.num_free_without([block_id]) == pool.num_free == 1
    assert pool.allocate(2) is None
    pool.release([block_id])
    assert counts(pool) == (1, 0, 1)
    pool.release([block_id])
    assert counts(pool) == (0, 1, 2)


def test_reuse_removes_the_old_name_before_a_new_one_is_given() -> None:
    pool = BlockPool(2, 16)
    (block_id,) = take(pool, 1)
    pool.set_hash(block_id, b"old")
    pool.release([block_id])
    assert take(pool, 1) == [block_id]
    assert (pool.lookup(b"old"), pool.block_hash(block_id)) == (None, None)
    assert pool.set_hash(block_id, b"new")
    assert (pool.lookup(b"old"), pool.lookup(b"new")) == (None, block_id)
    pool.check_integrity()


def test_the_first_of_two_blocks_with_the_same_contents_keeps_the_name() -> None:
    pool = BlockPool(4, 16)
    first, second = take(pool, 2)
    assert pool.set_hash(first, b"h")
    assert pool.set_hash(first, b"h"), "naming a block again changes nothing"
    assert not pool.set_hash(second, b"h")
    assert (pool.lookup(b"h"), pool.block_hash(second)) == (first, None)
    pool.release([second])
    assert counts(pool) == (1, 0, 2)


@pytest.mark.parametrize(("num_tokens", "num_blocks"), [(0, 0), (1, 1), (15, 1), (16, 1), (17, 2), (32, 2)])
def test_num_blocks_for(num_tokens: int, num_blocks: int) -> None:
    assert BlockPool(2, 16).num_blocks_for(num_tokens) == num_blocks


def release_twice(pool: BlockPool) -> None:
    block_ids = take(pool, 1)
    pool.release(block_ids)
    pool.release(block_ids)


def touch_empty(pool: BlockPool) -> None:
    pool.touch([2])


def name_unheld(pool: BlockPool) -> None:
    pool.set_hash(1, b"h")


def rename(pool: BlockPool) -> None:
    block_ids = take(pool, 1)
    pool.set_hash(block_ids[0], b"h")
    pool.set_hash(block_ids[0], b"other")


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (release_twice, "released more often"),
        (touch_empty, "it is empty"),
        (name_unheld, "nobody holds it"),
        (rename, "another name already"),
    ],
)
def test_misuse_is_an_assertion(misuse: Callable[[BlockPool], None], message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        misuse(BlockPool(4, 16))


def lose_block(pool: BlockPool) -> None:
    pool._empty.pop()


def free_null_block(pool: BlockPool) -> None:
    pool._empty.append(0)


def free_live_block(pool: BlockPool) -> None:
    pool._empty.append(take(pool, 1)[0])


def forget_name(pool: BlockPool) -> None:
    pool.set_hash(take(pool, 1)[0], b"h")
    pool._block_of_hash.clear()


def keep_stale_name(pool: BlockPool) -> None:
    pool._block_of_hash[b"h"] = 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lose_block, "block 1 is"),
        (free_null_block, "null block can be handed out"),
        (free_live_block, "block 1 is"),
        (forget_name, "the hash of block 1 leads to block None"),
        (keep_stale_name, "1 hashes for 0 blocks"),
    ],
)
def test_check_integrity_says_what_is_wrong(damage: Callable[[BlockPool], None], message: str) -> None:
    pool = BlockPool(4, 16)
    pool.check_integrity()
    damage(pool)
    with pytest.raises(AssertionError, match=message):
        pool.check_integrity()
