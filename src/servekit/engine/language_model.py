"""Which weights and which kernels compute a language model, and the model made of them."""

from dataclasses import dataclass, replace
from typing import Any, TypeGuard

import torch

from servekit.config import EngineConfig, QuantizeChoice
from servekit.engine.attention.base import AttentionBackend
from servekit.engine.attention.select import select_attention
from servekit.engine.auto import QuantizeFacts, Reasons, check_rounding, resolve_quantize
from servekit.engine.device.base import Device
from servekit.engine.layers.linear import LinearFormat
from servekit.engine.layers.packed import unquantised_format
from servekit.engine.layers.quantised import IntBits, Quantised
from servekit.engine.layers.scaled import scaled_format
from servekit.engine.models.build import Progress, attention_shapes, build_decoder
from servekit.engine.models.decoder import LanguageModel
from servekit.engine.models.native_decoder import NativeDecoder
from servekit.engine.models.parameters import canonical_name
from servekit.engine.models.weights import WeightSource
from servekit.engine.native.kernels import BFLOAT16_ISAS, Kernels
from servekit.engine.native.library import Library, load_library
from servekit.engine.native.weights import PackedWeights
from servekit.engine.packed_weights import packed_weights
from servekit.engine.resolve import resolve_on_device
from servekit.engine.spec.decoder import DecoderSpec
from servekit.store.resolve import LocalModel

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


@dataclass(frozen=True, slots=True)
class BlockSizes:
    """What attention asks of KV blocks: a divisor of their size, and the size it does best with."""

    multiple: int
    default: int


_NATIVE_BLOCKS = BlockSizes(multiple=1, default=16)


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model with its weights. `kernels` are those of engine/native if it computes with them, to be closed once.

    `where` is the file of the library, or why there is none.
    """

    model: LanguageModel
    config: EngineConfig
    reasons: Reasons
    backend: AttentionBackend[Any] | None
    kernels: Kernels | None
    library: Library | None
    where: str

    @property
    def blocks(self) -> BlockSizes:
        """What attention asks of KV blocks."""
        backend = self.backend
        return (
            _NATIVE_BLOCKS if backend is None else BlockSizes(backend.block_size_multiple, backend.default_block_size)
        )

    def describe(self) -> dict[str, Any]:
        """What `GET /props` shows of the kernels: those that run, those that could, and why."""
        return {
            "running": "torch" if self.kernels is None else self.kernels.isa,
            "available": [] if self.library is None else list(self.library.isas),
            "library": self.where,
            "why": self.reasons["quantize"],
        }


def load_language_model(
    files: LocalModel,
    spec: DecoderSpec,
    source: WeightSource,
    config: EngineConfig,
    device: Device,
    progress: Progress | None = None,
) -> LoadedModel:
    """Resolve how to compute, and load the weights. Raises ConfigError for what cannot be honoured here."""
    library, where = load_library() if device.kind == "cpu" else (None, "the kernels are for CPUs")
    isa = library.isas[0] if library else None
    facts = QuantizeFacts(device.kind, None if library else where, _stored(source), isa in BFLOAT16_ISAS)
    quantize, why = resolve_quantize(config, facts)
    packed = None
    if library is not None and _is_packed(quantize) and config.attention in ("auto", "native"):
        threads = config.threads or device.default_threads()
        packed = packed_weights(files, spec, source, library, quantize, threads, progress)
        if config.quantize == "auto":
            quantize, why = check_rounding(config, quantize, why, packed.worst())
            packed = packed if _is_packed(quantize) else None
    config, reasons = resolve_on_device(replace(config, quantize=quantize), device, spec.max_position_embeddings)
    reasons["quantize"] = why
    assert config.threads is not None
    if library is not None and _is_native_bfloat16(config, facts):
        packed = packed_weights(files, spec, source, library, "bfloat16", config.threads, progress)

    loading = _Loading(spec, source, device, progress, library, where, config, reasons)
    if library is None or (packed is None and not _is_packed(quantize)):
        linear, reasons["linear"] = _torch_format(config, device)
        return loading.in_torch(linear, None)
    # Two pools of threads on the same cores would take turns at waiting for each other, so torch's has one.
    torch.set_num_threads(1)
    kernels = Kernels(library, config.threads)
    if packed is not None:
        return loading.native(packed, kernels)
    assert _is_packed(quantize)
    return loading.in_torch(Quantised(kernels, quantize), kernels)


@dataclass(frozen=True, slots=True)
class _Loading:
    """What is known once everything is resolved, and the two kinds of model that can be made of it."""

    spec: DecoderSpec
    source: WeightSource
    device: Device
    progress: Progress | None
    library: Library | None
    where: str
    config: EngineConfig
    reasons: Reasons

    def native(self, packed: PackedWeights, kernels: Kernels) -> LoadedModel:
        """All of it on the kernels."""
        assert self.config.max_model_len is not None
        self.reasons["attention"] = f"native: the {kernels.isa} kernels read the pages as they lie"
        model = NativeDecoder(self.spec, packed, kernels, self.config.max_model_len)
        return self._loaded(model, None, kernels)

    def in_torch(self, linear: LinearFormat, kernels: Kernels | None) -> LoadedModel:
        """In torch, with the matrix products of `linear`; `kernels` are those that it uses."""
        spec, config, device = self.spec, self.config, self.device.torch_device
        assert config.max_model_len is not None
        dtype = _DTYPES[config.dtype]
        backend, self.reasons["attention"] = select_attention(config.attention, attention_shapes(spec), dtype, device)
        with torch.inference_mode():
            model = build_decoder(
                spec,
                self.source,
                linear=linear,
                backend=backend,
                dtype=dtype,
                device=device,
                max_positions=config.max_model_len,
                progress=self.progress,
            )
        return self._loaded(model, backend, kernels)

    def _loaded(
        self, model: LanguageModel, backend: AttentionBackend[Any] | None, kernels: Kernels | None
    ) -> LoadedModel:
        attention = "native" if backend is None else backend.name
        config = replace(self.config, attention=attention)  # type: ignore[arg-type]  # all names are choices
        return LoadedModel(model, config, self.reasons, backend, kernels, self.library, self.where)


def _torch_format(config: EngineConfig, device: Device) -> tuple[LinearFormat, str]:
    dtype = _DTYPES[config.dtype]
    if config.quantize in ("int8", "fp8"):
        return scaled_format(config.quantize, dtype, device.torch_device)
    return unquantised_format(dtype, device.torch_device)


def _is_packed(quantize: QuantizeChoice) -> TypeGuard[IntBits]:
    return quantize in ("int8", "int4")


def _is_native_bfloat16(config: EngineConfig, facts: QuantizeFacts) -> bool:
    """Whether weights that are not quantised are for the kernels all the same."""
    is_open = config.attention in ("auto", "native") and config.quantize == "none"
    return is_open and config.dtype == "bfloat16" and config.device == "cpu" and facts.bfloat16


def _stored(source: WeightSource) -> frozenset[str]:
    """What the projections of all layers are stored in."""
    return frozenset(
        source.stored(name)
        for name, shape in source.shapes().items()
        if len(shape) == 2 and (canonical_name(name) or "").startswith("model.layers.")
    )
