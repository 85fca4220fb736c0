"""Normalisation: by root mean square (arXiv:1910.07467), and by mean and variance (arXiv:1607.06450)."""

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


class LayerNorm:
    """(x - mean) / deviation * weight + bias over the last dimension, float32 in and out.

    `weight` and `bias` [hidden]; bias is None in families that have none.
    """

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> None:
        self._weight = weight.float()
        self._bias = None if bias is None else bias.float()
        self._eps = eps

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [..., hidden] -> the same shape."""
        return torch.nn.functional.layer_norm(x, self._weight.shape, self._weight, self._bias, self._eps)
