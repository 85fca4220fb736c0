"""Parameter counts of one layer's mixer: attention of every kind, or a recurrent block. It must not know MLPs."""

from servekit.kvcalc.attention_fields import HIDDEN, QUERY_HEADS
from servekit.kvcalc.caches import AttentionCache, IndexerCache
from servekit.kvcalc.fields import Fields
from servekit.kvcalc.parameter_styles import Style
from servekit.kvcalc.states import (
    DeltaNetState,
    KimiDeltaState,
    LightningState,
    Mamba1State,
    Mamba2State,
    RgLruState,
    ShortConvState,
    StateCache,
)


def attention_parameters(fields: Fields, style: Style, cache: AttentionCache, indexer: IndexerCache | None) -> int:
    """Projections, their biases, head norms, sinks and the indexer of one attention layer."""
    hidden, query = fields.integer(*HIDDEN), fields.integer(*QUERY_HEADS)
    count = _latent(fields, hidden, query) if cache.is_latent else _grouped(fields, style, cache, hidden, query)
    if indexer is not None and indexer.is_scaled_fp8:
        heads, rank = fields.integer("index_n_heads"), fields.optional_integer("q_lora_rank") or hidden
        count += rank * heads * indexer.dim + hidden * (indexer.dim + heads) + 2 * indexer.dim
    return count


def recurrent_parameters(fields: Fields, style: Style, state: StateCache) -> int:
    """All parameters of one recurrent block, its projections and convolution included."""
    hidden = fields.integer(*HIDDEN)
    match state:
        case Mamba1State():
            return _mamba1(fields, state, hidden)
        case Mamba2State():
            return _mamba2(fields, state, hidden)
        case DeltaNetState():
            keys, values = state.key_heads * state.key_dim, state.value_heads * state.value_dim
            projections = hidden * (2 * keys + 2 * values + 2 * state.value_heads) + values * hidden
            return projections + (2 * keys + values) * state.kernel + 2 * state.value_heads + state.value_dim
        case KimiDeltaState():
            return _kimi_delta(fields, state, hidden)
        case LightningState():
            inner = state.heads * state.head_dim
            return hidden * 3 * inner + hidden * inner + inner * hidden + inner
        case ShortConvState():
            bias = fields.flag("conv_bias", default=False)
            return hidden * 4 * hidden + hidden * state.kernel + (5 * hidden if bias else 0)
        case RgLruState():
            blocks = fields.integer(*QUERY_HEADS)
            gates = 2 * (state.width * state.width // blocks + state.width) + state.width
            return 3 * hidden * state.width + 2 * state.width + hidden + state.width * (state.kernel + 1) + gates
    raise AssertionError(f"no parameter count for {state.name}")


def _grouped(fields: Fields, style: Style, cache: AttentionCache, hidden: int, query: int) -> int:
    value_dim = cache.value_dim or cache.key_dim
    queries, outputs = query * cache.key_dim, query * value_dim
    keys, values = cache.num_kv_heads * cache.key_dim, cache.num_kv_heads * cache.value_dim
    count = hidden * (queries + keys + values) + outputs * hidden
    if style.output_gate and fields.flag("attn_output_gate", default=True):
        count += hidden * queries
    flagged = fields.flag(style.bias_flag, default=False)
    if style.qkv_bias or flagged:
        count += queries + keys + values
    if style.out_bias or flagged:
        count += hidden
    if style.qk_norm == "head":
        count += 2 * cache.key_dim
    elif style.qk_norm == "full":
        count += queries + keys
    return count + (query if style.sinks else 0)


def _latent(fields: Fields, hidden: int, query: int) -> int:
    rank, rope = fields.integer("kv_lora_rank"), fields.integer("qk_rope_head_dim", low=0)
    nope, value = fields.integer("qk_nope_head_dim"), fields.integer("v_head_dim")
    q_rank = fields.optional_integer("q_lora_rank")
    queries = query * (nope + rope)
    count = hidden * queries if q_rank is None else hidden * q_rank + q_rank + q_rank * queries
    count += hidden * (rank + rope) + rank + rank * query * (nope + value)
    if fields.flag("mla_use_output_gate", default=False):
        count += hidden * query * value
    return count + query * value * hidden


def _mamba1(fields: Fields, state: Mamba1State, hidden: int) -> int:
    inner = state.inner
    rank = fields.optional_integer("time_step_rank", "mamba_dt_rank") if _is_number(fields) else None
    rank = rank or -(-hidden // 16)
    conv_bias = fields.flag("use_conv_bias", default=True) and fields.flag("mamba_conv_bias", default=True)
    projections = hidden * 2 * inner + inner * (rank + 2 * state.state_size) + rank * inner + inner * hidden
    if fields.flag("use_bias", default=False) or fields.flag("mamba_proj_bias", default=False):
        projections += 2 * inner + hidden
    return projections + inner + inner * (state.kernel + conv_bias) + inner * state.state_size + inner


def _is_number(fields: Fields) -> bool:
    return all(fields.values.get(name) != "auto" for name in ("time_step_rank", "mamba_dt_rank"))


def _mamba2(fields: Fields, state: Mamba2State, hidden: int) -> int:
    inner = state.heads * state.head_dim
    channels = inner + 2 * state.num_groups * state.state_size
    conv_bias = fields.flag("use_conv_bias", default=True) and fields.flag("mamba_conv_bias", default=True)
    projections = hidden * (inner + channels + state.heads) + inner * hidden
    if fields.flag("mamba_proj_bias", default=False) or fields.flag("use_bias", default=False):
        projections += inner + channels + state.heads + hidden
    norm = inner if fields.flag("mamba_rms_norm", default=True) else 0
    return projections + channels * (state.kernel + conv_bias) + 3 * state.heads + norm


def _kimi_delta(fields: Fields, state: KimiDeltaState, hidden: int) -> int:
    inner, dim = state.heads * state.head_dim, state.head_dim
    nested = fields.sub("linear_attn_config")
    full_rank = nested is not None and nested.flag("use_full_rank_gate", default=False)
    gate = hidden * inner if full_rank else hidden * dim + dim * inner
    forget = hidden * dim + dim * inner
    small = state.heads + inner + dim
    return 3 * hidden * inner + 3 * inner * state.kernel + forget + gate + hidden * state.heads + small + inner * hidden
