"""config.json -> EncoderSpec, by `model_type`. Families are rows of data here, not files of code."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from servekit.engine.spec.encoder import ClassifierSpec, EncoderNames, EncoderSpec
from servekit.engine.spec.fields import Fields
from servekit.engine.spec.rope import RopeSpec, read_rope
from servekit.errors import ModelError

_BERT = EncoderNames(
    prefixes=("bert.", "roberta."),
    embedding_norm="embeddings.LayerNorm",
    layers="encoder.layer.",
    qkv=("attention.self.query", "attention.self.key", "attention.self.value"),
    output="attention.output.dense",
    attention_norm="attention.output.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
_DISTILBERT = EncoderNames(
    prefixes=("distilbert.",),
    embedding_norm="embeddings.LayerNorm",
    layers="transformer.layer.",
    qkv=("attention.q_lin", "attention.k_lin", "attention.v_lin"),
    output="attention.out_lin",
    attention_norm="sa_layer_norm",
    up=("ffn.lin1",),
    down="ffn.lin2",
    mlp_norm="output_layer_norm",
)
_MPNET = EncoderNames(
    prefixes=("mpnet.",),
    embedding_norm="embeddings.LayerNorm",
    layers="encoder.layer.",
    qkv=("attention.attn.q", "attention.attn.k", "attention.attn.v"),
    output="attention.attn.o",
    attention_norm="attention.LayerNorm",
    up=("intermediate.dense",),
    down="output.dense",
    mlp_norm="output.LayerNorm",
)
_MODERNBERT = EncoderNames(
    prefixes=("model.",),
    word_embedding="embeddings.tok_embeddings",
    embedding_norm="embeddings.norm",
    layers="layers.",
    qkv=("attn.Wqkv",),
    output="attn.Wo",
    attention_norm="attn_norm",
    up=("mlp.Wi",),
    down="mlp.Wo",
    mlp_norm="mlp_norm",
)
_NOMIC = EncoderNames(
    prefixes=("bert.", "nomic_bert."),
    embedding_norm="emb_ln",
    layers="encoder.layers.",
    qkv=("attn.Wqkv",),
    output="attn.out_proj",
    attention_norm="norm1",
    up=("mlp.fc12", "mlp.fc11"),
    down="mlp.fc2",
    mlp_norm="norm2",
)


def is_encoder(config: Mapping[str, Any]) -> bool:
    """Whether the config is of a family that can only embed."""
    return config.get("model_type") in _FAMILIES


def encoder_families() -> list[str]:
    """Their names, as config.json has them."""
    return sorted(_FAMILIES)


def read_encoder_spec(config: Mapping[str, Any]) -> EncoderSpec:
    """The spec of a config.json. Raises ModelError naming the field for what is missing, absurd or not offered."""
    fields = Fields(config)
    fields.refuse("quantization_config", None)
    spec = _FAMILIES[config["model_type"]](fields)
    if spec.hidden_size % spec.num_heads:
        raise ModelError(f"config.json: hidden_size {spec.hidden_size} is not a multiple of {spec.num_heads} heads")
    if spec.head_dim % 2 and any(spec.ropes):
        raise ModelError(f"config.json: heads of {spec.head_dim} are odd, and rotary embeddings need pairs")
    return spec


def _base(fields: Fields, family: str, names: EncoderNames, **differences: Any) -> EncoderSpec:
    """What all families share: BERT. `differences` are the fields in which one departs from it."""
    shared: dict[str, Any] = {}
    for own, theirs in (
        ("vocab_size", "vocab_size"),
        ("hidden_size", "hidden_size"),
        ("intermediate_size", "intermediate_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_heads", "num_attention_heads"),
    ):
        if own not in differences:
            shared[own] = fields.integer(theirs)
    num_layers: int = {**shared, **differences}["num_layers"]
    if "norm_eps" not in differences:
        shared["norm_eps"] = fields.number("layer_norm_eps", 1e-12)
    if "activation" not in differences:
        shared["activation"] = fields.activation("hidden_act", default="gelu")
    plain = (None,) * num_layers
    return EncoderSpec(family=family, names=names, **{"windows": plain, "ropes": plain, **shared, **differences})


def _bert(fields: Fields) -> EncoderSpec:
    fields.refuse("position_embedding_type", "absolute")
    fields.refuse("is_decoder", False)
    positions = fields.integer("max_position_embeddings", 512)
    return _base(
        fields,
        "bert",
        _BERT,
        num_positions=positions,
        max_position_embeddings=positions,
        num_token_types=fields.integer("type_vocab_size", 2),
        classifier=_classifier(fields, "bert.pooler.dense", "tanh", "classifier"),
    )


def _roberta(fields: Fields) -> EncoderSpec:
    fields.refuse("position_embedding_type", "absolute")
    fields.refuse("is_decoder", False)
    rows = fields.integer("max_position_embeddings", 514)
    # Positions count from the row after the padding token's.
    offset = int(fields.number("pad_token_id", 1)) + 1
    return _base(
        fields,
        "roberta",
        _BERT,
        num_positions=rows,
        position_offset=offset,
        max_position_embeddings=rows - offset,
        num_token_types=fields.integer("type_vocab_size", 1),
        classifier=_classifier(fields, "classifier.dense", "tanh", "classifier.out_proj"),
    )


def _distilbert(fields: Fields) -> EncoderSpec:
    fields.refuse("sinusoidal_pos_embds", False)
    positions = fields.integer("max_position_embeddings", 512)
    return _base(
        fields,
        "distilbert",
        _DISTILBERT,
        hidden_size=fields.integer("dim", 768),
        intermediate_size=fields.integer("hidden_dim", 3072),
        num_layers=fields.integer("n_layers", 6),
        num_heads=fields.integer("n_heads", 12),
        norm_eps=1e-12,
        activation=fields.activation("activation", default="gelu"),
        num_positions=positions,
        max_position_embeddings=positions,
        classifier=_classifier(fields, "pre_classifier", "relu", "classifier"),
    )


def _mpnet(fields: Fields) -> EncoderSpec:
    rows = fields.integer("max_position_embeddings", 512)
    return _base(
        fields,
        "mpnet",
        _MPNET,
        num_positions=rows,
        position_offset=2,  # the family's padding token is 1, whatever the config says
        max_position_embeddings=rows - 2,
        num_relative_buckets=fields.integer("relative_attention_num_buckets", 32),
        classifier=_classifier(fields, "classifier.dense", "tanh", "classifier.out_proj"),
    )


def _modernbert(fields: Fields) -> EncoderSpec:
    num_layers = fields.integer("num_hidden_layers")
    types = fields.layer_types()
    period = fields.integer("global_attn_every_n_layers", 3)
    slides = [kind == "sliding_attention" for kind in types] if types else [bool(i % period) for i in range(num_layers)]
    full, local = _modernbert_ropes(fields)
    # The window counts both sides: half of it either way, and the token itself.
    window = fields.integer("local_attention", 128) // 2 + 1
    mlp_bias, bias = fields.flag("mlp_bias", False), fields.flag("norm_bias", False)
    pooling = fields.config.get("classifier_pooling", "cls")
    classifier = _classifier(
        fields,
        "head.dense",
        "gelu",
        "classifier",
        pooling="mean" if pooling == "mean" else "cls",
        norm="head.norm",
        dense_bias=fields.flag("classifier_bias", False),
    )
    if classifier is not None:
        fields.refuse("classifier_activation", "gelu")
    return _base(
        fields,
        "modernbert",
        _MODERNBERT,
        norm_eps=fields.number("norm_eps", 1e-5),
        activation=fields.activation("hidden_activation", default="gelu"),
        max_position_embeddings=fields.integer("max_position_embeddings", 8192),
        pre_norm=True,
        gated=True,
        up_is_fused=True,
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=mlp_bias,
        norm_bias=bias,
        windows=tuple(window if s else None for s in slides),
        ropes=tuple(local if s else full for s in slides),
        classifier=classifier,
    )


def _modernbert_ropes(fields: Fields) -> tuple[RopeSpec, RopeSpec]:
    """Of full and of sliding layers: nested by layer type, or under the older names."""
    nested = fields.config.get("rope_parameters")
    if isinstance(nested, Mapping):
        full, local = nested.get("full_attention") or {}, nested.get("sliding_attention") or {}
    else:
        full = {"rope_theta": fields.number("global_rope_theta", 160_000.0)}
        local = {"rope_theta": fields.number("local_rope_theta", 10_000.0)}
    return (
        read_rope({"rope_parameters": full}, theta_default=160_000.0),
        read_rope({"rope_parameters": local}, theta_default=10_000.0),
    )


def _nomic(fields: Fields) -> EncoderSpec:
    """Both spellings of the config: the authors' own (n_embd, n_layer, ...) and transformers'."""
    for name, allowed in (
        ("prenorm", False),
        ("rotary_emb_fraction", 1.0),
        ("rotary_emb_interleaved", False),
        ("rotary_emb_scale_base", None),
        ("rotary_scaling_factor", None),
        ("qkv_proj_bias", False),
        ("mlp_fc1_bias", False),
        ("mlp_fc2_bias", False),
        ("use_rms_norm", False),
        ("parallel_block", False),
        ("moe_every_n_layers", -1),
    ):
        fields.refuse(name, allowed)
    if "n_embd" in fields.config:
        fields.refuse("activation_function", "swiglu")
        num_layers = fields.integer("n_layer")
        rope = RopeSpec(fields.number("rotary_emb_base", 10_000.0))
        differences: dict[str, Any] = {
            "hidden_size": fields.integer("n_embd"),
            "intermediate_size": fields.integer("n_inner"),
            "num_layers": num_layers,
            "num_heads": fields.integer("n_head"),
            "norm_eps": fields.number("layer_norm_epsilon", 1e-12),
            "activation": "silu",
            "max_position_embeddings": fields.integer("n_positions", 8192),
        }
    else:
        num_layers = fields.integer("num_hidden_layers")
        rope = read_rope(fields.config, theta_default=1000.0)
        differences = {
            "activation": fields.activation("hidden_act", default="silu"),
            "max_position_embeddings": fields.integer("max_position_embeddings", 2048),
        }
    return _base(
        fields,
        "nomic_bert",
        _NOMIC,
        gated=True,
        attention_bias=False,
        mlp_bias=False,
        num_token_types=fields.integer("type_vocab_size", 2),
        ropes=(rope,) * num_layers,
        **differences,
    )


def _classifier(
    fields: Fields, dense: str, activation: Literal["tanh", "relu", "gelu"], out: str, **differences: Any
) -> ClassifierSpec | None:
    """The head of a checkpoint made for classification; None for any other."""
    architectures = fields.config.get("architectures") or []
    if not any(str(name).endswith("ForSequenceClassification") for name in architectures):
        return None
    labels = fields.config.get("id2label")
    num_labels = len(labels) if isinstance(labels, Mapping) else fields.integer("num_labels", 2)
    if num_labels != 1:
        raise ModelError(
            f"config.json: the classifier has {num_labels} labels, and only one that scores a pair can be served"
        )
    return ClassifierSpec(
        **{
            "pooling": "cls",
            "dense": dense,
            "activation": activation,
            "out": out,
            "num_labels": num_labels,
            "score_activation": _score_activation(fields),
            **differences,
        }
    )


def _score_activation(fields: Fields) -> Literal["sigmoid", "identity"]:
    """What the checkpoint says of its scores; one label without a word is a sigmoid's."""
    nested = fields.config.get("sentence_transformers")
    named = nested.get("activation_fn") if isinstance(nested, Mapping) else None
    name = str(named or fields.config.get("sbert_ce_default_activation_function") or "Sigmoid").rsplit(".", 1)[-1]
    if name not in ("Sigmoid", "Identity"):
        raise ModelError(f"config.json: the score activation {name!r} is not known")
    return "sigmoid" if name == "Sigmoid" else "identity"


_FAMILIES: dict[str, Callable[[Fields], EncoderSpec]] = {
    "bert": _bert,
    "roberta": _roberta,
    "xlm-roberta": _roberta,
    "distilbert": _distilbert,
    "mpnet": _mpnet,
    "modernbert": _modernbert,
    "nomic_bert": _nomic,
}
