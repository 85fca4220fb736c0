"""Root-mean-square normalisation (arXiv:1910.07467)."""

import torch


class RMSNorm:
    """x / rms(x) * weight over the last dimension. The mean is taken in float32 whatever the dtype of x."""

    def __init__(self, weight: torch.Tensor, eps: float, *, offset: float = 0.0) -> None:
        self._weight = weight + offset
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., hidden] -> the same shape and dtype."""
        return torch.nn.functional.rms_norm(x, self._weight.shape[-1:], eps=self._eps) * self._weight
