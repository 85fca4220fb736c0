"""The gated feed-forward block (SwiGLU or GeGLU, arXiv:2002.05202)."""

import torch

from servekit.engine.layers.linear import Linear
from servekit.engine.spec.decoder import Activation


class GatedMLP:
    """down(act(gate(x)) * up(x)), with gate and up as one matrix product."""

    def __init__(self, gate_up: Linear, down: Linear, activation: Activation) -> None:
        self._gate_up = gate_up
        self._down = down
        self._activation = activation

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """Its two products."""
        return self._gate_up, self._down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, hidden] -> [T, hidden]."""
        gate, up = self._gate_up(x).chunk(2, dim=-1)
        if self._activation == "silu":
            gate = torch.nn.functional.silu(gate)
        else:
            gate = torch.nn.functional.gelu(gate, approximate="tanh")
        return self._down(gate * up)
