"""How much a step computes and reads, and what that makes of a measured time. Arithmetic only, no tensors.

The two bounds of the roofline model (Williams et al., CACM 2009): a step takes at least its bytes over the memory's
rate and at least its operations over the arithmetic's rate. MBU and MFU are the shares of these two rates reached.
"""

from dataclasses import dataclass

from servekit.engine.spec.decoder import DecoderSpec


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The best of a few rounds: `bytes_per_s` read or written, `flops_per_s` of a product in `dtype`."""

    bytes_per_s: float
    flops_per_s: float
    dtype: str

    @property
    def ridge(self) -> float:
        """Operations a byte above which the arithmetic units are the limit, not the memory."""
        return self.flops_per_s / self.bytes_per_s


@dataclass(frozen=True, slots=True)
class Work:
    """Floating-point operations of a step and the bytes it has to read."""

    flops: float
    num_bytes: float


@dataclass(frozen=True, slots=True)
class Roofline:
    """A measured time against the ceilings. `bound_s` is the least time, `share` how much of it was reached.

    `limit` is the resource whose bound is the longer: memory or compute.
    """

    flops_per_s: float
    bytes_per_s: float
    mfu: float
    mbu: float
    intensity: float
    limit: str
    bound_s: float
    share: float


def decode_work(spec: DecoderSpec, *, batch: int, context: int, weights_bytes: int, kv_element_bytes: float) -> Work:
    """One token for each of `batch` sequences that see `context` tokens each.

    `weights_bytes` are all matrices and the embedding. An embedding apart from the head is only looked up.
    """
    matrices = _layer_parameters(spec) + _head_parameters(spec)
    per_parameter = weights_bytes / (matrices + (0 if spec.tie_embeddings else _head_parameters(spec)))
    seen = sum(min(context, window or context) for window in spec.windows)
    return Work(
        flops=batch * (2 * matrices + 4 * spec.q_size * seen),
        num_bytes=matrices * per_parameter + batch * 2 * spec.kv_size * kv_element_bytes * seen,
    )


def prefill_work(spec: DecoderSpec, *, tokens: int, weights_bytes: int, kv_element_bytes: float) -> Work:
    """A prompt of `tokens` in one step; only the last token needs scores over the vocabulary."""
    layers, head = _layer_parameters(spec), _head_parameters(spec)
    per_parameter = weights_bytes / (layers + head * (1 if spec.tie_embeddings else 2))
    pairs = sum(_seen_pairs(tokens, window) for window in spec.windows)
    return Work(
        flops=2 * layers * tokens + 2 * head + 4 * spec.q_size * pairs,
        num_bytes=(layers + head) * per_parameter + 2 * spec.kv_size * kv_element_bytes * tokens * spec.num_layers,
    )


def roofline(work: Work, seconds: float, ceilings: Ceilings) -> Roofline:
    """Where `seconds` lie between the two bounds."""
    memory_s, compute_s = work.num_bytes / ceilings.bytes_per_s, work.flops / ceilings.flops_per_s
    bound = max(memory_s, compute_s)
    return Roofline(
        flops_per_s=work.flops / seconds,
        bytes_per_s=work.num_bytes / seconds,
        mfu=compute_s / seconds,
        mbu=memory_s / seconds,
        intensity=work.flops / work.num_bytes,
        limit="memory" if memory_s >= compute_s else "compute",
        bound_s=bound,
        share=bound / seconds,
    )


def _layer_parameters(spec: DecoderSpec) -> int:
    attention = spec.hidden_size * (spec.q_size + 2 * spec.kv_size) + spec.q_size * spec.hidden_size
    return spec.num_layers * (attention + 3 * spec.hidden_size * spec.intermediate_size)


def _head_parameters(spec: DecoderSpec) -> int:
    return spec.vocab_size * spec.hidden_size


def _seen_pairs(tokens: int, window: int | None) -> int:
    """Pairs of a token and one that it sees, itself included."""
    seen = min(tokens, window or tokens)
    return seen * (seen + 1) // 2 + (tokens - seen) * seen
