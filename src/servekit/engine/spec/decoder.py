"""DecoderSpec: everything that tells one decoder-only family from another, as data. It must not know tensors."""

from dataclasses import dataclass

from servekit.engine.spec.activation import Activation
from servekit.engine.spec.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder. `windows` and `ropes` have one entry a layer; window None means the layer sees the whole context.

    `norm_offset` is added to every norm weight (Gemma stores w - 1). `post_norms` are the extra norms after attention
    and MLP (Gemma 2 and 3). `qk_norm` normalises each head of q and k before rotation. `attention_scale` multiplies
    q @ k; the softcaps bound scores and logits by cap * tanh(x / cap). A model that is not `causal` sees both ways, so
    it embeds text and cannot write it.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    norm_eps: float
    activation: Activation
    tie_embeddings: bool
    attention_scale: float
    windows: tuple[int | None, ...]
    ropes: tuple[RopeSpec, ...]
    norm_offset: float = 0.0
    post_norms: bool = False
    qk_norm: bool = False
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    embed_scale: float | None = None
    attention_softcap: float | None = None
    logits_softcap: float | None = None
    causal: bool = True

    @property
    def q_size(self) -> int:
        """Width of all query heads together."""
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Width of all key heads together (values have the same)."""
        return self.num_kv_heads * self.head_dim
