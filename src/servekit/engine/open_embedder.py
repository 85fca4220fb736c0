"""The files of an embedding model, checked against each other before anything large is read. No torch here."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from servekit.engine.models.encoder_parameters import check_encoder_parameters
from servekit.engine.models.parameters import check_parameters
from servekit.engine.models.weights import SafetensorsSource, WeightSource
from servekit.engine.spec.decoder import DecoderSpec
from servekit.engine.spec.encoder import EncoderSpec
from servekit.engine.spec.encoder_families import is_encoder, read_encoder_spec
from servekit.engine.spec.families import read_decoder_spec
from servekit.engine.spec.json_files import read_json, read_json_if_there
from servekit.engine.spec.pooling import EmbeddingSpec, has_embedding_files, read_embedding_spec
from servekit.engine.spec.token_score import TokenScoreSpec, read_token_score_spec
from servekit.errors import ModelError
from servekit.store.resolve import LocalModel


@dataclass(frozen=True, slots=True)
class OpenEmbedder:
    """An embedding model whose files have been checked against each other, with its weights still on disk.

    `embedding` is None for a cross-encoder, which scores pairs; `token_score` is there for a decoder that does.
    """

    files: LocalModel
    config: Mapping[str, Any]
    spec: EncoderSpec | DecoderSpec
    embedding: EmbeddingSpec | None
    source: WeightSource
    max_tokens: int
    token_score: TokenScoreSpec | None = None


def is_embedding_model(files: LocalModel) -> bool:
    """Whether a model that was named alone is there to embed: an encoder, or a folder with a pooling configuration."""
    if files.weights is not None:
        return False
    config = read_json(files.directory / "config.json")
    return has_embedding_files(files.directory) or is_encoder(config) or "classifier_from_token" in config


def open_embedder(files: LocalModel) -> OpenEmbedder:
    """Read configs and weight headers. Raises ModelError for anything that would keep the model from loading."""
    if files.weights is not None:
        raise ModelError(
            f"{files.name} is a GGUF file, and embedding models are read from safetensors",
            hint="give a folder with config.json and safetensors",
        )
    config = read_json(files.directory / "config.json")
    source = SafetensorsSource(files.directory)
    spec: EncoderSpec | DecoderSpec
    token_score = read_token_score_spec(files.directory, config)
    if token_score is not None and not is_encoder(config):
        spec = read_decoder_spec(config)
        check_parameters(spec, source.shapes())
        embedding = None
    elif is_encoder(config):
        spec = read_encoder_spec(config)
        check_encoder_parameters(spec, source.shapes())
        is_scorer = spec.classifier is not None
        embedding = None if is_scorer else read_embedding_spec(files.directory, config, default="mean")
    else:
        # Embedding needs no output matrix, so nothing is asked of a head.
        spec = replace(read_decoder_spec(config), tie_embeddings=True)
        check_parameters(spec, source.shapes())
        embedding = read_embedding_spec(files.directory, config, default="last" if spec.causal else "mean")
    return OpenEmbedder(files, config, spec, embedding, source, _max_tokens(files, spec, embedding), token_score)


def _max_tokens(files: LocalModel, spec: EncoderSpec | DecoderSpec, embedding: EmbeddingSpec | None) -> int:
    """The files' own limit, and no more than the model has positions."""
    if embedding is not None and embedding.max_tokens is not None:
        return min(embedding.max_tokens, spec.max_position_embeddings)
    stated = read_json_if_there(files.directory / "tokenizer_config.json").get("model_max_length")
    positions = spec.max_position_embeddings
    return min(positions, int(stated)) if isinstance(stated, int) and stated > 0 else positions
