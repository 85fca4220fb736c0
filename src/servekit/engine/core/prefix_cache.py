"""Which blocks already hold the beginning of a prompt.

Owns how the contents of a block are named, and the rule when a name may be used. It must not know who runs or waits.

The name of a full block is a hash over the name of the block before it and its own tokens, so that it stands for the
whole prefix and not for the block alone. The first block follows on a root made of the model's identity and the
request's cache salt: another model, or another salt, never finds it. SHA-256 makes an accidental or forged match
something that need not be checked for.
"""

from array import array
from hashlib import sha256

from servekit.engine.core.block_pool import BlockPool
from servekit.engine.core.sequence import Sequence


class PrefixCache:
    """Finds and publishes full blocks by contents. With `enabled` False nothing is found and nothing published.

    `seed` is the model's identity: everything that changes keys and values for the same tokens. `queries` counts the
    tokens of first admissions and `hits` those of them that were found.
    """

    def __init__(self, pool: BlockPool, enabled: bool, seed: bytes) -> None:
        self.enabled = enabled
        self.queries = 0
        self.hits = 0
        self._pool = pool
        self._seed = seed

    def match(self, seq: Sequence) -> list[int]:
        """The blocks that hold the longest known prefix, at most num_tokens - 1 tokens of it; nothing is changed.

        One token at least is always left, since logits come only out of a token that is computed.
        """
        block_ids: list[int] = []
        if not self.enabled:
            return block_ids
        for idx in range((seq.num_tokens - 1) // self._pool.block_size):
            block_id = self._pool.lookup(self._hash(seq, idx))
            if block_id is None:
                break
            block_ids.append(block_id)
        return block_ids

    def publish(self, seq: Sequence) -> None:
        """Make the full blocks that are computed by now matchable. To be called only after the step that wrote them.

        When another sequence has published the same contents first, its block keeps the name and this one has none.
        """
        if not self.enabled:
            return
        num_full_blocks = seq.num_computed_tokens // self._pool.block_size
        for idx in range(seq.num_published_blocks, num_full_blocks):
            self._pool.set_hash(seq.block_table[idx], self._hash(seq, idx))
        seq.num_published_blocks = max(seq.num_published_blocks, num_full_blocks)

    def record(self, num_tokens: int, num_hit_tokens: int) -> None:
        """Count one first admission; resumed sequences find their own blocks and would flatter the ratio."""
        if self.enabled:
            self.queries += num_tokens
            self.hits += num_hit_tokens

    def _hash(self, seq: Sequence, block_idx: int) -> bytes:
        """The name of a full block; those before it have been asked for. Kept with the sequence, so made only once."""
        hashes = seq.block_hashes
        if block_idx == len(hashes):
            parent = hashes[-1] if hashes else self._root(seq.request.cache_salt)
            start = block_idx * self._pool.block_size
            tokens = seq.token_ids[start : start + self._pool.block_size]
            hashes.append(sha256(parent + array("q", tokens).tobytes()).digest())
        return hashes[block_idx]

    def _root(self, salt: str) -> bytes:
        # The length keeps (seed "ab", salt "c") and (seed "a", salt "bc") apart. A salt comes from a client's JSON,
        # where a lone surrogate is possible; strict UTF-8 would fail on it.
        return sha256(len(self._seed).to_bytes(8) + self._seed + salt.encode("utf-8", "surrogatepass")).digest()
