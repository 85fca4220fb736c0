"""What else a family's layers hold beside their matrices: biases, norms, positions. Data only.

Facts are those of the published model classes.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class Style:
    """One family's habits. `norms_per_layer` counts vectors of hidden size; `qk_norm` is none, head or full width.

    `qkv_bias` and `out_bias` are always there; where false, the config's own flag (`bias_flag`) decides for all four.
    `single_mixer`: a layer is either attention, or state, or MLP (Nemotron-H, Mamba).
    """

    gated: bool = True
    mlp_bias: bool = False
    qkv_bias: bool = False
    out_bias: bool = False
    bias_flag: str = "attention_bias"
    qk_norm: str = "none"
    norms_per_layer: int = 2
    extra_norms: int = 0
    norm_bias: bool = False
    bare_norms: bool = False
    tied: bool = False
    learned_positions: tuple[str, ...] = ()
    position_offset: int = 0
    ffn_factor: int = 0
    ffn_is_doubled: bool = False
    adjusts_ffn: bool = False
    single_mixer: bool = False
    sinks: bool = False
    output_gate: bool = False


_LLAMA = Style()
_QWEN2 = Style(qkv_bias=True)
_QWEN3 = Style(qk_norm="head")
_GEMMA = Style(tied=True)
_GPT2 = Style(
    gated=False,
    mlp_bias=True,
    qkv_bias=True,
    out_bias=True,
    norm_bias=True,
    tied=True,
    learned_positions=("n_positions", "n_ctx"),
    ffn_factor=4,
)
_MAMBA = Style(norms_per_layer=1, single_mixer=True, tied=True)

STYLES: Final[Mapping[str, Style]] = MappingProxyType(
    {
        **dict.fromkeys(("llama", "mistral", "mixtral", "granitemoe", "internlm3", "ministral3"), _LLAMA),
        **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_k2", "nemotron-nas"), _LLAMA),
        "granite": _LLAMA,
        "arcee": Style(gated=False),
        "qwen2": _QWEN2,
        "qwen2_moe": _QWEN2,
        "qwen2_vl": _QWEN2,
        "qwen2_5_vl": _QWEN2,
        "qwen3": _QWEN3,
        "qwen3_moe": _QWEN3,
        "qwen3_vl": _QWEN3,
        "qwen3_vl_moe": _QWEN3,
        "qwen3_next": Style(qk_norm="head", output_gate=True),
        "qwen3_5": Style(qk_norm="head", output_gate=True),
        "qwen3_5_moe": Style(qk_norm="head", output_gate=True),
        "gemma": _GEMMA,
        "gemma2": Style(tied=True, norms_per_layer=4),
        "gemma3": Style(tied=True, norms_per_layer=4, qk_norm="head"),
        "gpt2": _GPT2,
        "gpt_bigcode": _GPT2,
        "gpt_oss": Style(qkv_bias=True, out_bias=True, sinks=True),
        "olmo2": Style(qk_norm="full"),
        "olmo3": Style(qk_norm="full"),
        "exaone4": Style(qk_norm="head"),
        "falcon": Style(gated=False, bias_flag="bias", norms_per_layer=1, norm_bias=True, tied=True, ffn_factor=4),
        "chatglm": Style(qkv_bias=True, bias_flag="add_bias_linear"),
        "phi3": _LLAMA,
        "starcoder2": Style(gated=False, mlp_bias=True, qkv_bias=True, out_bias=True, norm_bias=True, tied=True),
        "smollm3": Style(tied=True),
        "mamba": _MAMBA,
        "falcon_mamba": _MAMBA,
        "mamba2": Style(norms_per_layer=1, single_mixer=True),
        "nemotron_h": Style(gated=False, norms_per_layer=1, single_mixer=True),
        "falcon_h1": _LLAMA,
        "granitemoehybrid": _LLAMA,
        "lfm2": Style(qk_norm="head", tied=True, adjusts_ffn=True),
        "llama4": _LLAMA,
    }
)

CROSSING_TYPES: Final = frozenset({"t5", "mt5", "umt5", "bart", "mbart", "whisper"})
BERT_TYPES: Final = frozenset({"bert", "roberta", "xlm-roberta"})
