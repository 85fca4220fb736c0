"""Reads recurrent-state sizes from a config.json, one reader an architecture. It must not know layer patterns."""

from collections.abc import Callable
from typing import Final

from servekit.kvcalc.attention_fields import HIDDEN, QUERY_HEADS, read_head_dim
from servekit.kvcalc.fields import Fields, describe
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

StateReader = Callable[[Fields], StateCache]

_KERNEL: Final = ("mamba_d_conv", "conv_kernel", "d_conv")
_STATE: Final = ("mamba_d_state", "state_size", "ssm_state_size", "d_state")
_EXPAND: Final = ("mamba_expand", "expand")


def mamba1(fields: Fields) -> Mamba1State:
    """Mamba, Falcon-Mamba: an explicit `intermediate_size` is the weights' width and wins over `expand`."""
    inner = fields.optional_integer("intermediate_size", "d_inner")
    if inner is None:
        inner = fields.integer(*_EXPAND) * fields.integer(*HIDDEN)
    return _mamba1(fields, inner)


def mamba1_in_hybrid(fields: Fields) -> Mamba1State:
    """Jamba and Zamba: `intermediate_size` belongs to the MLP there, so the width is `mamba_expand` x hidden."""
    return _mamba1(fields, fields.integer(*_EXPAND) * fields.integer(*HIDDEN))


def mamba2(fields: Fields) -> Mamba2State:
    """Mamba-2 in all its spellings; `mamba_d_ssm` (Falcon-H1) and heads x size win over `expand` x hidden."""
    heads = fields.integer("mamba_num_heads", "mamba_n_heads", "n_mamba_heads", "num_heads")
    head_dim = _mamba2_head_dim(fields, heads)
    explicit = fields.optional_integer("mamba_d_ssm")
    if explicit is not None and explicit != heads * head_dim:
        raise fields.error("mamba_d_ssm", f"is {explicit}, but {heads} heads of {head_dim} are {heads * head_dim}")
    return Mamba2State(
        recurrent_dtype=recurrent_dtype(fields),
        heads=heads,
        head_dim=head_dim,
        num_groups=fields.integer("mamba_n_groups", "n_groups", "mamba_ngroups"),
        state_size=fields.integer(*_STATE),
        kernel=fields.integer(*_KERNEL),
    )


def plamo2(fields: Fields) -> Mamba2State:
    """PLaMo 2: `mamba_num_heads` of `hidden_size_per_head`; the convolution sees the inner channels only."""
    return Mamba2State(
        recurrent_dtype=recurrent_dtype(fields),
        heads=fields.integer("mamba_num_heads"),
        head_dim=fields.integer("hidden_size_per_head"),
        num_groups=0,
        state_size=fields.integer(*_STATE),
        kernel=fields.integer(*_KERNEL),
    )


def delta_net(fields: Fields) -> DeltaNetState:
    """Gated delta net (Qwen3-Next, Qwen3.5, OLMo Hybrid); its recurrent matrix is fp32 unless declared otherwise."""
    return DeltaNetState(
        recurrent_dtype=recurrent_dtype(fields) or "float32",
        key_heads=fields.integer("linear_num_key_heads"),
        key_dim=fields.integer("linear_key_head_dim"),
        value_heads=fields.integer("linear_num_value_heads"),
        value_dim=fields.integer("linear_value_head_dim"),
        kernel=fields.integer("linear_conv_kernel_dim"),
    )


def kimi_delta(fields: Fields) -> KimiDeltaState:
    """Kimi delta attention: the sizes lie in `linear_attn_config`, or flat as `linear_...`; always fp32."""
    nested = fields.sub("linear_attn_config")
    if nested is not None:
        return KimiDeltaState(
            recurrent_dtype="float32",
            heads=nested.integer("num_heads"),
            head_dim=nested.integer("head_dim"),
            kernel=nested.integer("short_conv_kernel_size"),
        )
    return KimiDeltaState(
        recurrent_dtype="float32",
        heads=fields.integer("linear_num_heads"),
        head_dim=fields.integer("linear_head_dim"),
        kernel=fields.integer("linear_conv_kernel_dim"),
    )


def lightning(fields: Fields) -> LightningState:
    """Lightning attention (MiniMax-01): as many heads as query heads."""
    heads = fields.integer(*QUERY_HEADS)
    return LightningState(recurrent_dtype=recurrent_dtype(fields), heads=heads, head_dim=read_head_dim(fields, heads))


def short_conv(fields: Fields) -> ShortConvState:
    """LFM2: the hidden state's own convolution of `conv_L_cache` columns."""
    return ShortConvState(recurrent_dtype=None, channels=fields.integer(*HIDDEN), kernel=fields.integer("conv_L_cache"))


def inkling_conv(fields: Fields) -> ShortConvState:
    """Inkling, full layers: four short convolutions, over keys, values and twice the hidden state."""
    return _inkling(fields, fields.integer("num_key_value_heads") * fields.integer("head_dim"))


def inkling_sliding_conv(fields: Fields) -> ShortConvState:
    """Inkling, sliding layers: the same with their own KV heads."""
    heads = fields.optional_integer("swa_num_key_value_heads") or fields.integer("num_key_value_heads")
    return _inkling(fields, heads * (fields.optional_integer("swa_head_dim") or fields.integer("head_dim")))


def rg_lru(fields: Fields) -> RgLruState:
    """RecurrentGemma: `lru_width` or the hidden size, behind a convolution of `conv1d_width`; fp32 recurrence."""
    width = fields.optional_integer("lru_width") or fields.integer(*HIDDEN)
    kernel = fields.optional_integer("conv1d_width")
    if kernel is None:
        fields.note(f"{fields.prefix}conv1d_width is absent: 4, the class default")
        kernel = 4
    return RgLruState(recurrent_dtype="float32", width=width, kernel=kernel)


def recurrent_dtype(fields: Fields) -> str | None:
    """The declared dtype of the recurrent matrix, or None for the model's own."""
    for name in ("mamba_ssm_cache_dtype", "mamba_ssm_dtype"):
        declared = fields.text(name)
        if declared is None or declared == "auto":
            continue
        if declared not in ("float32", "bfloat16", "float16"):
            raise fields.error(name, f"is {describe(declared)}, which is not float32, bfloat16 or float16")
        return declared
    return None


def _inkling(fields: Fields, key_width: int) -> ShortConvState:
    channels = 2 * key_width + 2 * fields.integer(*HIDDEN)
    kernel = fields.integer("conv_kernel_size", "sconv_kernel_size")
    return ShortConvState(recurrent_dtype=None, channels=channels, kernel=kernel)


def _mamba1(fields: Fields, inner: int) -> Mamba1State:
    return Mamba1State(
        recurrent_dtype=recurrent_dtype(fields),
        inner=inner,
        state_size=fields.integer(*_STATE),
        kernel=fields.integer(*_KERNEL),
    )


def _mamba2_head_dim(fields: Fields, heads: int) -> int:
    values = {name: fields.values.get(name) for name in ("mamba_head_dim", "mamba_d_head", "mamba_headdim", "head_dim")}
    given = [name for name, value in values.items() if value is not None and value != "auto"]
    given = [name for name in given if name != "head_dim" or not fields.has("num_key_value_heads")]
    if given:
        return fields.integer(*given)
    inner = fields.integer(*_EXPAND) * fields.integer(*HIDDEN)
    if inner % heads:
        raise fields.error("mamba_head_dim", f"is missing, and {heads} heads do not divide the inner width {inner}")
    return inner // heads
