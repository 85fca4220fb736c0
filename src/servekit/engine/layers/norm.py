"""Root-mean-square normalisation (arXiv:1910.07467)."""

import torch


class RMSNorm:
    """x / rms(x) * weight over the last dimension, in float32 whatever x and the result are.

    `weight` [..., hidden]; the result has `dtype`, which is what the matrix product behind it computes in.
    """

    def __init__(self, weight: torch.Tensor, eps: float, dtype: torch.dtype) -> None:
        self._weight = weight.float()
        self._eps = eps
        self._dtype = dtype

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., hidden] -> the same shape."""
        normed = torch.nn.functional.rms_norm(x.float(), self._weight.shape[-1:], eps=self._eps)
        return normed.mul_(self._weight).to(self._dtype)
