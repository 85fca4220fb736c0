"""EncoderSpec: everything that tells one encoder family from another, as data. It must not know tensors.

What differs most between encoders is how their checkpoints spell the same parts, so the names are part of the spec.
"""

from dataclasses import dataclass
from typing import Literal

from servekit.engine.spec.activation import Activation
from servekit.engine.spec.rope import RopeSpec


@dataclass(frozen=True, slots=True)
class EncoderNames:
    """Names of the parts in a checkpoint. Those of a layer are relative to `layers` + its number + a dot.

    `prefixes` may stand before any of them. `qkv` is one name where the three are stored as one, `up` is (gate, up) in
    gated families, and one name with `up_is_fused` where the two are one matrix, gate first.
    """

    prefixes: tuple[str, ...]
    embedding_norm: str
    layers: str
    qkv: tuple[str, ...]
    output: str
    attention_norm: str
    up: tuple[str, ...]
    down: str
    mlp_norm: str
    word_embedding: str = "embeddings.word_embeddings"
    position_embedding: str = "embeddings.position_embeddings"
    type_embedding: str = "embeddings.token_type_embeddings"
    relative_bias: str = "encoder.relative_attention_bias"
    final_norm: str = "final_norm"


@dataclass(frozen=True, slots=True)
class ClassifierSpec:
    """The head of a cross-encoder: pool, dense, activation, norm, and the score. `score_activation` turns it into one.

    `has_norm` and `dense_bias` describe ModernBERT's. The names are whole ones, without the encoder's prefix.
    """

    pooling: Literal["cls", "mean"]
    dense: str
    activation: Literal["tanh", "relu", "gelu"]
    out: str
    num_labels: int
    score_activation: Literal["sigmoid", "identity"]
    norm: str | None = None
    dense_bias: bool = True


@dataclass(frozen=True, slots=True)
class EncoderSpec:
    """An encoder. `windows` and `ropes` have one entry a layer.

    `num_positions` rows of learned positions begin at `position_offset`; 0 where positions are rotary. `pre_norm`
    families normalise before each part and once at the end, and their first layer has no norm of its own.
    `num_relative_buckets` share the learned bias by distance (T5's, arXiv:1910.10683) of MPNet.
    """

    family: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    max_position_embeddings: int
    norm_eps: float
    activation: Activation
    names: EncoderNames
    windows: tuple[int | None, ...]
    ropes: tuple[RopeSpec | None, ...]
    num_positions: int = 0
    position_offset: int = 0
    num_token_types: int = 0
    num_relative_buckets: int = 0
    pre_norm: bool = False
    gated: bool = False
    up_is_fused: bool = False
    attention_bias: bool = True
    mlp_bias: bool = True
    norm_bias: bool = True
    classifier: ClassifierSpec | None = None

    @property
    def head_dim(self) -> int:
        """Width of one attention head."""
        return self.hidden_size // self.num_heads
