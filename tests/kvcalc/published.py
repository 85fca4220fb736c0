"""Minimal configs with the published field values of real models: only what their memory depends on.

Each entry: name, config, and its five terms in bf16 (bytes per token, indexer, window, state, per source token).
"""

from typing import Any

Terms = tuple[int, int, int, int, int]


def _decoder(
    model_type: str, layers: int, heads: int, kv_heads: int | None, hidden: int, **more: Any
) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": model_type,
        "torch_dtype": "bfloat16",
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "hidden_size": hidden,
        **more,
    }
    if kv_heads is not None:
        config["num_key_value_heads"] = kv_heads
    return config


def _mla(model_type: str, layers: int, **more: Any) -> dict[str, Any]:
    return _decoder(model_type, layers, 128, 128, 7168, kv_lora_rank=512, qk_rope_head_dim=64, **more)


MAMBA2 = {"mamba_n_heads": 128, "mamba_d_head": 64, "mamba_n_groups": 1, "mamba_d_state": 128, "mamba_d_conv": 4}
GDN = {
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "linear_conv_kernel_dim": 4,
}
MIB = 2**20

PLAIN: dict[str, tuple[dict[str, Any], Terms]] = {
    "Qwen2.5-0.5B: the window is switched off": (
        _decoder("qwen2", 24, 14, 2, 896, sliding_window=32768, use_sliding_window=False, max_window_layers=21),
        (12_288, 0, 0, 0, 0),
    ),
    "Qwen2.5-1.5B": (_decoder("qwen2", 28, 12, 2, 1536), (28_672, 0, 0, 0, 0)),
    "Qwen2 with the window on: layers from max_window_layers slide": (
        _decoder("qwen2", 4, 8, 2, 512, sliding_window=100, use_sliding_window=True, max_window_layers=3),
        (3 * 2 * 2 * 64 * 2, 0, 2 * 2 * 64 * 2 * 100, 0, 0),
    ),
    "Qwen2-MoE with the window on: even layers below max_window_layers slide": (
        _decoder("qwen2_moe", 6, 8, 2, 512, sliding_window=100, use_sliding_window=True, max_window_layers=3),
        (4 * 512, 0, 2 * 512 * 100, 0, 0),
    ),
    "Qwen3-0.6B: an explicit head size": (
        _decoder("qwen3", 28, 16, 8, 1024, head_dim=128),
        (114_688, 0, 0, 0, 0),
    ),
    "Qwen3 without head_dim: the class default, not hidden over heads": (
        _decoder("qwen3", 28, 16, 8, 1024),
        (114_688, 0, 0, 0, 0),
    ),
    "Llama-2-7B: as many KV heads as query heads": (_decoder("llama", 32, 32, 32, 4096), (524_288, 0, 0, 0, 0)),
    "Llama without num_key_value_heads": (_decoder("llama", 32, 32, None, 4096), (524_288, 0, 0, 0, 0)),
    "Llama with head_dim 0, which counts as absent": (
        _decoder("llama", 32, 32, 8, 4096, head_dim=0),
        (131_072, 0, 0, 0, 0),
    ),
    "Mistral-Nemo: head size is not hidden over heads; window null": (
        _decoder("mistral", 40, 32, 8, 5120, head_dim=128, sliding_window=None),
        (163_840, 0, 0, 0, 0),
    ),
    "Mistral-7B-v0.1: all layers slide": (
        _decoder("mistral", 32, 32, 8, 4096, sliding_window=4096),
        (0, 0, 512 * MIB, 0, 0),
    ),
    "Mixtral: window null": (_decoder("mixtral", 32, 32, 8, 4096, sliding_window=None), (131_072, 0, 0, 0, 0)),
    "gpt2: legacy spellings": (
        {"model_type": "gpt2", "n_layer": 12, "n_head": 12, "n_embd": 768},
        (36_864, 0, 0, 0, 0),
    ),
    "StarCoder: multi_query by default": (
        {"model_type": "gpt_bigcode", "n_layer": 40, "n_head": 48, "n_embd": 6144},
        (40 * 2 * 128 * 2, 0, 0, 0, 0),
    ),
    "Falcon-7B: multi_query beats num_kv_heads": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 32,
            "num_attention_heads": 71,
            "num_kv_heads": 71,
            "hidden_size": 4544,
            "multi_query": True,
            "new_decoder_architecture": False,
        },
        (8_192, 0, 0, 0, 0),
    ),
    "Falcon-40B: the new architecture counts num_kv_heads": (
        {
            "model_type": "falcon",
            "num_hidden_layers": 60,
            "num_attention_heads": 128,
            "num_kv_heads": 8,
            "hidden_size": 8192,
            "multi_query": True,
            "new_decoder_architecture": True,
        },
        (60 * 2 * 8 * 64 * 2, 0, 0, 0, 0),
    ),
    "ChatGLM3-6B": (
        {
            "model_type": "chatglm",
            "num_layers": 28,
            "num_attention_heads": 32,
            "hidden_size": 4096,
            "kv_channels": 128,
            "multi_query_attention": True,
            "multi_query_group_num": 2,
        },
        (28_672, 0, 0, 0, 0),
    ),
    "DBRX: heads in attn_config": (
        {"model_type": "dbrx", "n_layers": 40, "n_heads": 48, "d_model": 6144, "attn_config": {"kv_n_heads": 8}},
        (40 * 2 * 8 * 128 * 2, 0, 0, 0, 0),
    ),
    "MPT: multi-query by attn_type": (
        {
            "model_type": "mpt",
            "n_layers": 32,
            "n_heads": 32,
            "d_model": 4096,
            "attn_config": {"attn_type": "multiquery_attention"},
        },
        (32 * 2 * 128 * 2, 0, 0, 0, 0),
    ),
    "Step3: num_attention_groups": (
        {
            "model_type": "step3_text",
            "num_hidden_layers": 61,
            "num_attention_heads": 64,
            "num_attention_groups": 1,
            "head_dim": 256,
            "hidden_size": 7168,
        },
        (61 * 2 * 256 * 2, 0, 0, 0, 0),
    ),
    "Gemma-2B: head size 256 by class default": (_decoder("gemma", 18, 8, 1, 2048), (18_432, 0, 0, 0, 0)),
    "BERT keeps nothing": (_decoder("bert", 12, 12, None, 768), (0, 0, 0, 0, 0)),
}

