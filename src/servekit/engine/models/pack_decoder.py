"""Packs a checkpoint for the native decoder: every matrix quantised, every norm in float32 with its offset.

Matrices and vectors are named by what they do: `3.qkv`, `3.gate_up`, `3.input_norm`, `embedding`, `head`, `final_norm`.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from servekit.engine.models.parameters import canonical_name
from servekit.engine.models.weights import Progress, SourceRows, WeightSource
from servekit.engine.native.matrix import FloatArray, PackedMatrix, aligned
from servekit.engine.native.quantiser import Quantiser
from servekit.engine.native.weights import PackedWeights
from servekit.engine.spec.decoder import DecoderSpec


@dataclass(frozen=True, slots=True)
class _Matrix:
    """One packed matrix to be: which projections of the checkpoint it is made of."""

    name: str
    parts: tuple[str, ...]
    has_bias: bool = False
    is_head: bool = False
    alternating: bool = False


def pack_decoder(
    spec: DecoderSpec,
    source: WeightSource,
    quantiser: Quantiser,
    *,
    threads: int = 1,
    with_head: bool = True,
    progress: Progress | None = None,
) -> PackedWeights:
    """Pack all matrices, `threads` at a time. `check_parameters` has passed, so every name is there.

    `with_head` False spares the output matrix where only hidden states are wanted.
    """
    names = {plain: name for name in source.shapes() if (plain := canonical_name(name)) is not None}

    def load(name: str) -> FloatArray:
        return source.numbers(names[name])

    def pack(matrix: _Matrix) -> tuple[PackedMatrix, float]:
        weights = [SourceRows(source, names[f"{part}.weight"]) for part in matrix.parts]
        biases = [load(f"{part}.bias") for part in matrix.parts] if matrix.has_bias else None
        return quantiser.pack(weights, biases, is_head=matrix.is_head, alternating=matrix.alternating)

    packed = PackedWeights({}, _vectors(spec, load))
    matrices = list(_matrices(spec, with_head=with_head))
    with ThreadPoolExecutor(threads) as pool:
        for matrix, (result, error) in zip(matrices, pool.map(pack, matrices), strict=True):
            packed.matrices[matrix.name] = result
            if error:
                packed.errors[matrix.name] = error
            if progress is not None and matrix.name.endswith(".down"):
                progress(int(matrix.name.split(".")[0]) + 1, spec.num_layers)
    return packed


def _matrices(spec: DecoderSpec, *, with_head: bool) -> Iterator[_Matrix]:
    for index in range(spec.num_layers):
        attention, mlp = f"model.layers.{index}.self_attn.", f"model.layers.{index}.mlp."
        qkv = (f"{attention}q_proj", f"{attention}k_proj", f"{attention}v_proj")
        yield _Matrix(f"{index}.qkv", qkv, has_bias=spec.qkv_bias)
        yield _Matrix(f"{index}.output", (f"{attention}o_proj",), has_bias=spec.output_bias)
        gate_up = (f"{mlp}gate_proj", f"{mlp}up_proj")
        yield _Matrix(f"{index}.gate_up", gate_up, has_bias=spec.mlp_bias, alternating=True)
        yield _Matrix(f"{index}.down", (f"{mlp}down_proj",), has_bias=spec.mlp_bias)
    yield _Matrix("embedding", ("model.embed_tokens",), is_head=True)
    # A tied head is the embedding itself.
    if with_head and not spec.tie_embeddings:
        yield _Matrix("head", ("lm_head",), is_head=True)


def _vectors(spec: DecoderSpec, load: Callable[[str], FloatArray]) -> dict[str, FloatArray]:
    """Norm weights, with the offset that the family stores them without; those of q and k heads side by side."""

    def norm(name: str) -> FloatArray:
        return load(f"{name}.weight") + np.float32(spec.norm_offset)

    found = {"final_norm": norm("model.norm")}
    for index in range(spec.num_layers):
        layer = f"model.layers.{index}."
        found[f"{index}.input_norm"] = norm(f"{layer}input_layernorm")
        # In the families with norms on both sides this is attention's own; in the others, the one before the MLP.
        after = "post_attention_norm" if spec.post_norms else "mlp_norm"
        found[f"{index}.{after}"] = norm(f"{layer}post_attention_layernorm")
        if spec.post_norms:
            found[f"{index}.mlp_norm"] = norm(f"{layer}pre_feedforward_layernorm")
            found[f"{index}.post_mlp_norm"] = norm(f"{layer}post_feedforward_layernorm")
        if spec.qk_norm:
            q, k = (norm(f"{layer}self_attn.{part}_norm") for part in "qk")
            found[f"{index}.qk_norm"] = np.concatenate(
                (np.tile(q, (spec.num_heads, 1)), np.tile(k, (spec.num_kv_heads, 1)))
            )
    return {name: aligned(vector) for name, vector in found.items()}
