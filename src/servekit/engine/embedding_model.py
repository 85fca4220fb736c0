"""From a model folder to an Embedder: which model embeds or scores, how it pools, and how long a text may be."""

import math
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch

from servekit.config import EngineConfig
from servekit.engine.attention.select import select_attention
from servekit.engine.device.base import Device
from servekit.engine.embed_runner import Head, HiddenStates, ModelEmbedRunner
from servekit.engine.embed_split import SplitEmbedRunner
from servekit.engine.embedder import Embedder
from servekit.engine.graphs import GraphCache, plan_graphs
from servekit.engine.layers.packed import unquantised_format
from servekit.engine.models.build import build_decoder
from servekit.engine.models.build_encoder import build_classifier, build_encoder, encoder_attention_shapes
from servekit.engine.models.embedding_head import EmbeddingHead
from servekit.engine.models.encoder_parameters import expected_encoder_parameters
from servekit.engine.models.native_decoder import NativeDecoder
from servekit.engine.models.native_encoder import build_native_encoder, native_encoder_problem
from servekit.engine.models.pack_decoder import pack_decoder
from servekit.engine.models.parameters import canonical_name, expected_parameters
from servekit.engine.models.token_score import TokenScore
from servekit.engine.models.weights import WeightSource
from servekit.engine.native.kernels import BFLOAT16_ISAS, Kernels
from servekit.engine.native.quantiser import Quantiser
from servekit.engine.open_embedder import OpenEmbedder
from servekit.engine.spec.attention import AttentionShape, attention_shapes
from servekit.engine.spec.decoder import DecoderSpec
from servekit.engine.spec.encoder import EncoderSpec
from servekit.engine.spec.token_score import TokenScoreSpec
from servekit.engine.step import EmbedRunner
from servekit.engine.text.input_encoder import InputEncoder
from servekit.engine.text.pair_prompt import PairPromptEncoder
from servekit.engine.text.tokenizer import load_backend
from servekit.errors import ConfigError, ModelError

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class BuiltEmbedder:
    """An embedder with its weights, and what was decided on the way. `graph_memory` is what its graphs may take."""

    embedder: Embedder
    opened: OpenEmbedder
    dtype: str
    attention: str
    weights_bytes: int
    graph_memory: int = 0

    @property
    def num_parameters(self) -> int:
        """Numbers in the model's tensors."""
        spec = self.opened.spec
        shapes = expected_encoder_parameters(spec) if isinstance(spec, EncoderSpec) else expected_parameters(spec)
        return sum(math.prod(shape) for shape in shapes.values())

    def props(self) -> dict[str, Any]:
        """What `GET /props` shows of it."""
        spec = self.opened.embedding
        return {
            "model": self.embedder.model_name,
            "family": self.opened.spec.family,
            "task": "score" if spec is None else "embed",
            "dtype": self.dtype,
            "attention": self.attention,
            "max_tokens": self.embedder.max_tokens,
            "size": self.embedder.size,
            "pooling": None if spec is None else asdict(spec),
        }


