"""How many bytes a model's weights take, from the best source at hand. It must not know KV or capacity.

Stored sizes win over computed ones, unless another dtype is asked for. A model whose file does not say enough has
unknown weights and a reason, never a guess.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from servekit.kvcalc.attention_fields import HIDDEN
from servekit.kvcalc.checkpoint import StoredWeights
from servekit.kvcalc.fields import Fields, MissingFieldError
from servekit.kvcalc.model_shape import ModelShape
from servekit.kvcalc.parameters import Parameters, count_parameters
from servekit.kvcalc.weight_formats import UnknownFormatError, declared, uniform


@dataclass(frozen=True, slots=True)
class Weights:
    """`num_bytes` and `num_parameters` are None when unknown; `source` says where they come from, or why not.

    `dtype` is None where the stored tensors decide. `part_bytes` splits the bytes by part of the model when the
    parameters could be counted.
    """

    num_bytes: int | None
    num_parameters: int | None
    active_parameters: int | None
    source: str
    dtype: str | None = None
    part_bytes: Mapping[str, int] = field(default_factory=dict)
    counted: Parameters | None = None


def weigh(shape: ModelShape, *, stored: StoredWeights | None = None, weights_dtype: str | None = None) -> Weights:
    """The weights of a model: `stored` sizes if given, else computed from its config.json.

    Raises ConfigError for an unknown `weights_dtype` or a field with an absurd value.
    """
    try:
        counted = count_parameters(shape)
    except MissingFieldError as error:
        if stored is not None and weights_dtype is None:
            return Weights(stored.num_bytes, stored.num_parameters, None, stored.source)
        return Weights(None, None, None, f"unknown: {error.message}")
    text = Fields(shape.text)
    if weights_dtype is not None:
        form = uniform(weights_dtype, shape.dtype, counted.parts)
    else:
        levels, hidden = (text, Fields(shape.root)), text.integer(*HIDDEN)
        try:
            form = declared(levels, shape.dtype, counted.parts, hidden=hidden, num_layers=len(shape.layers))
        except UnknownFormatError as error:
            if stored is not None:
                return Weights(stored.num_bytes, counted.total, counted.active, stored.source)
            return Weights(None, counted.total, counted.active, f"unknown: {error.message}", counted=counted)
    parts = {part: int(count * form.bits(part) / 8) for part, count in counted.parts.items()}
    if stored is None or weights_dtype is not None:
        how = "computed from config.json" if counted.is_exact else "estimated from config.json"
        return Weights(sum(parts.values()), counted.total, counted.active, how, form.name, parts, counted)
    scale = Fraction(stored.num_bytes, max(1, sum(parts.values())))
    parts = {part: int(size * scale) for part, size in parts.items()}
    total = stored.num_parameters or counted.total
    return Weights(stored.num_bytes, total, counted.active, stored.source, None, parts, counted)
