"""Which layer is of which kind: one function for each way a config.json says it. It must not know sizes.

A pattern takes the text config and the number of layers and gives one Kind a layer. `layer_types`, where a config has
it, wins over every older spelling.
"""

from collections.abc import Callable
from typing import Final

from servekit.kvcalc.fields import Fields, describe
from servekit.kvcalc.kinds import LAYER_TYPES, Kind

Pattern = Callable[[Fields, int], list[Kind]]

_LAYER_LISTS: Final = ("layer_types", "layers_block_type")


def read_kinds(fields: Fields, num_layers: int, pattern: Pattern) -> list[Kind]:
    """One Kind a layer, from the list of layer types when there is one, else by the family's pattern."""
    for name in _LAYER_LISTS:
        names = fields.texts(name)
        if names is None:
            continue
        fields.per_layer(name, names, num_layers)
        unknown = next((item for item in names if item not in LAYER_TYPES), None)
        if unknown is not None:
            raise fields.error(
                name,
                f"holds the unknown layer type {describe(unknown)}",
                hint="known are " + ", ".join(LAYER_TYPES),
            )
        return [LAYER_TYPES[item] for item in names]
    return pattern(fields, num_layers)


def every(kind: Kind) -> Pattern:
    """All layers are alike."""
    return lambda fields, num_layers: [kind] * num_layers


def sliding_if_window(fields: Fields, num_layers: int) -> list[Kind]:
    """Mistral: one window on all layers; null means full attention."""
    return [Kind.SLIDING if fields.has("sliding_window") else Kind.FULL] * num_layers


def qwen_switch(fields: Fields, num_layers: int) -> list[Kind]:
    """Qwen2 and Qwen3: full unless `use_sliding_window`; then the layers from `max_window_layers` on slide."""
    if not _switched_on(fields):
        return [Kind.FULL] * num_layers
    first = fields.integer("max_window_layers", low=0)
    return [Kind.SLIDING if index >= first else Kind.FULL for index in range(num_layers)]


def qwen2_moe_switch(fields: Fields, num_layers: int) -> list[Kind]:
    """Qwen2-MoE: with `use_sliding_window` the even layers below `max_window_layers` slide."""
    if not _switched_on(fields):
        return [Kind.FULL] * num_layers
    end = fields.integer("max_window_layers", low=0)
    return [Kind.SLIDING if index % 2 == 0 and index < end else Kind.FULL for index in range(num_layers)]


def even_slides(fields: Fields, num_layers: int) -> list[Kind]:
    """Gemma 2 and gpt-oss: even layers slide, odd ones are full."""
    return [Kind.FULL if index % 2 else Kind.SLIDING for index in range(num_layers)]


def nth_full(default: int, *names: str) -> Pattern:
    """Gemma 3, Cohere 2, OLMo 3: the last of every N layers is full, the others slide; N from `names` or default."""

    def pattern(fields: Fields, num_layers: int) -> list[Kind]:
        period = _period(fields, default, names)
        return [Kind.SLIDING if (index + 1) % period else Kind.FULL for index in range(num_layers)]

    return pattern


def first_of_four_full(fields: Fields, num_layers: int) -> list[Kind]:
    """Granite SWA: layers 0, 4, 8 ... are full, the others slide."""
    return [Kind.SLIDING if index % 4 else Kind.FULL for index in range(num_layers)]


def exaone4(fields: Fields, num_layers: int) -> list[Kind]:
    """EXAONE 4: a string such as "LLLG" or an integer period; the last layer is always full; no window, no pattern."""
    if not fields.has("sliding_window"):
        return [Kind.FULL] * num_layers
    value = fields.values.get("sliding_window_pattern")
    if isinstance(value, str):
        if not value or set(value) - set("LG"):
            raise fields.error("sliding_window_pattern", f"must be made of L and G, not {describe(value)}")
        kinds = [Kind.FULL if value[index % len(value)] == "G" else Kind.SLIDING for index in range(num_layers)]
    else:
        kinds = nth_full(4, "sliding_window_pattern")(fields, num_layers)
    return [*kinds[:-1], Kind.FULL]


def mimo_v2(fields: Fields, num_layers: int) -> list[Kind]:
    """MiMo-V2: `hybrid_layer_pattern` holds 1 for a sliding layer and 0 for a full one."""
    pattern = fields.ints("hybrid_layer_pattern", high=1)
    if pattern is None:
        raise fields.error("hybrid_layer_pattern", "is missing (or layer_types)")
    fields.per_layer("hybrid_layer_pattern", pattern, num_layers)
    return [Kind.SLIDING if item else Kind.FULL for item in pattern]


