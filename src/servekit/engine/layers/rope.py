"""Rotary position embedding in torch: a table as far as needed, one rotation for all heads."""

import torch

from servekit.engine.spec.rope import RopeSpec
from servekit.engine.spec.rotations import rotations


class RotaryTable:
    """cos and sin for every position below `max_positions`, in float32, laid out for `rotate`."""

    def __init__(self, spec: RopeSpec, head_dim: int, max_positions: int, *, device: torch.device) -> None:
        cos, sin = (torch.from_numpy(array) for array in rotations(spec, head_dim, max_positions))
        self._cos = torch.cat((cos, cos), dim=-1).to(device)  # [P, D]
        self._sin = torch.cat((-sin, sin), dim=-1).to(device)

    def at(self, positions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """cos and signed sin of `positions` [T], both [T, 1, D]."""
        return self._cos[positions].unsqueeze(1), self._sin[positions].unsqueeze(1)


def rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate `heads` [T, H, D] in float32: a bfloat16 angle would be off by several positions far into a context.

    Rolling by half and a signed sin give rotate-half in two passes over memory.
    """
    rolled = heads.roll(heads.shape[-1] // 2, dims=-1)
    return torch.addcmul(heads * cos, rolled, sin).to(heads.dtype)
