"""Which KV blocks are free, which are in use, and which free ones still hold something worth keeping.

Owns reference counts, block hashes and the eviction order. It must not know sequences, how a hash is made, or where
the keys and values lie.

A block is in exactly one of three states:

    empty    no references, no hash       handed out first
    cached   no references, a hash        handed out last, least recently used first; a lookup can bring it back
    live     one or more references       with a hash once its contents are published
"""

from collections import OrderedDict
from collections.abc import Sequence

NULL_BLOCK = 0


class BlockPool:
    """Blocks 1 to num_blocks - 1 of `block_size` tokens. Block 0 is the null block: padding points at it.

    Every operation is O(1) a block. Nothing here is raised for input: misuse is a fault of the caller and asserted.
    """

    def __init__(self, num_blocks: int, block_size: int) -> None:
        assert num_blocks >= 2, "a pool needs one block beside the null block"
        assert block_size >= 1, "a block holds at least one token"
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._ref_counts = [0] * num_blocks
        self._hashes: list[bytes | None] = [None] * num_blocks
        self._block_of_hash: dict[bytes, int] = {}
        self._empty = list(range(num_blocks - 1, NULL_BLOCK, -1))  # a stack: the last one freed is the next one used
        # Not a plain dict: taking its first entry again and again would walk over all the deleted ones.
        self._cached: OrderedDict[int, None] = OrderedDict()

    @property
    def num_usable(self) -> int:
        """All blocks but the null block."""
        return self.num_blocks - 1

    @property
    def num_free(self) -> int:
        """Blocks that could be allocated now: empty and cached ones."""
        return len(self._empty) + len(self._cached)

    @property
    def num_cached(self) -> int:
        """Blocks without references that a lookup can still bring back."""
        return len(self._cached)

    @property
    def num_live(self) -> int:
        """Blocks that a sequence refers to."""
        return self.num_usable - self.num_free

    def num_blocks_for(self, num_tokens: int) -> int:
        """How many blocks hold that many tokens."""
        return -(-num_tokens // self.block_size)

    def allocate(self, num_blocks: int) -> list[int] | None:
        """Take that many blocks, with one reference each and no hash. All or nothing: None when they are not there."""
        if num_blocks > self.num_free:
            return None
        block_ids = []
        for _ in range(num_blocks):
            if self._empty:
                block_id = self._empty.pop()
            else:
                block_id, _ = self._cached.popitem(last=False)
                block_hash = self._hashes[block_id]
                assert block_hash is not None, f"cached block {block_id} has no hash"
                # Before the block is handed out: from here on its contents are someone else's.
                del self._block_of_hash[block_hash]
                self._hashes[block_id] = None
            self._ref_counts[block_id] = 1
            block_ids.append(block_id)
        return block_ids

    def touch(self, block_ids: Sequence[int]) -> None:
        """Add one reference to live or cached blocks; a cached one can no longer be evicted."""
        for block_id in block_ids:
            if self._ref_counts[block_id] == 0:
                assert block_id in self._cached, f"block {block_id} is touched, but it is empty"
                del self._cached[block_id]
            self._ref_counts[block_id] += 1

    def release(self, block_ids: Sequence[int]) -> None:
        """Take one reference from each block of a block table, in the table's order.

        The tail is freed first and so evicted first: a prefix is worth nothing once its beginning is gone, but its
        beginning is worth something without its end.
        """
        for block_id in reversed(block_ids):
            assert self._ref_counts[block_id] > 0, f"block {block_id} is released more often than it was taken"
            self._ref_counts[block_id] -= 1
            if self._ref_counts[block_id] > 0:
                continue
            if self._hashes[block_id] is None:
                self._empty.append(block_id)
            else:
                self._cached[block_id] = None

    def num_free_without(self, block_ids: Sequence[int]) -> int:
        """What `num_free` would be after touching these blocks."""
        return self.num_free - sum(1 for block_id in block_ids if self._ref_counts[block_id] == 0)

    def lookup(self, block_hash: bytes) -> int | None:
        """The block that holds these contents, live or cached."""
        return self._block_of_hash.get(block_hash)

    def set_hash(self, block_id: int, block_hash: bytes) -> bool:
        """Name a live block's contents, so that `lookup` finds it. False when another block has the name already."""
        assert self._ref_counts[block_id] > 0, f"block {block_id} is named, but nobody holds it"
        assert self._hashes[block_id] in (None, block_hash), f"block {block_id} has another name already"
        holder = self._block_of_hash.setdefault(block_hash, block_id)
        if holder != block_id:
            return False
        self._hashes[block_id] = block_hash
        return True

    def ref_count(self, block_id: int) -> int:
        """How many block tables hold the block."""
        return self._ref_counts[block_id]

    def block_hash(self, block_id: int) -> bytes | None:
        """The name of the block's contents, when it has one."""
        return self._hashes[block_id]

    def check_integrity(self) -> None:
        """Raise AssertionError, saying what is wrong, unless every block is in exactly one state. O(num_blocks)."""
        empty, cached = set(self._empty), set(self._cached)
        assert len(empty) == len(self._empty), "a block is empty twice"
        assert self._ref_counts[NULL_BLOCK] == 0, "the null block has a reference"
        assert self._hashes[NULL_BLOCK] is None, "the null block has a hash"
        assert NULL_BLOCK not in empty | cached, "the null block can be handed out"
        for block_id in range(NULL_BLOCK + 1, self.num_blocks):
            num_refs, block_hash = self._ref_counts[block_id], self._hashes[block_id]
            states = [block_id in empty, block_id in cached, num_refs > 0]
            assert sum(states) == 1, f"block {block_id} is (empty, cached, live) = {states}, {num_refs} references"
            assert not (block_id in empty and block_hash), f"empty block {block_id} has a hash"
            assert block_id not in cached or block_hash, f"cached block {block_id} has no hash"
            assert block_hash is None or self._block_of_hash.get(block_hash) == block_id, (
                f"the hash of block {block_id} leads to block {self._block_of_hash.get(block_hash)}"
            )
        num_hashed = sum(1 for block_hash in self._hashes if block_hash is not None)
        assert num_hashed == len(self._block_of_hash), f"{len(self._block_of_hash)} hashes for {num_hashed} blocks"
        num_live = sum(1 for num_refs in self._ref_counts if num_refs > 0)
        assert num_live == self.num_live, f"{num_live} blocks have references, but {self.num_live} count as live"
