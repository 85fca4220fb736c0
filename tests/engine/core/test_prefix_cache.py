"""PrefixCache: what matches, when, and what never does."""

import pytest

from servekit.engine.core.block_pool import BlockPool
from servekit.engine.core.prefix_cache import PrefixCache
from servekit.engine.core.sequence import Sequence

from .harness import make_request

BLOCK_SIZE = 4


def make_cache(*, enabled: bool = True, seed: bytes = b"model") -> tuple[BlockPool, PrefixCache]:
    pool = BlockPool(num_blocks=20, block_size=BLOCK_SIZE)
    return pool, PrefixCache(pool, enabled, seed)


def make_sequence(tokens: list[int] | range, salt: str = "") -> Sequence:
    return Sequence(make_request("r", list(tokens), cache_salt=salt), 0, 0.0)


def compute(pool: BlockPool, cache: PrefixCache, seq: Sequence, num_tokens: int | None = None) -> None:
    """Give a sequence blocks, as if its first tokens had been computed, and publish them."""
    num_tokens = seq.num_tokens if num_tokens is None else num_tokens
    missing = pool.allocate(pool.num_blocks_for(num_tokens) - len(seq.block_table))
    assert missing is not None
    seq.block_table += missing
    seq.num_computed_tokens = num_tokens
    cache.publish(seq)
    pool.check_integrity()


@pytest.mark.parametrize(
    ("num_tokens", "num_matched"),
    [(1, 0), (3, 0), (4, 0), (5, 1), (7, 1), (8, 1), (9, 2), (12, 2), (13, 3), (40, 3)],
)
def test_matches_full_blocks_and_leaves_a_token_to_compute(num_tokens: int, num_matched: int) -> None:
    pool, cache = make_cache()
    first = make_sequence(range(14))
    compute(pool, cache, first)
    assert first.block_table == [1, 2, 3, 4]
    assert cache.match(make_sequence(range(num_tokens))) == [1, 2, 3][:num_matched]


def test_a_block_matches_only_after_what_it_followed() -> None:
    pool, cache = make_cache()
    compute(pool, cache, make_sequence([1, 2, 3, 4, 5, 6, 7, 8]))
    assert cache.match(make_sequence([1, 2, 3, 4, 5, 6, 7, 8, 9])) == [1, 2]
    assert cache.match(make_sequence([1, 2, 3, 0, 5, 6, 7, 8, 9])) == []
    assert cache.match(make_sequence([5, 6, 7, 8, 9])) == []


def test_nothing_matches_before_it_is_published() -> None:
    pool, cache = make_cache()
    seq = make_sequence(range(9))
    seq.block_table = pool.allocate(3) or []
    assert cache.match(make_sequence(range(9))) == []
    seq.num_computed_tokens = 7
    cache.publish(seq)
    assert cache.match(make_sequence(range(9))) == [1]
    seq.num_computed_tokens = 8
    cache.publish(seq)
    assert cache.match(make_sequence(range(9))) == [1, 2]


def test_publishing_twice_is_publishing_once() -> None:
    pool, cache = make_cache()
    seq = make_sequence(range(8))
    compute(pool, cache, seq)
    before = list(seq.block_hashes)
    cache.publish(seq)
    pool.check_integrity()
    assert (seq.block_hashes, seq.num_published_blocks) == (before, 2)


def test_hashes_are_kept_and_not_made_again() -> None:
    pool, cache = make_cache()
    seq = make_sequence(range(8))
    compute(pool, cache, seq, num_tokens=4)
    seq.token_ids[0] = 99  # a hash made again would differ
    compute(pool, cache, seq, num_tokens=8)
    assert cache.match(make_sequence(range(9))) == [1, 2]


def test_generated_tokens_are_published_as_well() -> None:
    pool, cache = make_cache()
    seq = make_sequence([1, 2, 3])
    compute(pool, cache, seq)
    seq.token_ids += [4, 5]
    compute(pool, cache, seq, num_tokens=4)
    assert cache.match(make_sequence([1, 2, 3, 4, 5])) == [1]


def test_of_two_that_compute_the_same_the_first_publisher_is_found() -> None:
    pool, cache = make_cache()
    first, second = make_sequence(range(8)), make_sequence(range(8))
    first.block_table, second.block_table = pool.allocate(2) or [], pool.allocate(2) or []
    for seq in (second, first):
        seq.num_computed_tokens = 8
        cache.publish(seq)
    assert cache.match(make_sequence(range(9))) == second.block_table == [3, 4]
    pool.release(first.block_table)
    assert (pool.num_cached, pool.num_live) == (0, 2)
    pool.release(second.block_table)
    assert (pool.num_cached, pool.num_live) == (2, 0)
    pool.check_integrity()


def test_cached_blocks_survive_their_sequence_until_they_are_reused() -> None:
    pool, cache = make_cache()
    seq = make_sequence(range(12))
    compute(pool, cache, seq)
    pool.release(seq.block_table)
    assert cache.match(make_sequence(range(13))) == [1, 2, 3]
    assert len(pool.allocate(17) or []) == 17  # 16 empty ones and the tail
    assert cache.match(make_sequence(range(13))) == [1, 2]


@pytest.mark.parametrize("salt", ["b", "", "a ", "\ud800"])
def test_another_salt_never_matches(salt: str) -> None:
    pool, cache = make_cache()
    compute(pool, cache, make_sequence(range(8), salt="a"))
    assert cache.match(make_sequence(range(9), salt=salt)) == []
    assert cache.match(make_sequence(range(9), salt="a")) == [1, 2]


def test_seed_and_salt_do_not_run_into_each_other() -> None:
    hashes = set()
    for seed, salt in ((b"ab", "c"), (b"a", "bc"), (b"abc", ""), (b"", "abc")):
        pool, cache = make_cache(seed=seed)
        seq = make_sequence(range(4), salt)
        compute(pool, cache, seq)
        hashes.add(seq.block_hashes[0])
    assert len(hashes) == 4


def test_disabled_finds_publishes_and_counts_nothing() -> None:
    pool, cache = make_cache(enabled=False)
    seq = make_sequence(range(8))
    compute(pool, cache, seq)
    cache.record(8, 0)
    assert cache.match(make_sequence(range(9))) == []
    assert (cache.queries, cache.hits) == (0, 0)
    pool.release(seq.block_table)
    assert pool.num_cached == 0


def test_counters_add_up() -> None:
    _, cache = make_cache()
    cache.record(10, 8)
    cache.record(5, 0)
    assert (cache.queries, cache.hits) == (15, 8)
