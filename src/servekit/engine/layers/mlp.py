"""The feed-forward blocks: gated (SwiGLU or GeGLU, arXiv:2002.05202) and plain."""

import torch

from servekit.engine.layers.activation import activate
from servekit.engine.layers.linear import Linear
from servekit.engine.spec.activation import Activation


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
        return self._down(activate(gate, self._activation) * up)


class PlainMLP:
    """down(act(up(x)))."""

    def __init__(self, up: Linear, down: Linear, activation: Activation) -> None:
        self._up = up
        self._down = down
        self._activation = activation

    @property
    def matrices(self) -> tuple[Linear, ...]:
        """Its two products."""
        return self._up, self._down

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, hidden] -> [T, hidden]."""
        return self._down(activate(self._up(x), self._activation))
