"""The head of a decoder that scores pairs by its next word: hidden states -> one score. It must not know prompts."""

import torch

from servekit.engine.layers.pooling import pool


class TokenScore:
    """The logit of one token less that of another, made from their rows of the output matrix alone.

    `rows` [1 or 2, hidden] are the true token's and the false one's, in float32; `softcap` is the decoder's.
    """

    def __init__(self, rows: torch.Tensor, *, softcap: float | None, is_probability: bool) -> None:
        self._rows = rows
        self._softcap = softcap
        self._is_probability = is_probability

    def __call__(self, hidden: torch.Tensor, seq_starts: torch.Tensor) -> torch.Tensor:
        """`hidden` [T, hidden] of pairs that begin at `seq_starts` [S + 1] -> scores [S, 1] in float32."""
        logits = pool(hidden, seq_starts, "last") @ self._rows.T  # [S, 1 or 2]
        if self._softcap is not None:
            logits = self._softcap * torch.tanh(logits / self._softcap)
        scores = logits[:, :1] - logits[:, 1:].sum(dim=1, keepdim=True)
        return torch.sigmoid(scores) if self._is_probability else scores
