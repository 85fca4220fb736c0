"""Reads a mixture of experts: how many, how wide, on which layers, and how many a token uses."""

from dataclasses import dataclass
from typing import Final

from servekit.kvcalc.fields import Fields, MissingFieldError

_ROUTED: Final = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_ACTIVE: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "moe_topk",
    "top_k_experts",
    "moe_k",
)
_DENSE_FIRST: Final = ("first_k_dense_replace", "num_dense_layers")


@dataclass(frozen=True, slots=True)
class Experts:
    """`num_routed` experts of `width`, of which a token uses `num_active`; `sparse` tells the layers that have them.

    `matrices` is 3 for gated experts. `inner` is the size the experts work in when that is not the hidden size.
    `dense_width` is the MLP width of the other layers, None when the usual field holds it.
    """

    num_routed: int
    num_active: int
    width: int
    shared_width: int
    sparse: tuple[bool, ...]
    matrices: int = 3
    inner: int | None = None
    dense_width: int | None = None
    has_bias: bool = False
    has_correction: bool = False
    has_shared_gate: bool = False

    def is_sparse(self, index: int) -> bool:
        """Whether layer `index` has experts instead of one MLP."""
        return self.sparse[index]

    def layer_parameters(self, hidden: int) -> dict[str, int]:
        """Parameters of one sparse layer's MLP by part."""
        inner = self.inner or hidden
        expert = self.matrices * inner * self.width
        if self.has_bias:
            expert += (self.matrices - 1) * self.width + inner
        router = hidden * self.num_routed + (self.num_routed if self.has_bias or self.has_correction else 0)
        shared = self.matrices * hidden * self.shared_width + (hidden if self.has_shared_gate else 0)
        adapters = 2 * hidden * inner if self.inner else 0
        return {"experts": self.num_routed * expert, "router": router, "shared_experts": shared + adapters}


def read_experts(fields: Fields, model_type: str, num_layers: int) -> Experts | None:
    """The experts of a text config, or None for a dense model."""
    routed = fields.optional_integer(*_ROUTED, low=0) or 0
    active = fields.optional_integer(*_ACTIVE, low=0) or 0
    if routed == 0 and active > 0:
        raise MissingFieldError(f"config.json field {fields.name_of(*_ROUTED)} is missing")
    if routed <= 1:
        return None
    active = fields.integer(*_ACTIVE, high=routed)
    if isinstance(fields.values.get("moe_intermediate_size"), list):
        name = f"{fields.prefix}moe_intermediate_size"
        raise MissingFieldError(f"config.json field {name} has one size for each modality, which is not counted")
    width = fields.optional_integer("moe_intermediate_size", "expert_ffn_hidden_size")
    width = width if width is not None else fields.integer("intermediate_size")
    if model_type == "llama4":
        width = fields.integer("intermediate_size")
    return Experts(
        num_routed=routed,
        num_active=active,
        width=width,
        shared_width=_shared_width(fields, model_type, width),
        sparse=_sparse_layers(fields, model_type, num_layers),
        matrices=2 if model_type == "nemotron_h" else 3,
        inner=fields.optional_integer("routed_expert_hidden_size", "moe_latent_size"),
        dense_width=fields.optional_integer("intermediate_size_mlp", "dense_intermediate_size"),
        has_bias=model_type == "gpt_oss",
        has_correction=fields.text("topk_method") == "noaux_tc" or fields.flag("use_routing_bias", default=False),
        has_shared_gate=model_type in ("qwen2_moe", "qwen3_next", "qwen3_5_moe"),
    )


def _shared_width(fields: Fields, model_type: str, width: int) -> int:
    total = fields.optional_integer("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", low=0)
    if total is None and model_type.startswith("granite"):
        total = fields.optional_integer("shared_intermediate_size", low=0)
    number = fields.optional_integer(
        "n_shared_experts", "num_shared_experts", "num_shared_expert", "moe_num_shared_experts", low=0
    )
    if total is not None:
        return total * (number or 1) if model_type == "nemotron_h" else total
    if number is None and model_type == "llama4":
        number = 1
    return width * (number or 0)


def _sparse_layers(fields: Fields, model_type: str, num_layers: int) -> tuple[bool, ...]:
    pattern = fields.text("hybrid_override_pattern")
    if pattern is not None:
        return tuple(letter == "E" for letter in pattern)
    frequency = fields.values.get("moe_layer_freq")
    if isinstance(frequency, list):
        chosen = fields.ints("moe_layer_freq", high=1) or []
        fields.per_layer("moe_layer_freq", chosen, num_layers)
        return tuple(bool(item) for item in chosen)
    types = fields.texts("mlp_layer_types")
    if types is not None:
        fields.per_layer("mlp_layer_types", types, num_layers)
        return tuple(item != "dense" for item in types)
    dense_first = fields.optional_integer(*_DENSE_FIRST, low=0) or 0
    if model_type == "llama4":
        step = fields.optional_integer("interleave_moe_layer_step") or 1
        return tuple((index + 1) % step == 0 for index in range(num_layers))
    if model_type == "jamba":
        period = fields.integer("expert_layer_period")
        offset = fields.integer("expert_layer_offset", low=0)
        return tuple(index % period == offset for index in range(num_layers))
    step = fields.optional_integer("decoder_sparse_step", "moe_layer_freq") or 1
    dense = set(fields.ints("mlp_only_layers") or [])
    if fields.has("decoder_sparse_step"):
        return tuple(index not in dense and (index + 1) % step == 0 for index in range(num_layers))
    return tuple(index >= dense_first and index % step == 0 and index not in dense for index in range(num_layers))
