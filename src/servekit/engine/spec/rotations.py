"""Rotary position embedding: how fast each pair of dimensions turns, and the table of all positions.

Sources: RoFormer (arXiv:2104.09864), YaRN (arXiv:2309.00071), Llama 3.1's published scaling.
"""

import math

import numpy as np
import numpy.typing as npt

from servekit.engine.spec.rope import RopeSpec

FloatArray = npt.NDArray[np.float32]


def inverse_frequencies(spec: RopeSpec, head_dim: int) -> tuple[FloatArray, float]:
    """The rotation speeds `[head_dim / 2]`, and the factor that scales cos and sin."""
    exponents = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequencies = np.float32(1.0) / np.power(np.float32(spec.theta), exponents)
    if spec.kind == "linear":
        return frequencies / np.float32(spec.number("factor")), 1.0
    if spec.kind == "llama3":
        return _llama3(spec, frequencies), 1.0
    if spec.kind == "yarn":
        return _yarn(spec, frequencies, head_dim)
    return frequencies, 1.0


def rotations(spec: RopeSpec, head_dim: int, max_positions: int) -> tuple[FloatArray, FloatArray]:
    """cos and sin [max_positions, head_dim / 2] of every position, scaled."""
    frequencies, factor = inverse_frequencies(spec, head_dim)
    angles = np.outer(np.arange(max_positions, dtype=np.float32), frequencies)
    return np.cos(angles) * np.float32(factor), np.sin(angles) * np.float32(factor)


def _llama3(spec: RopeSpec, frequencies: FloatArray) -> FloatArray:
    """Slow rotations are slowed by `factor`, fast ones kept, those between blended by wavelength."""
    original = spec.number("original_max_position_embeddings")
    low, high, factor = spec.number("low_freq_factor"), spec.number("high_freq_factor"), spec.number("factor")
    wavelengths = 2 * math.pi / frequencies
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * frequencies / factor + smooth * frequencies
    scaled = np.where(wavelengths > original / low, frequencies / factor, frequencies)
    between = (wavelengths <= original / low) & (wavelengths >= original / high)
    return np.where(between, blended, scaled).astype(np.float32)


def _yarn(spec: RopeSpec, frequencies: FloatArray, head_dim: int) -> tuple[FloatArray, float]:
    """Dimensions that turn often keep their speed, those that turn less than once are interpolated."""
    factor = spec.number("factor")
    original = spec.number("original_max_position_embeddings")

    def dimension(turns: float) -> float:
        return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(spec.theta))

    low = max(math.floor(dimension(spec.number("beta_fast", 32.0))), 0)
    high = min(math.ceil(dimension(spec.number("beta_slow", 1.0))), head_dim - 1)
    ramp = np.clip((np.arange(head_dim // 2, dtype=np.float32) - low) / max(high - low, 0.001), 0, 1)
    mixed = frequencies / factor * ramp + frequencies * (1 - ramp)
    return mixed.astype(np.float32), _yarn_attention_factor(spec, factor)


def _yarn_attention_factor(spec: RopeSpec, factor: float) -> float:
    def mscale(weight: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0

    given = spec.number("attention_factor", 0.0)
    if given:
        return given
    weight, weight_all = spec.number("mscale", 0.0), spec.number("mscale_all_dim", 0.0)
    return mscale(weight) / mscale(weight_all) if weight and weight_all else mscale(1.0)
