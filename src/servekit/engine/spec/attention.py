"""What attention of one layer is: shapes and masks, whatever computes it."""

from dataclasses import dataclass

from servekit.engine.spec.decoder import DecoderSpec


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """What one layer needs. `window` W lets a token see itself and the W - 1 before it; None means all.

    `softcap` c bounds scores by c * tanh(score / c) after scaling. Without `causal` a token sees both ways, and its
    window reaches as far forward as back; such a batch has no KV cache. `has_bias`: `forward` is given one.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    window: int | None = None
    softcap: float | None = None
    causal: bool = True
    has_bias: bool = False


def attention_shapes(spec: DecoderSpec) -> list[AttentionShape]:
    """What each layer of a decoder asks of whatever computes its attention."""
    return [
        AttentionShape(
            num_heads=spec.num_heads,
            num_kv_heads=spec.num_kv_heads,
            head_dim=spec.head_dim,
            scale=spec.attention_scale,
            window=window,
            softcap=spec.attention_softcap,
            causal=spec.causal,
        )
        for window in spec.windows
    ]