def build_embedder(
    opened: OpenEmbedder,
    config: EngineConfig,
    device: Device,
    max_tokens: int | None,
    *,
    kernels: Kernels | None = None,
) -> BuiltEmbedder:
    """Load the weights. `config` is resolved; `max_tokens` overrides what the files say of the longest text.

    The `kernels` compute the model if given, which `runs_on_kernels` must allow.
    """
    spec, limit = opened.spec, opened.max_tokens
    if max_tokens is not None:
        if max_tokens > spec.max_position_embeddings:
            raise ConfigError(
                f"--max-model-len {max_tokens} is more than the {spec.max_position_embeddings} positions of the model",
                param="max_model_len",
            )
        limit = max_tokens
    dtype, torch_device = _DTYPES[config.dtype], device.torch_device
    shapes: list[AttentionShape] = (
        encoder_attention_shapes(spec) if isinstance(spec, EncoderSpec) else attention_shapes(spec)
    )
    choice = "auto" if kernels is not None else config.attention
    backend, why = select_attention(choice, shapes, dtype, torch_device)
    linear, _ = unquantised_format(dtype, torch_device)
    graph_memory, _ = plan_graphs(device, backend, replace(config, graph_warmup=False))
    graphs = None
    if graph_memory:
        graphs = GraphCache(device, memory=graph_memory, max_num_seqs=1, max_context_len=limit)
    shared: dict[str, Any] = {"linear": linear, "dtype": dtype, "device": torch_device}
    hidden_states: HiddenStates
    head: Head
    with torch.inference_mode():
        if kernels is not None:
            hidden_states, nbytes = _on_kernels(spec, opened.source, kernels, limit)
            why = f"native: {kernels.isa} kernels"
        elif isinstance(spec, EncoderSpec):
            encoder = build_encoder(spec, opened.source, backend=backend, max_positions=limit, **shared)
            hidden_states, nbytes = encoder.forward, encoder.nbytes
        else:
            decoder = build_decoder(
                spec, opened.source, backend=backend, max_positions=limit, with_head=False, **shared
            )
            hidden_states, nbytes = (lambda batch: decoder.forward(batch, None)), decoder.nbytes
        if isinstance(spec, DecoderSpec) and opened.token_score is not None:
            head, size = _token_score(opened, opened.token_score, spec, torch_device), 1
        elif opened.embedding is None:
            assert isinstance(spec, EncoderSpec)
            head, size = build_classifier(spec, opened.source, **shared), 1
        else:
            head = EmbeddingHead(opened.embedding, opened.files.directory, spec.hidden_size, torch_device)
            size = head.size
    opened.source.close()
    encoder_of_texts = _encoder_of_texts(opened)
    if encoder_of_texts.vocab_size > spec.vocab_size:
        raise ModelError(
            f"the tokenizer has {encoder_of_texts.vocab_size} tokens, but the model only {spec.vocab_size}"
        )
    embedder = Embedder(
        model_name=opened.files.name,
        encoder=encoder_of_texts,
        runner=_runner(
            ModelEmbedRunner(hidden_states, head, device, graphs=graphs, kernels=kernels), config, device, kernels
        ),
        spec=opened.embedding,
        vocab_size=spec.vocab_size,
        max_tokens=limit,
        size=size,
        any_size=config.matryoshka,
        queue_limit=config.queue_limit,
    )
    return BuiltEmbedder(embedder, opened, config.dtype, why, nbytes, graph_memory)


def runs_on_kernels(spec: EncoderSpec | DecoderSpec, config: EngineConfig, isa: str) -> bool:
    """Whether the CPU kernels of an instruction set compute such a model, and faster than torch: in bfloat16."""
    is_known = isinstance(spec, DecoderSpec) or native_encoder_problem(spec) is None
    wanted = config.dtype == "bfloat16" and config.attention in ("auto", "native") and config.device == "cpu"
    return is_known and wanted and isa in BFLOAT16_ISAS


def _on_kernels(
    spec: EncoderSpec | DecoderSpec, source: WeightSource, kernels: Kernels, limit: int
) -> tuple[HiddenStates, int]:
    """The model in bfloat16 on the CPU kernels, and its bytes."""
    if isinstance(spec, EncoderSpec):
        encoder = build_native_encoder(spec, source, kernels, max_positions=limit)
        return encoder.forward, encoder.nbytes
    weights = pack_decoder(spec, source, Quantiser(kernels.library, "bfloat16"), with_head=False)
    decoder = NativeDecoder(spec, weights, kernels, limit)
    return (lambda batch: torch.from_numpy(decoder.forward(batch.on_host(), None))), decoder.nbytes


def _encoder_of_texts(opened: OpenEmbedder) -> InputEncoder:
    if opened.token_score is not None and opened.embedding is None:
        return PairPromptEncoder.from_model(opened.files.directory, opened.token_score)
    lower_case = opened.embedding is not None and opened.embedding.lower_case
    return InputEncoder.from_directory(opened.files.directory, lower_case=lower_case)


def _token_score(opened: OpenEmbedder, score: TokenScoreSpec, spec: DecoderSpec, device: torch.device) -> TokenScore:
    """The head that compares two rows of the output matrix, which for tied models is the embedding."""
    vocabulary = load_backend(opened.files.directory)
    tokens = [score.true_token, *([] if score.false_token is None else [score.false_token])]
    ids = [vocabulary.token_to_id(token) if isinstance(token, str) else token for token in tokens]
    if any(i is None or not 0 <= i < spec.vocab_size for i in ids):
        raise ModelError(f"the tokens {tokens} that the score is made of are not in the model's vocabulary")
    plain = "model.embed_tokens.weight" if spec.tie_embeddings else "lm_head.weight"
    name = next(name for name in opened.source.shapes() if canonical_name(name) == plain)
    rows = opened.source.load(name)[ids].to(device, torch.float32, copy=True)
    return TokenScore(rows, softcap=spec.logits_softcap, is_probability=score.score_activation == "sigmoid")


def _runner(model: ModelEmbedRunner, config: EngineConfig, device: Device, kernels: Kernels | None) -> EmbedRunner:
    """On a CPU of several cores each computes texts of its own; the kernels share every product among theirs."""
    num_threads = config.threads or 1
    is_split = device.kind == "cpu" and num_threads > 1 and kernels is None
    return SplitEmbedRunner(model, num_threads) if is_split else model