def inkling(fields: Fields, num_layers: int) -> list[Kind]:
    """Inkling: `local_layer_ids` slide, by default all but every sixth; every layer also has short convolutions."""
    local = fields.ints("local_layer_ids", high=num_layers - 1)
    if local is None:
        fields.note("local_layer_ids is absent: every sixth layer is full, the class default")
        local = [index for index in range(num_layers) if (index + 1) % 6]
    chosen = set(local)
    return [Kind.BOTH_SLIDING if index in chosen else Kind.BOTH for index in range(num_layers)]


def llama4(fields: Fields, num_layers: int) -> list[Kind]:
    """Llama 4: rope layers are chunked, the others full; `no_rope_layers` holds 0 for a layer without rope."""
    if "attention_chunk_size" in fields.values and not fields.has("attention_chunk_size"):
        return [Kind.FULL] * num_layers
    rope = fields.ints("no_rope_layers", high=1)
    if not rope:
        period = _period(fields, 4, ("no_rope_layer_interval",))
        rope = [int((index + 1) % period != 0) for index in range(num_layers)]
    fields.per_layer("no_rope_layers", rope, num_layers)
    return [Kind.CHUNKED if item else Kind.FULL for item in rope]


def nth_attention(fields: Fields, num_layers: int) -> list[Kind]:
    """Qwen3-Next: the last of every `full_attention_interval` layers attends, the others keep a state."""
    period = _period(fields, 4, ("full_attention_interval",))
    return [Kind.STATE if (index + 1) % period else Kind.FULL for index in range(num_layers)]


def kimi_linear(fields: Fields, num_layers: int) -> list[Kind]:
    """Kimi Linear: `linear_attn_config` lists both kinds, counted from 1."""
    lists = fields.sub("linear_attn_config")
    if lists is None:
        raise fields.error("linear_attn_config", "is missing (or layer_types)")
    kinds: dict[int, Kind] = {}
    for name, kind in (("full_attn_layers", Kind.FULL), ("kda_layers", Kind.STATE)):
        members = lists.ints(name, low=1, high=num_layers)
        if members is None:
            raise lists.error(name, "is missing")
        for member in members:
            if member in kinds:
                raise lists.error(name, f"names layer {member} a second time")
            kinds[member] = kind
    missing = next((index for index in range(1, num_layers + 1) if index not in kinds), None)
    if missing is not None:
        raise lists.error("full_attn_layers", f"and kda_layers leave out layer {missing}")
    return [kinds[index] for index in range(1, num_layers + 1)]


def jamba(fields: Fields, num_layers: int) -> list[Kind]:
    """Jamba: layer i attends when i % `attn_layer_period` == `attn_layer_offset`."""
    period = fields.integer("attn_layer_period")
    offset = fields.integer("attn_layer_offset", low=0, high=period - 1)
    return [Kind.FULL if index % period == offset else Kind.STATE for index in range(num_layers)]


def listed_attention(*names: str) -> Pattern:
    """Bamba, LFM2, PLaMo 2: the layers of a list attend, the others keep a state."""

    def pattern(fields: Fields, num_layers: int) -> list[Kind]:
        for name in names:
            chosen = fields.ints(name, high=num_layers - 1)
            if chosen is not None:
                return [Kind.FULL if index in set(chosen) else Kind.STATE for index in range(num_layers)]
        raise fields.error(names[0], "is missing (or layer_types)")

    return pattern


