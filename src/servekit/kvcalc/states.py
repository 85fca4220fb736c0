"""Recurrent states of fixed size, one class an architecture. They count elements and must not know bytes.

A state has two parts: the last columns of a short convolution, kept in the model's dtype, and the recurrent matrix.
Counts follow the serving engines: a convolution of width k keeps k - 1 columns.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass, replace
from typing import ClassVar

from servekit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class StateCache(ABC):
    """The state of one layer. Counts are elements for one request; formulas are written out in numbers.

    `recurrent_dtype` None means the model's own dtype.
    """

    name: ClassVar[str]
    recurrent_dtype: str | None

    @property
    @abstractmethod
    def num_conv(self) -> int:
        """Elements of the convolution part."""

    @property
    @abstractmethod
    def num_recurrent(self) -> int:
        """Elements of the recurrent part."""

    @property
    @abstractmethod
    def conv_formula(self) -> str:
        """The convolution part as one would write it on paper."""

    @property
    @abstractmethod
    def recurrent_formula(self) -> str:
        """The recurrent part as one would write it on paper."""

    @abstractmethod
    def per_device(self, num_devices: int) -> "StateCache":
        """The same state on one of `num_devices` devices."""


@dataclass(frozen=True, slots=True)
class Mamba1State(StateCache):
    """Selective state space, arXiv:2312.00752: every inner channel has its own state of `state_size`."""

    name: ClassVar[str] = "Mamba-1"
    inner: int
    state_size: int
    kernel: int

    @property
    def num_conv(self) -> int:
        return self.inner * (self.kernel - 1)

    @property
    def num_recurrent(self) -> int:
        return self.inner * self.state_size

    @property
    def conv_formula(self) -> str:
        return f"{self.inner:,} channels x {self.kernel - 1}"

    @property
    def recurrent_formula(self) -> str:
        return f"{self.inner:,} channels x {self.state_size}"

    def per_device(self, num_devices: int) -> "Mamba1State":
        return replace(self, inner=_divide("Mamba channels", self.inner, num_devices))


@dataclass(frozen=True, slots=True)
class Mamba2State(StateCache):
    """State-space duality, arXiv:2405.21060: `heads` of `head_dim` with a state of `state_size`; B and C in groups."""

    name: ClassVar[str] = "Mamba-2"
    heads: int
    head_dim: int
    num_groups: int
    state_size: int
    kernel: int

    @property
    def num_conv(self) -> int:
        return (self.heads * self.head_dim + 2 * self.num_groups * self.state_size) * (self.kernel - 1)

    @property
    def num_recurrent(self) -> int:
        return self.heads * self.head_dim * self.state_size

    @property
    def conv_formula(self) -> str:
        inner = self.heads * self.head_dim
        return f"({inner:,} + 2 x {self.num_groups} groups x {self.state_size}) x {self.kernel - 1}"

    @property
    def recurrent_formula(self) -> str:
        return f"{self.heads} heads x {self.head_dim} x {self.state_size}"

    def per_device(self, num_devices: int) -> "Mamba2State":
        heads = _divide("Mamba heads", self.heads, num_devices)
        groups = self.num_groups // num_devices if self.num_groups % num_devices == 0 else 1
        return replace(self, heads=heads, num_groups=groups)


@dataclass(frozen=True, slots=True)
class DeltaNetState(StateCache):
    """Gated delta net, arXiv:2412.06464: one matrix of key by value size for each value head."""

    name: ClassVar[str] = "gated delta net"
    key_heads: int
    key_dim: int
    value_heads: int
    value_dim: int
    kernel: int

    @property
    def num_conv(self) -> int:
        return (2 * self.key_heads * self.key_dim + self.value_heads * self.value_dim) * (self.kernel - 1)

    @property
    def num_recurrent(self) -> int:
        return self.value_heads * self.value_dim * self.key_dim

    @property
    def conv_formula(self) -> str:
        keys, values = f"{self.key_heads} x {self.key_dim}", f"{self.value_heads} x {self.value_dim}"
        return f"(2 x {keys} + {values}) x {self.kernel - 1}"

    @property
    def recurrent_formula(self) -> str:
        return f"{self.value_heads} heads x {self.value_dim} x {self.key_dim}"

    def per_device(self, num_devices: int) -> "DeltaNetState":
        return replace(
            self,
            key_heads=_divide("linear-attention key heads", self.key_heads, num_devices),
            value_heads=_divide("linear-attention value heads", self.value_heads, num_devices),
        )


@dataclass(frozen=True, slots=True)
class KimiDeltaState(StateCache):
    """Kimi delta attention, arXiv:2510.26692: like the gated delta net, with a convolution each for q, k and v."""

    name: ClassVar[str] = "Kimi delta attention"
    heads: int
    head_dim: int
    kernel: int

    @property
    def num_conv(self) -> int:
        return 3 * self.heads * self.head_dim * (self.kernel - 1)

    @property
    def num_recurrent(self) -> int:
        return self.heads * self.head_dim * self.head_dim

    @property
    def conv_formula(self) -> str:
        return f"3 x {self.heads} heads x {self.head_dim} x {self.kernel - 1}"

    @property
    def recurrent_formula(self) -> str:
        return f"{self.heads} heads x {self.head_dim} x {self.head_dim}"

    def per_device(self, num_devices: int) -> "KimiDeltaState":
        return replace(self, heads=_divide("delta-attention heads", self.heads, num_devices))


@dataclass(frozen=True, slots=True)
class LightningState(StateCache):
    """Lightning attention, arXiv:2401.04658: one square matrix a head, no convolution."""

    name: ClassVar[str] = "lightning attention"
    heads: int
    head_dim: int

    @property
    def num_conv(self) -> int:
        return 0

    @property
    def num_recurrent(self) -> int:
        return self.heads * self.head_dim * self.head_dim

    @property
    def conv_formula(self) -> str:
        return "0"

    @property
    def recurrent_formula(self) -> str:
        return f"{self.heads} heads x {self.head_dim} x {self.head_dim}"

    def per_device(self, num_devices: int) -> "LightningState":
        return replace(self, heads=_divide("linear-attention heads", self.heads, num_devices))


@dataclass(frozen=True, slots=True)
class ShortConvState(StateCache):
    """A gated short convolution alone (LFM2): the last columns of the hidden state."""

    name: ClassVar[str] = "short convolution"
    channels: int
    kernel: int

    @property
    def num_conv(self) -> int:
        return self.channels * (self.kernel - 1)

    @property
    def num_recurrent(self) -> int:
        return 0

    @property
    def conv_formula(self) -> str:
        return f"{self.channels:,} channels x {self.kernel - 1}"

    @property
    def recurrent_formula(self) -> str:
        return "0"

    def per_device(self, num_devices: int) -> "ShortConvState":
        return replace(self, channels=_divide("convolution channels", self.channels, num_devices))


@dataclass(frozen=True, slots=True)
class RgLruState(StateCache):
    """Real-gated linear recurrent unit, arXiv:2402.19427: one value a channel beside its convolution."""

    name: ClassVar[str] = "RG-LRU"
    width: int
    kernel: int

    @property
    def num_conv(self) -> int:
        return self.width * (self.kernel - 1)

    @property
    def num_recurrent(self) -> int:
        return self.width

    @property
    def conv_formula(self) -> str:
        return f"{self.width:,} channels x {self.kernel - 1}"

    @property
    def recurrent_formula(self) -> str:
        return f"{self.width:,} channels"

    def per_device(self, num_devices: int) -> "RgLruState":
        return replace(self, width=_divide("recurrent channels", self.width, num_devices))


def _divide(what: str, count: int, num_devices: int) -> int:
    if count % num_devices:
        raise ConfigError(
            f"{count} {what} cannot be divided over {num_devices} devices",
            hint=f"choose a --tp that divides {count}",
            param="tp",
        )
    return count // num_devices
