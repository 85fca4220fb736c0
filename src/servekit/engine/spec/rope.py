"""RopeSpec: which rotary embedding a config.json asks for, in any of the spellings that have been in use.

It must not know tensors; `engine/layers/rope.py` turns a spec into frequencies.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from servekit.errors import ModelError

RopeType = Literal["default", "linear", "llama3", "yarn"]

_NUMBERS: dict[RopeType, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_YARN_OPTIONAL = ("attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim")


@dataclass(frozen=True, slots=True)
class RopeSpec:
    """A rotary embedding: base `theta`, scaling `kind` and the numbers that kind needs, by their config names."""

    theta: float
    kind: RopeType = "default"
    numbers: tuple[tuple[str, float], ...] = ()

    def number(self, name: str, default: float | None = None) -> float:
        """One of `numbers`; a KeyError here is a mistake of ours, since reading checks that they are there."""
        found = dict(self.numbers).get(name, default)
        if found is None:
            raise KeyError(name)
        return found


def read_rope(config: Mapping[str, Any], *, theta_default: float, layer_type: str | None = None) -> RopeSpec:
    """The rotary embedding of `config`, for one layer type where the config tells them apart.

    transformers 5 writes `rope_parameters` (perhaps nested by layer type); older files have `rope_theta` beside
    `rope_scaling`, with `rope_type` or `type`. Raises ModelError for an unknown type, a missing number, or two
    spellings that contradict each other.
    """
    old = config.get("rope_scaling") or {}
    new = config.get("rope_parameters") or {}
    if layer_type is not None and isinstance(new.get(layer_type), Mapping):
        new = new[layer_type]
    thetas = {float(source["rope_theta"]) for source in (config, new) if source.get("rope_theta") is not None}
    if len(thetas) > 1:
        raise ModelError(f"config.json: rope_theta is given twice with different values: {sorted(thetas)}")
    if any(source.get("partial_rotary_factor", 1.0) != 1.0 for source in (config, new)):
        raise ModelError("config.json: partial_rotary_factor is not offered by servekit")
    theta = thetas.pop() if thetas else theta_default
    context = {"original_max_position_embeddings": config.get("max_position_embeddings")}
    spec = _read_scaling({**context, **(new or old)}, theta)
    if old and new and _read_scaling({**context, **old}, theta) != spec:
        raise ModelError("config.json: rope_scaling and rope_parameters contradict each other")
    return spec


def _read_scaling(scaling: Mapping[str, Any], theta: float) -> RopeSpec:
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    if kind not in _NUMBERS:
        raise ModelError(
            f"config.json: rope type {kind!r} is not known", hint=f"servekit knows {', '.join(sorted(_NUMBERS))}"
        )
    missing = [name for name in _NUMBERS[kind] if not isinstance(scaling.get(name), int | float)]
    if missing:
        raise ModelError(f"config.json: rope type {kind!r} needs {', '.join(missing)}")
    names = _NUMBERS[kind] + (_YARN_OPTIONAL if kind == "yarn" else ())
    numbers = tuple((name, float(scaling[name])) for name in sorted(names) if scaling.get(name) is not None)
    return RopeSpec(theta, kind, numbers)