def plamo2(fields: Fields, num_layers: int) -> list[Kind]:
    """PLaMo 2: the middle layer of every `mamba_step` attends; with few layers, the last one does."""
    if not fields.flag("mamba_enabled", default=True):
        return [Kind.FULL] * num_layers
    step = _period(fields, 2, ("mamba_step",))
    if num_layers <= step // 2:
        return [Kind.FULL if index == num_layers - 1 else Kind.STATE for index in range(num_layers)]
    return [Kind.FULL if index % step == step // 2 else Kind.STATE for index in range(num_layers)]


def zamba(fields: Fields, num_layers: int) -> list[Kind]:
    """Zamba: the shared attention block runs before the listed Mamba layers, each with its own keys and values."""
    chosen = fields.ints("hybrid_layer_ids", high=num_layers - 1)
    if chosen is None:
        raise fields.error("layers_block_type", "is missing (or hybrid_layer_ids)")
    return [Kind.BOTH if index in set(chosen) else Kind.STATE for index in range(num_layers)]


def nemotron_h(fields: Fields, num_layers: int) -> list[Kind]:
    """Nemotron-H: one letter a layer, M state, * attention, - MLP, E experts."""
    letters = {"M": Kind.STATE, "*": Kind.FULL, "-": Kind.NONE, "E": Kind.NONE}
    pattern = fields.text("hybrid_override_pattern")
    if pattern is None:
        raise fields.error("hybrid_override_pattern", "is missing (or layers_block_type)")
    fields.per_layer("hybrid_override_pattern", pattern, num_layers)
    unknown = next((letter for letter in pattern if letter not in letters), None)
    if unknown is not None:
        raise fields.error("hybrid_override_pattern", f"holds the unknown letter {describe(unknown)}")
    return [letters[letter] for letter in pattern]


def recurrent_gemma(fields: Fields, num_layers: int) -> list[Kind]:
    """RecurrentGemma: `block_types` repeats over the layers; its attention is windowed."""
    cycle = fields.texts("block_types")
    if cycle is None:
        fields.note("block_types is absent: recurrent, recurrent, attention, the class default")
        cycle = ["recurrent", "recurrent", "attention"]
    kinds = {"recurrent": Kind.STATE, "attention": Kind.SLIDING}
    unknown = next((item for item in cycle if item not in kinds), None)
    if unknown is not None or not cycle:
        raise fields.error("block_types", f"holds the unknown block type {describe(unknown)}")
    return [kinds[cycle[index % len(cycle)]] for index in range(num_layers)]


def minimax_text(fields: Fields, num_layers: int) -> list[Kind]:
    """MiniMax-01: `attn_type_list` holds 1 for attention and 0 for lightning; else even layers attend."""
    types = fields.ints("attn_type_list", high=1)
    if types is None:
        return [Kind.STATE if index % 2 else Kind.FULL for index in range(num_layers)]
    fields.per_layer("attn_type_list", types, num_layers)
    return [Kind.FULL if item else Kind.STATE for item in types]


def deepseek_v4(fields: Fields, num_layers: int) -> list[Kind]:
    """DeepSeek-V4: `compress_ratios`, 0 window only, 4 sparse, 128 heavy; what exceeds the layers is the MTP tail."""
    ratios = fields.ints("compress_ratios")
    if ratios is None:
        raise fields.error("compress_ratios", "is missing (or layer_types)")
    if len(ratios) < num_layers:
        raise fields.error("compress_ratios", f"has {len(ratios)} entries for {num_layers} layers")
    kinds = {0: Kind.SLIDING, 4: Kind.COMPRESSED_SPARSE, 128: Kind.COMPRESSED_HEAVY}
    unknown = next((ratio for ratio in ratios if ratio not in kinds), None)
    if unknown is not None:
        raise fields.error("compress_ratios", f"holds the unknown ratio {unknown} (known are 0, 4 and 128)")
    return [kinds[ratio] for ratio in ratios[:num_layers]]


def mllama(fields: Fields, num_layers: int) -> list[Kind]:
    """Llama 3.2 Vision: the listed layers attend to the image only."""
    cross = fields.ints("cross_attention_layers", high=num_layers - 1)
    if cross is None:
        raise fields.error("cross_attention_layers", "is missing")
    return [Kind.CROSS if index in set(cross) else Kind.FULL for index in range(num_layers)]


def gpt_neo(fields: Fields, num_layers: int) -> list[Kind]:
    """GPT-Neo: `attention_layers` names each layer global or local."""
    names = fields.texts("attention_layers")
    if names is None:
        raise fields.error("attention_layers", "is missing")
    fields.per_layer("attention_layers", names, num_layers)
    kinds = {"global": Kind.FULL, "local": Kind.SLIDING}
    unknown = next((item for item in names if item not in kinds), None)
    if unknown is not None:
        raise fields.error("attention_layers", f"holds the unknown layer type {describe(unknown)}")
    return [kinds[name] for name in names]


def _switched_on(fields: Fields) -> bool:
    return fields.flag("use_sliding_window", default=False) and fields.has("sliding_window")


def _period(fields: Fields, default: int, names: tuple[str, ...]) -> int:
    period = fields.optional_integer(*names) if names else None
    if period is None:
        if names:
            fields.note(f"{fields.prefix}{names[0]} is absent: {default}, the class default")
        return default
    return period
