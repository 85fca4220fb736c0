"""NativeEncoder: what Encoder is in bfloat16, computed by the CPU kernels of engine/native in one call a step.

It must not know how its batch was put together.
"""

from collections.abc import Iterator
from typing import Any

import torch

from servekit.engine.batch import Batch
from servekit.engine.layers.linear import Dense, DenseWeight, Weight, as_numbers
from servekit.engine.models.build_encoder import encoder_attention_shapes, encoder_tables
from servekit.engine.models.encoder import EncoderTables, summed_embeddings
from servekit.engine.models.encoder_parameters import canonical_names
from servekit.engine.models.native_parts import attention_struct, rotary_tables, step_struct
from servekit.engine.models.parts import Parts
from servekit.engine.models.weights import WeightSource
from servekit.engine.native import structs
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.matrix import FloatArray, PackedMatrix, aligned
from servekit.engine.native.quantiser import Quantiser
from servekit.engine.native.weights import PackedWeights
from servekit.engine.spec.encoder import EncoderSpec

_CPU = torch.device("cpu")


def native_encoder_problem(spec: EncoderSpec) -> str | None:
    """Why an encoder cannot be computed by the kernels; None when it can."""
    return "the kernels know no learned bias by distance" if spec.num_relative_buckets else None


class NativeEncoder:
    """Token ids in, hidden states out; a batch without KV cache is attended within itself, both ways.

    Inputs and weights of matrix products are bfloat16; norms, rotations and the residual stream are float32.
    """

    def __init__(
        self, spec: EncoderSpec, tables: EncoderTables, weights: PackedWeights, kernels: Kernels, max_positions: int
    ) -> None:
        self.spec = spec
        self._embeddings = tables
        self._weights = weights  # owns the memory that every struct points into
        self._kernels = kernels
        self._rotations = rotary_tables(spec.ropes, spec.head_dim, max_positions)
        self._layers = (structs.EncoderLayer * spec.num_layers)()
        for index, (shape, rope) in enumerate(zip(encoder_attention_shapes(spec), spec.ropes, strict=True)):
            layer = self._layers[index]
            if rope is not None:
                layer.cos, layer.sin = (array.ctypes.data for array in self._rotations[rope])
            layer.attention = attention_struct(shape)
            self._fill_norms(layer, f"{index}.", "attention_norm", "mlp_norm")
            for name in ("qkv", "output", "up", "down"):
                setattr(layer, name, weights.matrices[f"{index}.{name}"].struct())
        self._encoder = structs.Encoder(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            activation=structs.ACTIVATIONS[spec.activation],
            pre_norm=spec.pre_norm,
            gated=spec.gated,
            eps=spec.norm_eps,
            layers=self._layers,
        )
        self._fill_norms(self._encoder, "", "embedding_norm", "final_norm")

    @property
    def nbytes(self) -> int:
        """What embeddings and matrices occupy; the norms are too small to count."""
        return self._embeddings.nbytes + self._weights.nbytes

    def forward(self, batch: Batch) -> torch.Tensor:
        """Hidden states [T, hidden] of every token, in float32."""
        x = summed_embeddings(self.spec, self._embeddings, batch).contiguous()
        host = batch.on_host()
        starts = host.cu_seqlens_q
        self._kernels.encode(self._encoder, step_struct(host, starts), x.data_ptr())
        return x

    def _fill_norms(self, target: Any, prefix: str, *names: str) -> None:
        """Weight and bias of each norm that the family has."""
        for name in names:
            for field in (name, f"{name}_bias"):
                vector = self._weights.vectors.get(prefix + field)
                setattr(target, field, None if vector is None else vector.ctypes.data)


def build_native_encoder(
    spec: EncoderSpec, source: WeightSource, kernels: Kernels, *, max_positions: int
) -> NativeEncoder:
    """The encoder with its weights packed. `check_encoder_parameters` has passed, so every name is there."""
    names = canonical_names(spec, source.shapes())
    parts = Parts(source, names, Dense(torch.bfloat16, _CPU), torch.bfloat16, _CPU)
    quantiser = Quantiser(kernels.library, "bfloat16")
    matrices: dict[str, PackedMatrix] = {}
    for name, projections, has_bias in _matrices(spec):
        weights: list[Weight] = [parts.weight(projection) for projection in projections]
        biases = [parts.float32(f"{projection}.bias") for projection in projections] if has_bias else None
        is_up = name.endswith(".up")
        if is_up and spec.up_is_fused:
            weights = [DenseWeight(half) for half in weights[0].dense().chunk(2)]
            biases = None if biases is None else list(biases[0].chunk(2))
        numbers = None if biases is None else [as_numbers(bias) for bias in biases]
        matrices[name], _ = quantiser.pack(weights, numbers, alternating=is_up)
    vectors: dict[str, FloatArray] = {}
    for name, norm in _norms(spec):
        vectors[name] = aligned(parts.float32(f"{norm}.weight").numpy())
        if spec.norm_bias:
            vectors[f"{name}_bias"] = aligned(parts.float32(f"{norm}.bias").numpy())
    tables = encoder_tables(spec, parts, max_positions)
    return NativeEncoder(spec, tables, PackedWeights(matrices, vectors), kernels, max_positions)


def _matrices(spec: EncoderSpec) -> Iterator[tuple[str, list[str], bool]]:
    """Each packed matrix: its name, the projections it is made of, and whether they have a bias."""
    names = spec.names
    for index in range(spec.num_layers):
        layer = f"{names.layers}{index}."
        yield f"{index}.qkv", [layer + name for name in names.qkv], spec.attention_bias
        yield f"{index}.output", [layer + names.output], spec.attention_bias
        yield f"{index}.up", [layer + name for name in names.up], spec.mlp_bias
        yield f"{index}.down", [layer + names.down], spec.mlp_bias


def _norms(spec: EncoderSpec) -> Iterator[tuple[str, str]]:
    """Each norm: its name here, and in the checkpoint."""
    names = spec.names
    yield "embedding_norm", names.embedding_norm
    for index in range(spec.num_layers):
        layer = f"{names.layers}{index}."
        if index or not spec.pre_norm:
            yield f"{index}.attention_norm", layer + names.attention_norm
        yield f"{index}.mlp_norm", layer + names.mlp_norm
    if spec.pre_norm:
        yield "final_norm", names.final_norm
