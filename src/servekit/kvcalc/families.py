"""The model families as data: for each `model_type`, where its layers' kinds, heads and states are read from.

Class defaults (head size, window, KV heads) are those of the published config classes, and stand here only for fields
that real checkpoints leave out. It must not know bytes or parameters.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

from servekit.kvcalc import attention_fields as heads
from servekit.kvcalc import patterns, state_fields
from servekit.kvcalc.attention_fields import HeadsReader, grouped_heads
from servekit.kvcalc.indexer_fields import IndexerReader, deepseek_indexer, minimax_indexer
from servekit.kvcalc.kinds import Kind
from servekit.kvcalc.patterns import Pattern
from servekit.kvcalc.state_fields import StateReader

_LAYERS: Final = ("num_hidden_layers", "n_layer", "num_layers", "n_layers")


_ALL_FULL: Final = patterns.every(Kind.FULL)
_GROUPED: Final = grouped_heads()


@dataclass(frozen=True, slots=True)
class Family:
    """How one family's config.json is read.

    `window` is the class default of a window that checkpoints leave out. `is_encoder` keeps nothing between steps.
    `crosses` adds cross-attention to every layer (encoder-decoder). `caches_per_layer` is 2 for LongCat's double
    attention. `has_global_heads` is Gemma 4's second geometry.
    """

    pattern: Pattern = _ALL_FULL
    heads: HeadsReader = _GROUPED
    state: StateReader | None = None
    sliding_state: StateReader | None = None
    indexer: IndexerReader | None = None
    window: int | None = None
    layers: tuple[str, ...] = _LAYERS
    is_encoder: bool = False
    crosses: bool = False
    caches_per_layer: int = 1
    has_global_heads: bool = False


_PLAIN = Family()
_LATENT = Family(heads=heads.latent_unless_switched_off)
_SPARSE_LATENT = replace(_LATENT, indexer=deepseek_indexer)
_SWITCHED = Family(pattern=patterns.qwen_switch)
_WINDOWED = Family(pattern=patterns.sliding_if_window)
_DELTA = Family(pattern=patterns.nth_attention, heads=grouped_heads(head_dim=256), state=state_fields.delta_net)
_KIMI = Family(pattern=patterns.kimi_linear, heads=heads.latent, state=state_fields.kimi_delta)
_GEMMA2 = Family(pattern=patterns.even_slides, heads=grouped_heads(head_dim=256, num_kv_heads=4), window=4096)
_GEMMA3 = Family(
    pattern=patterns.nth_full(6, "sliding_window_pattern"),
    heads=grouped_heads(head_dim=256, num_kv_heads=4, num_query_heads=8),
    window=4096,
)
_GEMMA4 = Family(
    pattern=patterns.nth_full(6), heads=grouped_heads(head_dim=256, num_kv_heads=4), window=512, has_global_heads=True
)
_EXAONE4 = Family(pattern=patterns.exaone4)
_GRANITE_SWA = Family(pattern=patterns.first_of_four_full, window=128)
_COHERE2 = Family(
    pattern=patterns.nth_full(4, "sliding_window_pattern"), heads=grouped_heads(head_dim=128), window=4096
)
_GPT_OSS = Family(pattern=patterns.even_slides, heads=grouped_heads(head_dim=64), window=128)
_LFM2 = Family(pattern=patterns.listed_attention("full_attn_idxs"), state=state_fields.short_conv)
_MAMBA1 = Family(pattern=patterns.every(Kind.STATE), state=state_fields.mamba1)
_LLAMA4 = Family(pattern=patterns.llama4)
_MINIMAX_TEXT = Family(pattern=patterns.minimax_text, state=state_fields.lightning)
_MINIMAX_M3 = Family(indexer=minimax_indexer, heads=grouped_heads(head_dim=128))
_INKLING = Family(
    pattern=patterns.inkling, state=state_fields.inkling_conv, sliding_state=state_fields.inkling_sliding_conv
)
_GRANITE_HYBRID = Family(pattern=patterns.every(Kind.STATE), state=state_fields.mamba2)
_ENCODER = Family(is_encoder=True)
_BART = Family(heads=heads.bart_heads, crosses=True, layers=("decoder_layers", "num_hidden_layers"))
_T5 = Family(heads=heads.t5_heads, crosses=True, layers=("num_decoder_layers",))
_QWEN3 = Family(pattern=patterns.qwen_switch, heads=grouped_heads(head_dim=128))

_GROUPS: Final[tuple[tuple[str, Family], ...]] = (
    (
        "apertus arcee aria_text baichuan biogpt bitnet bloom chameleon codegen cohere ctrl deepseek diffllama "
        "exaone ernie4_5_moe flex_olmo fuyu gpt_neox gpt_neox_japanese gpt2 gpt-sw3 gptj granite granitemoe "
        "granitemoeshared hunyuan hunyuan_v1_dense hunyuan_v1_moe hunyuan_vl internlm internlm2 jais2 llama "
        "minicpm nanochat olmo olmo2 olmoe openai-gpt opt orion persimmon phi phi-msft qwen stablelm "
        "stablelm_epoch step3_text xglm xverse bailing_moe bailing_moe_v2 granite_docling "
        "nemotron-nas deci",
        _PLAIN,
    ),
    (
        "ernie4_5 glm glm4 glm4v glm4_moe glm4v_moe glm_ocr helium hyperclovax internlm3 minimax_m2 seed_oss "
        "solar_open hy_v3 mellum laguna",
        Family(heads=grouped_heads(head_dim=128)),
    ),
    ("gemma", Family(heads=grouped_heads(head_dim=256))),
    ("nemotron", Family(heads=grouped_heads(head_dim=128))),
    ("falcon", Family(heads=heads.falcon_heads)),
    ("RefinedWeb", Family(heads=heads.falcon_heads)),
    ("RefinedWebModel", Family(heads=heads.falcon_heads)),
    ("chatglm", Family(heads=heads.chatglm_heads)),
    ("gpt_bigcode", Family(heads=heads.bigcode_heads)),
    ("mpt", Family(heads=heads.nested_heads)),
    ("dbrx", Family(heads=heads.nested_heads)),
    ("gpt_neo", Family(pattern=patterns.gpt_neo)),
    ("mistral", replace(_WINDOWED, window=4096)),
    ("mixtral phi3 phi3_v phi4mm phi4_multimodal phimoe starcoder2 ministral3", _WINDOWED),
    ("ministral", Family(pattern=patterns.every(Kind.SLIDING), window=4096)),
    ("qwen2 qwen2_vl qwen2_5_vl qwen2_5_omni dots1 smollm3 mimo", _SWITCHED),
    ("qwen2_moe", Family(pattern=patterns.qwen2_moe_switch)),
    ("qwen3 qwen3_moe qwen3_vl qwen3_vl_moe qwen3_omni_moe", _QWEN3),
    ("qwen3_next qwen3_5 qwen3_5_moe", _DELTA),
    ("olmo_hybrid", Family(pattern=patterns.nth_attention, state=state_fields.delta_net)),
    ("gemma2 vaultgemma t5_gemma_module", _GEMMA2),
    ("gemma3", _GEMMA3),
    ("gemma3n", Family(pattern=patterns.nth_full(5), heads=grouped_heads(head_dim=256, num_kv_heads=2), window=512)),
    ("gemma4 gemma4_unified", _GEMMA4),
    ("t5gemma", replace(_GEMMA2, crosses=True)),
    ("cohere2 cohere2_moe", _COHERE2),
    ("exaone4 exaone_moe", _EXAONE4),
    ("olmo3", Family(pattern=patterns.nth_full(4), window=4096)),
    ("granite_swa granitemoe_swa", _GRANITE_SWA),
    ("cwm", Family(pattern=patterns.first_of_four_full, heads=grouped_heads(head_dim=128), window=8192)),
    ("gpt_oss", _GPT_OSS),
    ("afmoe", Family(pattern=patterns.nth_full(4, "global_attn_every_n_layers"), heads=grouped_heads(head_dim=128))),
    ("mimo_v2 mimo_v2_flash", Family(pattern=patterns.mimo_v2)),
    ("inkling", _INKLING),
    ("llama4", _LLAMA4),
    ("mllama", Family(pattern=patterns.mllama)),
    ("deepseek_v2 deepseek_v3 deepseek_vl_v2 glm4_moe_lite kimi_k2 kimi_vl minicpm3", _LATENT),
    ("axk1 mistral4 sarvam_mla youtu", _LATENT),
    ("deepseek_v32 glm_moe_dsa axk2 hy_v4 hy_v4_vl", _SPARSE_LATENT),
    ("longcat_flash", replace(_LATENT, caches_per_layer=2)),
    ("deepseek_v4", Family(pattern=patterns.deepseek_v4, heads=heads.shared_vector)),
    ("kimi_linear", _KIMI),
    ("minimax minimax_text_01 minimax_m1", _MINIMAX_TEXT),
    ("minimax_m3 minimax_m3_vl", _MINIMAX_M3),
    ("mamba falcon_mamba", _MAMBA1),
    ("mamba2", Family(pattern=patterns.every(Kind.STATE), state=state_fields.mamba2)),
    ("jamba", Family(pattern=patterns.jamba, state=state_fields.mamba1_in_hybrid)),
    ("bamba", Family(pattern=patterns.listed_attention("attn_layer_indices"), state=state_fields.mamba2)),
    ("falcon_h1", Family(pattern=patterns.every(Kind.BOTH), state=state_fields.mamba2)),
    ("granitemoehybrid", _GRANITE_HYBRID),
    ("nemotron_h", Family(pattern=patterns.nemotron_h, state=state_fields.mamba2)),
    ("zamba", Family(pattern=patterns.zamba, heads=heads.zamba_heads, state=state_fields.mamba1_in_hybrid)),
    ("zamba2", Family(pattern=patterns.zamba, heads=heads.zamba_heads, state=state_fields.mamba2)),
    ("plamo2", Family(pattern=patterns.plamo2, state=state_fields.plamo2)),
    ("lfm2 lfm2_moe", _LFM2),
    ("recurrent_gemma", Family(pattern=patterns.recurrent_gemma, state=state_fields.rg_lru, window=2048)),
    ("t5 mt5 umt5 longt5 switch_transformers", _T5),
    ("bart mbart pegasus marian m2m_100 nllb_moe blenderbot blenderbot-small whisper plbart mvp speech_to_text", _BART),
    (
        "bert roberta xlm-roberta xlm-roberta-xl distilbert modernbert mpnet nomic_bert electra camembert albert "
        "deberta deberta-v2 gte new ernie eurobert",
        _ENCODER,
    ),
)

FAMILIES: Final[Mapping[str, Family]] = MappingProxyType(
    {name: family for names, family in _GROUPS for name in names.split()}
)
