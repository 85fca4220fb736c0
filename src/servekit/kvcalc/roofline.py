"""The bound that memory bandwidth puts on decoding: every step reads the weights and all keys and values once."""

from dataclasses import dataclass
from fractions import Fraction

from servekit.kvcalc.weights import Weights


@dataclass(frozen=True, slots=True)
class DecodeBound:
    """One decode step of `batch` requests: bytes read, seconds at least, tokens a second at most."""

    batch: int
    weight_bytes: int
    kv_bytes: int
    seconds: float
    tokens_per_second: float


def decode_bound(weights: Weights, *, batch: int, request_bytes: int, bandwidth: float) -> DecodeBound | None:
    """The bound at `bandwidth` bytes a second, or None when the weights are unknown."""
    touched = touched_weight_bytes(weights, batch)
    if touched is None or bandwidth <= 0 or batch < 1:
        return None
    seconds = (touched + batch * request_bytes) / bandwidth
    return DecodeBound(batch, touched, batch * request_bytes, seconds, batch / seconds if seconds else 0.0)


def touched_weight_bytes(weights: Weights, batch: int) -> int | None:
    """Weight bytes that a step of `batch` tokens reads.

    An input embedding is only looked up, unless it is the head too. Of E routed experts with k a token, the expected
    share 1 - (1 - k/E)^batch is read, under uniform routing.
    """
    total = weights.num_bytes
    if total is None or not weights.part_bytes:
        return total
    if "lm_head" in weights.part_bytes:
        total -= weights.part_bytes.get("embedding", 0)
    total -= weights.part_bytes.get("vision", 0)
    experts = weights.counted.experts if weights.counted else None
    if experts is not None:
        untouched = float(1 - Fraction(experts.num_active, experts.num_routed)) ** batch
        total -= int(weights.part_bytes.get("experts", 0) * untouched)
    return max(total, 0)