WINDOWED: dict[str, tuple[dict[str, Any], Terms]] = {
    "Gemma-2-2B: alternates without layer_types": (
        _decoder("gemma2", 26, 8, 4, 2304, head_dim=256, sliding_window=4096),
        (13 * 4096, 0, 13 * 4096 * 4096, 0, 0),
    ),
    "Gemma-3-1B: an integer pattern": (
        _decoder("gemma3_text", 26, 4, 1, 1152, head_dim=256, sliding_window=512, sliding_window_pattern=6),
        (4_096, 0, 11_534_336, 0, 0),
    ),
    "Gemma 3 that attends both ways keeps half the window": (
        _decoder("gemma3_text", 6, 4, 1, 1152, head_dim=256, sliding_window=512, use_bidirectional_attention=True),
        (1_024, 0, 5 * 1024 * 257, 0, 0),
    ),
    "gpt-oss-20b": (
        _decoder("gpt_oss", 24, 64, 8, 2880, head_dim=64, sliding_window=128),
        (24_576, 0, 3 * MIB, 0, 0),
    ),
    "Cohere2: every fourth is full": (
        _decoder("cohere2", 32, 32, 8, 4096, head_dim=128, sliding_window=4096, sliding_window_pattern=4),
        (8 * 4096, 0, 24 * 4096 * 4096, 0, 0),
    ),
    "EXAONE-4.0-32B: the string LLLG": (
        _decoder("exaone4", 64, 40, 8, 5120, head_dim=128, sliding_window=4096, sliding_window_pattern="LLLG"),
        (65_536, 0, 805_306_368, 0, 0),
    ),
    "EXAONE 4: the last layer is full whatever the pattern": (
        _decoder("exaone4", 5, 8, 8, 1024, sliding_window=10, sliding_window_pattern="LLLG"),
        (2 * 4096, 0, 3 * 4096 * 10, 0, 0),
    ),
    "OLMo-3-7B": (
        _decoder("olmo3", 32, 32, 32, 4096, sliding_window=4096),
        (8 * 16_384, 0, 24 * 16_384 * 4096, 0, 0),
    ),
    "Granite SWA: the first of every four is full": (
        _decoder("granite_swa", 24, 20, 4, 1280, sliding_window=128),
        (6 * 2 * 4 * 64 * 2, 0, 18 * 1024 * 128, 0, 0),
    ),
    "MiMo-V2-Flash: K and V differ, sliding heads differ, the chunk size is bogus": (
        _decoder(
            "mimo_v2_flash",
            48,
            64,
            4,
            4096,
            head_dim=192,
            v_head_dim=128,
            swa_num_key_value_heads=8,
            swa_head_dim=192,
            swa_v_head_dim=128,
            sliding_window=128,
            attention_chunk_size=128,
            hybrid_layer_pattern=[0, *[1, 1, 1, 1, 0], *[1, 1, 1, 1, 1, 0] * 7],
        ),
        (23_040, 0, 25_559_040, 0, 0),
    ),
    "Inkling: local layers, their own heads, and four convolutions": (
        _decoder(
            "inkling_text",
            6,
            64,
            8,
            6144,
            head_dim=128,
            swa_num_key_value_heads=16,
            swa_head_dim=128,
            sliding_window_size=512,
            conv_kernel_size=4,
            local_layer_ids=[0, 1, 2, 3, 4],
        ),
        (4096, 0, 5 * 8192 * 512, (5 * (2 * 2048 + 2 * 6144) + 2 * 1024 + 2 * 6144) * 3 * 2, 0),
    ),
    "Llama-4-Scout: interval 4 when nothing says where rope is": (
        {
            "model_type": "llama4",
            "text_config": _decoder("llama4_text", 48, 40, 8, 5120, head_dim=128, attention_chunk_size=8192),
        },
        (49_152, 0, 1_207_959_552, 0, 0),
    ),
    "Llama 4 with no_rope_layers": (
        _decoder("llama4_text", 4, 8, 8, 1024, attention_chunk_size=64, no_rope_layers=[1, 0, 1, 1]),
        (4096, 0, 3 * 4096 * 64, 0, 0),
    ),
    "Gemma 4: global layers have a geometry of their own, the last ones share": (
        {
            "model_type": "gemma4",
            "text_config": _decoder(
                "gemma4_text",
                12,
                8,
                4,
                2304,
                head_dim=256,
                global_head_dim=512,
                attention_k_eq_v=True,
                num_global_key_value_heads=2,
                num_kv_shared_layers=6,
                sliding_window=512,
                layer_types=["sliding_attention"] * 5
                + ["full_attention"]
                + ["sliding_attention"] * 5
                + ["full_attention"],
            ),
        },
        (2 * 2 * 512 * 2, 0, 5 * 2 * 4 * 256 * 2 * 512, 0, 0),
    ),
    "Gemma-3n-E4B: 15 of 35 layers share": (
        {
            "model_type": "gemma3n",
            "text_config": _decoder(
                "gemma3n_text", 35, 8, 2, 2048, head_dim=256, sliding_window=512, num_kv_shared_layers=15
            ),
        },
        (8_192, 0, 16_777_216, 0, 0),
    ),
    "Hunyuan-Large: every second layer owns keys with use_cla": (
        _decoder("hunyuan", 64, 80, 8, 6400, attention_head_dim=128, use_cla=True, cla_share_factor=2),
        (131_072, 0, 0, 0, 0),
    ),
    "Hunyuan with a factor but without use_cla": (
        _decoder("hunyuan", 64, 80, 8, 6400, attention_head_dim=128, use_cla=False, cla_share_factor=2),
        (262_144, 0, 0, 0, 0),
    ),
    "Nemotron-NAS: blocks without attention; null num_key_value_heads": (
        _decoder(
            "nemotron-nas",
            3,
            64,
            None,
            8192,
            num_key_value_heads=None,
            block_configs=[
                {"attention": {"no_op": False, "n_heads_in_group": 8, "window_length": None}},
                {"attention": {"no_op": True, "n_heads_in_group": None}},
                {"attention": {"no_op": False, "replace_with_linear": True, "n_heads_in_group": None}},
            ],
        ),
        (4_096, 0, 0, 0, 0),
    ),
    "DeciLM: a list of KV heads": (
        _decoder("deci", 3, 32, None, 4096, num_key_value_heads_per_layer=[4, 2, 1]),
        (7 * 2 * 128 * 2, 0, 0, 0, 0),
    ),
}

