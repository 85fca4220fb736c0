"""Parameter counts of models that are not a single decoder: BERT, T5, BART, Whisper, and vision towers."""

from servekit.kvcalc.fields import MAX_SIZE, Fields


def count_bert(fields: Fields) -> dict[str, int]:
    """BERT and RoBERTa encoders with their pooler: exact for the published base classes."""
    hidden, width = fields.integer("hidden_size"), fields.integer("intermediate_size")
    positions = fields.integer("max_position_embeddings") + (fields.optional_integer("type_vocab_size") or 0)
    layers = fields.integer("num_hidden_layers")
    return {
        "embedding": (fields.integer("vocab_size") + positions) * hidden,
        "attention": layers * (4 * hidden * hidden + 4 * hidden),
        "mlp": layers * (2 * hidden * width + width + hidden) + hidden * hidden + hidden,
        "norms": (layers * 2 + 1) * 2 * hidden,
    }


def count_encoder_decoder(fields: Fields, model_type: str) -> dict[str, int]:
    """T5, BART and Whisper: encoder, decoder and cross-attention."""
    return _t5(fields, model_type) if model_type in ("t5", "mt5", "umt5") else _bart(fields, model_type)


def count_vision(root: Fields) -> int:
    """An estimate of a vision tower, blocks and patch embedding; 0 without one or when its sizes are not plain."""
    vision = root.sub("vision_config")
    if vision is None:
        return 0
    hidden = _size(vision, "embed_dim", "hidden_size", "vt_hidden_size", "width")
    layers = _size(vision, "num_hidden_layers", "vt_num_hidden_layers", "depth")
    layers += _size(vision, "num_global_layers") if layers else 0
    width = _size(vision, "intermediate_size", "vt_intermediate_size") or 4 * hidden
    patch = _size(vision, "patch_size") or 14
    return layers * (4 * hidden * hidden + 2 * hidden * width + 9 * hidden + width) + 3 * patch * patch * hidden


def _size(vision: Fields, *names: str) -> int:
    """The first of the names that is a plain size, else 0: an estimate need not refuse what it cannot use."""
    values = (vision.values.get(name) for name in names)
    plain = (value for value in values if isinstance(value, int) and not isinstance(value, bool))
    return next((value for value in plain if 0 < value <= MAX_SIZE), 0)


def _t5(fields: Fields, model_type: str) -> dict[str, int]:
    hidden, width = fields.integer("d_model"), fields.integer("d_ff")
    inner = fields.integer("num_heads") * fields.integer("d_kv")
    encoder = fields.integer("num_layers")
    decoder = fields.optional_integer("num_decoder_layers") or encoder
    projection = fields.text("feed_forward_proj") or "relu"
    gated = fields.flag("is_gated_act", default=projection.startswith("gated"))
    embedding = fields.integer("vocab_size") * hidden
    buckets = (fields.optional_integer("relative_attention_num_buckets") or 32) * fields.integer("num_heads")
    num_biases = encoder + decoder if model_type == "umt5" else 2
    tied = fields.flag("tie_word_embeddings", default=True)
    return {
        "embedding": embedding,
        **({} if tied else {"lm_head": embedding}),
        "attention": (encoder + 2 * decoder) * 4 * hidden * inner + num_biases * buckets,
        "mlp": (encoder + decoder) * (3 if gated else 2) * hidden * width,
        "norms": (2 * encoder + 3 * decoder + 2) * hidden,
    }


def _bart(fields: Fields, model_type: str) -> dict[str, int]:
    hidden = fields.integer("d_model")
    encoder, decoder = fields.integer("encoder_layers"), fields.integer("decoder_layers")
    attention = 4 * hidden * hidden + (3 if model_type == "whisper" else 4) * hidden
    widths = encoder * fields.integer("encoder_ffn_dim"), decoder * fields.integer("decoder_ffn_dim")
    mlp = sum(2 * hidden * width + width for width in widths) + (encoder + decoder) * hidden
    norms = (2 * encoder + 3 * decoder + 2) * 2 * hidden
    parts = {"embedding": fields.integer("vocab_size") * hidden, "mlp": mlp, "norms": norms}
    parts["attention"] = (encoder + 2 * decoder) * attention
    if model_type == "whisper":
        positions = fields.integer("max_source_positions") + fields.integer("max_target_positions")
        mel = fields.integer("num_mel_bins")
        parts["embedding"] += positions * hidden + 3 * hidden * (mel + hidden) + 2 * hidden
        return parts
    positions = fields.integer("max_position_embeddings") + 2
    parts["embedding"] += 2 * positions * hidden
    if model_type == "mbart":
        parts["norms"] += 4 * hidden
    return parts
