"""Activation functions by name."""

import torch

from servekit.engine.spec.activation import Activation


def activate(x: torch.Tensor, activation: Activation) -> torch.Tensor:
    """Apply `activation` to every element; `gelu` is the exact one (arXiv:1606.08415)."""
    if activation == "silu":
        return torch.nn.functional.silu(x)
    if activation == "relu":
        return torch.nn.functional.relu(x)
    return torch.nn.functional.gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