LATENT: dict[str, tuple[dict[str, Any], Terms]] = {
    "DeepSeek-V3": (_mla("deepseek_v3", 61), (70_272, 0, 0, 0, 0)),
    "DeepSeek-V3.2: indexer keys on every layer": (
        _mla("deepseek_v32", 61, index_head_dim=128),
        (70_272, 8_052, 0, 0, 0),
    ),
    "GLM-5.2: head_dim beside MLA, 21 of 78 layers own an indexer": (
        _mla("glm_moe_dsa", 78, head_dim=192, index_head_dim=128, index_topk_freq=4, index_skip_topk_offset=3),
        (89_856, 2_772, 0, 0, 0),
    ),
    "an indexer pattern of letters": (
        _mla("glm_moe_dsa", 4, index_head_dim=128, index_topk_pattern="FSSF"),
        (4 * 1152, 2 * 132, 0, 0, 0),
    ),
    "an indexer list": (
        _mla("glm_moe_dsa", 2, index_head_dim=128, indexer_types=["full", "shared"]),
        (2 * 1152, 132, 0, 0, 0),
    ),
    "LongCat: two attentions a layer": (
        {"model_type": "longcat_flash", "num_layers": 28, "kv_lora_rank": 512, "qk_rope_head_dim": 64},
        (28 * 2 * 1152, 0, 0, 0, 0),
    ),
    "small DeepSeek-VL2: MLA switched off": (
        {
            "model_type": "deepseek_vl_v2",
            "language_config": _decoder("deepseek_v2", 12, 10, 10, 1280, kv_lora_rank=None, use_mla=False),
        },
        (12 * 2 * 10 * 128 * 2, 0, 0, 0, 0),
    ),
    "DeepSeek-V4: ratios longer than the layers": (
        _decoder(
            "deepseek_v4",
            43,
            64,
            1,
            4096,
            head_dim=512,
            index_head_dim=128,
            sliding_window=128,
            compress_ratios=[0, 0, *[4, 128] * 20, 4, 0],
        ),
        (5_536, 1_344, 5_636_096, 0, 0),
    ),
    "MiniMax-M3: one index key head on sparse layers": (
        _decoder(
            "minimax_m3",
            60,
            64,
            4,
            6144,
            head_dim=128,
            sparse_attention_config={
                "sparse_attention_freq": [0, 0, 0, *[1] * 57],
                "sparse_index_dim": 128,
                "sparse_disable_index_value": [0, 0, 0, *[1] * 57],
                "sparse_num_index_heads": 4,
            },
        ),
        (122_880, 14_592, 0, 0, 0),
    ),
}

