"""Counts a model's parameters from its config.json, by part, when no checkpoint is at hand. It must not know bytes.

The parts are those that quantisation treats apart: routed experts, shared experts, router, attention, recurrent blocks,
MLPs, embedding, head and the small rest. Exact for the families of `STYLES`; a gated decoder without biases is taken
for the others, and `is_exact` says so.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from fractions import Fraction

from servekit.kvcalc.attention_fields import HIDDEN
from servekit.kvcalc.caches import AttentionCache, IndexerCache, Layer
from servekit.kvcalc.encoder_parameters import count_bert, count_encoder_decoder, count_vision
from servekit.kvcalc.experts import Experts, read_experts
from servekit.kvcalc.fields import Fields
from servekit.kvcalc.kinds import Kind
from servekit.kvcalc.mixer_parameters import attention_parameters, recurrent_parameters
from servekit.kvcalc.model_shape import ModelShape
from servekit.kvcalc.parameter_styles import BERT_TYPES, CROSSING_TYPES, STYLES, Style

_FFN = ("intermediate_size", "ffn_hidden_size", "n_inner", "ffn_dim", "d_ff")
_VOCAB = ("vocab_size", "padded_vocab_size")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameter counts by part; `active` is what one token touches; `is_exact` is false for an estimate."""

    parts: Mapping[str, int]
    active: int
    is_exact: bool
    experts: Experts | None = None

    @property
    def total(self) -> int:
        """All parameters, each once."""
        return sum(self.parts.values())


@dataclass(slots=True)
class _Counter:
    parts: dict[str, int] = field(default_factory=dict)

    def add(self, part: str, count: int) -> None:
        self.parts[part] = self.parts.get(part, 0) + count


def count_parameters(shape: ModelShape) -> Parameters:
    """Counts the text model and estimates a vision tower. Raises MissingFieldError when a size is not in the file."""
    fields = Fields(shape.text)
    style = STYLES.get(shape.model_type)
    counter = _Counter()
    experts = None
    if shape.model_type in CROSSING_TYPES:
        counter.parts.update(count_encoder_decoder(fields, shape.model_type))
    elif shape.model_type in BERT_TYPES:
        counter.parts.update(count_bert(fields))
    else:
        experts = _count_decoder(counter, fields, shape, style or Style())
    vision = count_vision(Fields(shape.root))
    if vision:
        counter.add("vision", vision)
    routed = counter.parts.get("experts", 0)
    share = Fraction(experts.num_active, experts.num_routed) if experts else Fraction(1)
    total = sum(counter.parts.values())
    is_exact = not vision and (style is not None or shape.model_type in BERT_TYPES | CROSSING_TYPES)
    return Parameters(counter.parts, total - routed + int(routed * share), is_exact, experts)


def _count_decoder(counter: _Counter, fields: Fields, shape: ModelShape, style: Style) -> Experts | None:
    hidden = fields.integer(*HIDDEN)
    embedding = fields.integer(*_VOCAB) * hidden
    counter.add("embedding", embedding)
    if style.learned_positions:
        counter.add("embedding", (fields.integer(*style.learned_positions) + style.position_offset) * hidden)
    outer = Fields(shape.root).flag("tie_word_embeddings", default=style.tied)
    if not fields.flag("tie_word_embeddings", default=outer):
        counter.add("lm_head", embedding)
    norm = hidden * (2 if style.norm_bias else 1) * (0 if style.bare_norms else 1)
    counter.add("norms", norm * (1 + style.extra_norms))
    experts = read_experts(fields, shape.model_type, len(shape.layers))
    for index, layer in enumerate(shape.layers):
        _count_layer(counter, fields, shape, style, index, layer, experts)
        counter.add("norms", norm * style.norms_per_layer)
    return experts


def _count_layer(
    counter: _Counter,
    fields: Fields,
    shape: ModelShape,
    style: Style,
    index: int,
    layer: Layer,
    experts: Experts | None,
) -> None:
    cache = next((found for found in layer.token_caches if isinstance(found, AttentionCache)), None)
    if cache is None and layer.kind is Kind.NONE and not style.single_mixer and not fields.has("block_configs"):
        cache = _borrowed(shape, index)
    indexer = next((found for found in layer.token_caches if isinstance(found, IndexerCache)), None)
    if cache is not None:
        counter.add("attention", attention_parameters(fields, style, cache, indexer))
    if layer.state is not None:
        counter.add("recurrent", recurrent_parameters(fields, style, layer.state))
    if style.single_mixer and layer.kind is not Kind.NONE:
        return
    if experts is not None and experts.is_sparse(index):
        for part, count in experts.layer_parameters(fields.integer(*HIDDEN)).items():
            counter.add(part, count)
    else:
        counter.add("mlp", _mlp(fields, style, index, len(shape.layers), experts))


def _borrowed(shape: ModelShape, index: int) -> AttentionCache | None:
    """A layer that shares an earlier layer's keys still has projections of its own."""
    for layer in reversed(shape.layers[:index]):
        for cache in layer.token_caches:
            if isinstance(cache, AttentionCache):
                return cache
    return None


def _mlp(fields: Fields, style: Style, index: int, num_layers: int, experts: Experts | None) -> int:
    hidden = fields.integer(*HIDDEN)
    if fields.has("block_configs"):
        return _nas_mlp(fields, hidden, index)
    width = experts.dense_width if experts is not None else None
    if width is None and isinstance(fields.values.get("intermediate_size"), list):
        widths = fields.ints("intermediate_size", low=1) or []
        fields.per_layer("intermediate_size", widths, num_layers)
        width = widths[index]
    if width is None:
        width = fields.optional_integer(*_FFN)
    if width is None and style.ffn_factor:
        width = style.ffn_factor * hidden
    if width is None:
        width = fields.integer(*_FFN)
    if style.ffn_is_doubled:
        width //= 2
    if style.adjusts_ffn and fields.flag("block_auto_adjust_ff_dim", default=False):
        width = _lfm2_width(fields, width)
    matrices = 3 if style.gated else 2
    biases = (width * (matrices - 1) + hidden) if style.mlp_bias or fields.flag("mlp_bias", default=False) else 0
    return matrices * hidden * width + biases


def _nas_mlp(fields: Fields, hidden: int, index: int) -> int:
    """Nemotron-NAS: each block has its own multiple of the hidden size, rounded up to 256; or none, or one matrix."""
    block = Fields({"block": fields.values["block_configs"][index]}, prefix=f"block_configs[{index}].")
    ffn = (block.sub("block") or block).sub("ffn")
    if ffn is None or ffn.flag("no_op", default=False):
        return 0
    if ffn.flag("replace_with_linear", default=False):
        return hidden * hidden
    multiple = ffn.values.get("ffn_mult")
    if isinstance(multiple, bool) or not isinstance(multiple, int | float) or not 0 < multiple < 1000:
        raise ffn.error("ffn_mult", "must be a positive number")
    width = int(2 * multiple * hidden / 3)
    return 3 * hidden * (-(-width // 256) * 256)


def _lfm2_width(fields: Fields, width: int) -> int:
    multiple = fields.values.get("block_ffn_dim_multiplier")
    width = int(2 * width / 3)
    if isinstance(multiple, int | float) and not isinstance(multiple, bool):
        width = int(multiple * width)
    unit = fields.optional_integer("block_multiple_of") or 256
    return -(-width // unit) * unit
