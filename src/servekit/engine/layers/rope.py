"""Rotary position embedding: frequencies once, a cos/sin table as far as needed, one rotation for all heads."""

import math

import torch

from servekit.engine.spec.rope import RopeSpec


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> tuple[torch.Tensor, float]:
    """The rotation speeds `[head_dim / 2]` in float32, and the factor that scales cos and sin.

    Sources: RoFormer (arXiv:2104.09864), YaRN (arXiv:2309.00071), Llama 3.1's published scaling.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.int64).float() / head_dim
    frequencies = 1.0 / spec.theta**exponents
    if spec.kind == "linear":
        return frequencies / spec.number("factor"), 1.0
    if spec.kind == "llama3":
        return _llama3(spec, frequencies), 1.0
    if spec.kind == "yarn":
        return _yarn(spec, frequencies, head_dim)
    return frequencies, 1.0


def _llama3(spec: RopeSpec, frequencies: torch.Tensor) -> torch.Tensor:
    """Slow rotations are slowed by `factor`, fast ones kept, those between blended by wavelength."""
    original = spec.number("original_max_position_embeddings")
    low, high, factor = spec.number("low_freq_factor"), spec.number("high_freq_factor"), spec.number("factor")
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return torch.where(between, blended, scaled)


def _yarn(spec: RopeSpec, frequencies: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, float]:
    """Dimensions that turn often keep their speed, those that turn less than once are interpolated."""
    factor = spec.number("factor")
    original = spec.number("original_max_position_embeddings")

    def dimension(rotations: float) -> float:
        return head_dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = max(math.floor(dimension(spec.number("beta_fast", 32.0))), 0)
    high = min(math.ceil(dimension(spec.number("beta_slow", 1.0))), head_dim - 1)
    ramp = ((torch.arange(head_dim // 2).float() - low) / max(high - low, 0.001)).clamp(0, 1)
    mixed = frequencies / factor * ramp + frequencies * (1 - ramp)
    return mixed, _yarn_attention_factor(spec, factor)


def _yarn_attention_factor(spec: RopeSpec, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = spec.number("attention_factor", 0.0)
    if given:
        return given
    weight, weight_all = spec.number("mscale", 0.0), spec.number("mscale_all_dim", 0.0)
    return mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)


def rotations(spec: RopeSpec, head_dim: int, max_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin [max_positions, head_dim / 2] of every position, scaled, in float32."""
    frequencies, factor = inverse_frequencies(spec, head_dim)
    angles = torch.outer(torch.arange(max_positions).float(), frequencies)
    return angles.cos() * factor, angles.sin() * factor


class RotaryTable:
    """cos and sin for every position below `max_positions`, in float32, laid out for `rotate`."""

    def __init__(self, spec: RopeSpec, head_dim: int, max_positions: int, *, device: torch.device) -> None:
        cos, sin = rotations(spec, head_dim, max_positions)
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