RECURRENT: dict[str, tuple[dict[str, Any], Terms]] = {
    "Falcon-Mamba-7B: intermediate_size wins over expand": (
        {
            "model_type": "falcon_mamba",
            "torch_dtype": "bfloat16",
            "num_hidden_layers": 64,
            "hidden_size": 4096,
            "intermediate_size": 8192,
            "expand": 16,
            "conv_kernel": 4,
            "state_size": 16,
        },
        (0, 0, 0, 19_922_944, 0),
    ),
    "Jamba: one attention layer in eight": (
        _decoder(
            "jamba",
            32,
            32,
            8,
            4096,
            attn_layer_period=8,
            attn_layer_offset=4,
            intermediate_size=14336,
            mamba_expand=2,
            mamba_d_conv=4,
            mamba_d_state=16,
        ),
        (4 * 4096, 0, 0, 28 * (8192 * 3 * 2 + 8192 * 16 * 2), 0),
    ),
    "Granite-4.0-H-Small": (
        _decoder("granitemoehybrid", 40, 32, 8, 4096, layer_types=(["mamba"] * 9 + ["attention"]) * 4, **MAMBA2),
        (16_384, 0, 0, 77_322_240, 0),
    ),
    "Granite-4.0-Micro: Mamba fields, but every layer attends": (
        _decoder("granitemoehybrid", 40, 40, 8, 2560, layer_types=["attention"] * 40, **MAMBA2),
        (40 * 2 * 8 * 64 * 2, 0, 0, 0, 0),
    ),
    "Falcon-H1-0.5B: both in every layer, mamba_d_ssm before expand": (
        _decoder(
            "falcon_h1",
            36,
            8,
            2,
            1024,
            head_dim=64,
            mamba_d_ssm=1536,
            mamba_expand=2,
            mamba_n_heads=24,
            mamba_d_head=64,
            mamba_n_groups=1,
            mamba_d_state=128,
            mamba_d_conv=4,
        ),
        (18_432, 0, 0, 14_542_848, 0),
    ),
    "Bamba: a head size that is auto": (
        _decoder(
            "bamba",
            4,
            32,
            8,
            4096,
            attn_layer_indices=[1],
            mamba_d_head="auto",
            mamba_expand=2,
            mamba_n_heads=128,
            mamba_n_groups=1,
            mamba_d_state=128,
            mamba_d_conv=4,
        ),
        (4096, 0, 0, 3 * (8448 * 3 * 2 + 8192 * 128 * 2), 0),
    ),
    "Nemotron-3-Nano: the state's dtype is declared": (
        _decoder(
            "nemotron_h",
            52,
            32,
            2,
            2688,
            head_dim=128,
            hybrid_override_pattern="M" * 23 + "E" * 23 + "*" * 6,
            mamba_num_heads=64,
            mamba_head_dim=64,
            n_groups=8,
            ssm_state_size=128,
            conv_kernel=4,
            mamba_ssm_cache_dtype="float32",
        ),
        (6_144, 0, 0, 23 * ((4096 + 2 * 8 * 128) * 3 * 2 + 4096 * 128 * 4), 0),
    ),
    "Mamba-2 by its own spellings": (
        {
            "model_type": "mamba2",
            "torch_dtype": "bfloat16",
            "num_hidden_layers": 2,
            "hidden_size": 1024,
            "num_heads": 32,
            "head_dim": 64,
            "n_groups": 1,
            "state_size": 128,
            "conv_kernel": 4,
        },
        (0, 0, 0, 2 * ((2048 + 256) * 3 * 2 + 2048 * 128 * 2), 0),
    ),
    "Zamba2: hybrid layers keep both; kv_channels is not the head size": (
        _decoder(
            "zamba2",
            3,
            32,
            32,
            2560,
            attention_head_dim=160,
            kv_channels=80,
            layers_block_type=["mamba", "hybrid", "mamba"],
            n_mamba_heads=80,
            mamba_headdim=64,
            mamba_ngroups=1,
            mamba_d_state=64,
            mamba_d_conv=4,
        ),
        (2 * 32 * 160 * 2, 0, 0, 3 * ((5120 + 128) * 3 * 2 + 5120 * 64 * 2), 0),
    ),
    "PLaMo 2: the head size is hidden_size_per_head": (
        {
            "model_type": "plamo2",
            "torch_dtype": "bfloat16",
            "num_hidden_layers": 4,
            "num_attention_heads": 32,
            "num_key_value_heads": 4,
            "hidden_size": 4096,
            "hidden_size_per_head": 128,
            "mamba_num_heads": 64,
            "mamba_d_state": 64,
            "mamba_d_conv": 4,
            "mamba_step": 2,
        },
        (2 * 2 * 4 * 128 * 2, 0, 0, 2 * (8192 * 3 * 2 + 8192 * 64 * 2), 0),
    ),
    "Qwen3-Next-80B: an interval instead of layer_types, fp32 state": (
        _decoder("qwen3_next", 48, 16, 2, 2048, head_dim=256, full_attention_interval=4, **GDN),
        (24_576, 0, 0, 77_266_944, 0),
    ),
    "Qwen3.5-27B: nested": (
        {
            "model_type": "qwen3_5",
            "text_config": _decoder(
                "qwen3_5_text",
                64,
                24,
                4,
                5120,
                head_dim=256,
                layer_types=(["linear_attention"] * 3 + ["full_attention"]) * 16,
                mamba_ssm_dtype="float32",
                **(GDN | {"linear_num_value_heads": 48}),
            ),
        },
        (65_536, 0, 0, 153_944_064, 0),
    ),
    "Kimi Linear: layers counted from 1, MLA between": (
        _mla(
            "kimi_linear",
            4,
            linear_attn_config={
                "full_attn_layers": [4],
                "kda_layers": [1, 2, 3],
                "num_heads": 96,
                "head_dim": 128,
                "short_conv_kernel_size": 4,
            },
        ),
        (1_152, 0, 0, 3 * (221_184 + 6_291_456), 0),
    ),
    "MiniMax-01: every second layer is lightning attention": (
        _decoder("minimax", 4, 64, 8, 6144, head_dim=128),
        (2 * 4096, 0, 0, 2 * 64 * 128 * 128 * 2, 0),
    ),
    "LFM2: the convolution's columns": (
        _decoder("lfm2", 16, 32, 8, 2048, conv_L_cache=3, full_attn_idxs=[2, 5, 8, 10, 12, 14]),
        (12_288, 0, 0, 81_920, 0),
    ),
    "RecurrentGemma-2B: windowed attention between RG-LRU blocks": (
        _decoder(
            "recurrent_gemma",
            26,
            10,
            1,
            2560,
            head_dim=256,
            lru_width=2560,
            conv1d_width=4,
            attention_window_size=2048,
            block_types=["recurrent", "recurrent", "attention"],
        ),
        (0, 0, 8 * 1024 * 2048, 18 * (2560 * 3 * 2 + 2560 * 4), 0),
    ),
}

