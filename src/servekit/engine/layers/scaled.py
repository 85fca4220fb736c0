"""Quantised weights through torch's own operators: int8 weights alone, and float8 weights and activations.

For a GPU; each operator is tried on a small matrix first, and where it fails the format is refused with torch's words.
Every output of a matrix has a scale of its own. Embeddings and norms stay as they are.
"""

from collections.abc import Sequence

import torch

from servekit.engine.layers.linear import DenseWeight, Linear, LinearFormat, Weight, stack
from servekit.errors import ConfigError

_FLOAT8 = torch.float8_e4m3fn
_SMALLEST_SCALE = 1e-12
"""A row of zeros still needs a scale that can be divided by."""


class Int8Linear:
    """Weights [out, in] int8 with a scale for each output; x stays as it is (torch's `_weight_int8pack_mm`)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        scales = (weight.float().abs().amax(dim=1) / 127).clamp(min=_SMALLEST_SCALE)
        self._weight = (weight.float() / scales.unsqueeze(1)).round().to(torch.int8)
        self._scales = scales.to(weight.dtype)
        self._bias = bias
        self.nbytes = self._weight.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, in] -> [T, out]."""
        y = torch._weight_int8pack_mm(x.contiguous(), self._weight, self._scales)
        return y if self._bias is None else y + self._bias


class Fp8Linear:
    """Weights [out, in] in float8 e4m3 with a scale for each output; x is scaled token by token (`_scaled_mm`)."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None = None) -> None:
        self._weight, scales = _to_float8(weight)
        self._scales = scales.t().contiguous()  # [1, out]
        self._bias = bias
        self._dtype = weight.dtype
        self.nbytes = self._weight.nbytes + self._scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """`x` [T, in] -> [T, out]."""
        rows, scales = _to_float8(x)
        y = torch._scaled_mm(
            rows, self._weight.t(), scale_a=scales, scale_b=self._scales, out_dtype=self._dtype, use_fast_accum=True
        )
        return y if self._bias is None else y + self._bias


def _to_float8(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """`matrix` [rows, in] as float8, and what each row has to be multiplied with [rows, 1] in float32."""
    scales = (matrix.abs().amax(dim=1, keepdim=True).float() / torch.finfo(_FLOAT8).max).clamp(min=_SMALLEST_SCALE)
    return (matrix.float() / scales).to(_FLOAT8), scales


class Scaled:
    """The format of one of the two, for matrices computed in `dtype` on `device`."""

    def __init__(self, name: str, dtype: torch.dtype, device: torch.device) -> None:
        self.name = name
        self._kind: type[Int8Linear] | type[Fp8Linear] = Int8Linear if name == "int8" else Fp8Linear
        self._dtype = dtype
        self._device = device

    def build(
        self, weights: Sequence[Weight], biases: Sequence[torch.Tensor] | None, *, is_head: bool = False
    ) -> Linear:
        """See LinearFormat.build."""
        return self._kind(*stack(weights, biases, self._dtype, self._device))


@torch.inference_mode()
def scaled_format(name: str, dtype: torch.dtype, device: torch.device) -> tuple[LinearFormat, str]:
    """The format `int8` or `fp8`, and the reason. Raises ConfigError with torch's own words where it does not work."""
    if dtype != torch.bfloat16:
        raise ConfigError(
            f"--quantize {name} computes in bfloat16, not {str(dtype).removeprefix('torch.')}",
            hint="add --dtype bfloat16",
            param="quantize",
        )
    linear_format = Scaled(name, dtype, device)
    weight = torch.linspace(-1, 1, 64 * 64, device=device).view(64, 64)
    x = weight[:16].to(dtype)
    try:
        found = linear_format.build([DenseWeight(weight)], None)(x).float()
    except (RuntimeError, NotImplementedError, AttributeError) as error:
        said = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise ConfigError(f"--quantize {name} does not work on this {device.type}: {said}", param="quantize") from None
    expected = x.float() @ weight.t()
    if not bool(((found - expected).abs() <= 0.1 * expected.abs().max()).all()):
        raise ConfigError(f"--quantize {name} computes wrong products on this {device.type}", param="quantize")
    return linear_format, f"{name}: torch's own operator, tried on a small matrix"
