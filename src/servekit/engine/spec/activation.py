"""The activation functions that models name. Data only; `engine/layers/activation.py` computes them."""

from typing import Literal

Activation = Literal["silu", "gelu", "gelu_tanh", "relu"]
