"""The head of a cross-encoder: hidden states of a pair of texts -> one score. It must not know how pairs are made."""

import torch

from servekit.engine.layers.linear import Linear
from servekit.engine.layers.norm import LayerNorm
from servekit.engine.layers.pooling import pool
from servekit.engine.spec.encoder import ClassifierSpec


class PairClassifier:
    """pool -> dense -> activation -> norm -> score."""

    def __init__(
        self, spec: ClassifierSpec, *, dense: Linear, norm: LayerNorm | None, out: Linear, dtype: torch.dtype
    ) -> None:
        self._spec = spec
        self._dense = dense
        self._norm = norm
        self._out = out
        self._dtype = dtype

    def __call__(self, hidden: torch.Tensor, seq_starts: torch.Tensor) -> torch.Tensor:
        """`hidden` [T, hidden] of pairs that begin at `seq_starts` [S + 1] -> scores [S, 1] in float32."""
        x = self._dense(pool(hidden, seq_starts, self._spec.pooling).to(self._dtype)).float()
        if self._spec.activation == "tanh":
            x = torch.tanh(x)
        elif self._spec.activation == "relu":
            x = torch.relu(x)
        else:
            x = torch.nn.functional.gelu(x)
        if self._norm is not None:
            x = self._norm(x)
        logits = self._out(x.to(self._dtype)).float()
        return torch.sigmoid(logits) if self._spec.score_activation == "sigmoid" else logits
