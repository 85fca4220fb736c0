"""Typed reads from a config.json. It must not know what a field means to a family."""

from collections.abc import Mapping
from typing import Any

from servekit.engine.spec.activation import Activation
from servekit.errors import ModelError

_ACTIVATIONS: dict[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu": "relu",
}


class Fields:
    """Typed reads from a config.json; every refusal names the field."""

    def __init__(self, config: Mapping[str, Any]) -> None:
        self.config = config

    def integer(self, name: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ModelError(f"config.json: {name} must be a positive whole number, not {value!r}")
        return value

    def number(self, name: str, default: float) -> float:
        """A number."""
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be a number, not {value!r}")
        return float(value)

    def optional_number(self, name: str) -> float | None:
        """A number, or None where the file has none or null."""
        return None if self.config.get(name) is None else self.number(name, 0.0)

    def flag(self, name: str, default: bool) -> bool:
        """A switch."""
        value = self.config.get(name)
        value = default if value is None else value
        if not isinstance(value, bool):
            raise ModelError(f"config.json: {name} must be true or false, not {value!r}")
        return value

    def activation(self, *names: str, default: str) -> Activation:
        """The MLP's activation under the first of `names` that is there."""
        value = next((self.config[name] for name in names if self.config.get(name) is not None), default)
        if value not in _ACTIVATIONS:
            raise ModelError(f"config.json: {names[0]} {value!r} is not known")
        return _ACTIVATIONS[value]

    def layer_types(self) -> list[str] | None:
        """The list `layer_types`, one a layer, or None."""
        types = self.config.get("layer_types")
        if types is None:
            return None
        num_layers = self.integer("num_hidden_layers")
        known = {"full_attention", "sliding_attention"}
        if not isinstance(types, list) or len(types) != num_layers or not set(types) <= known:
            raise ModelError(
                f"config.json: layer_types must list {num_layers} of {', '.join(sorted(known))}, not {types!r}"
            )
        return types

    def refuse(self, name: str, allowed: object) -> None:
        """Raise unless the field is absent or `allowed`: a feature of the family that is not offered."""
        value = self.config.get(name)
        if value is not None and value != allowed:
            raise ModelError(f"config.json: {name} {value!r} is not offered by servekit")