CROSSING: dict[str, tuple[dict[str, Any], Terms]] = {
    "T5-small: d_kv, num_heads, num_decoder_layers": (
        {
            "model_type": "t5",
            "torch_dtype": "float32",
            "is_encoder_decoder": True,
            "d_model": 512,
            "d_kv": 64,
            "num_heads": 8,
            "num_layers": 6,
            "num_decoder_layers": 6,
        },
        (12_288, 0, 0, 0, 12_288),
    ),
    "Whisper-tiny: the decoder's own names": (
        {
            "model_type": "whisper",
            "is_encoder_decoder": True,
            "d_model": 384,
            "encoder_layers": 4,
            "decoder_layers": 4,
            "num_hidden_layers": 4,
            "encoder_attention_heads": 6,
            "decoder_attention_heads": 6,
            "max_source_positions": 1500,
        },
        (4 * 2 * 384 * 2, 0, 0, 0, 4 * 2 * 384 * 2),
    ),
    "Llama-3.2-90B-Vision: cross layers do not grow with text": (
        {
            "model_type": "mllama",
            "text_config": _decoder(
                "mllama_text_model", 100, 64, 8, 8192, cross_attention_layers=list(range(3, 100, 5))
            ),
            "vision_config": {"image_size": 560, "patch_size": 14, "max_num_tiles": 4},
        },
        (327_680, 0, 0, 0, 81_920),
    ),
}

ALL = {**PLAIN, **WINDOWED, **LATENT, **RECURRENT, **CROSSING}
