"""The head of an embedding model: pooling, dense layers, unit length. It must not know what the vectors are for."""

from pathlib import Path

import torch

from servekit.engine.layers.linear import DenseLinear
from servekit.engine.layers.pooling import normalise, pool
from servekit.engine.models.parameters import Shape
from servekit.engine.models.weights import SafetensorsSource
from servekit.engine.spec.pooling import DenseSpec, EmbeddingSpec
from servekit.errors import ModelError


class EmbeddingHead:
    """Hidden states -> vectors in float32, as an EmbeddingSpec says."""

    def __init__(self, spec: EmbeddingSpec, directory: Path, hidden_size: int, device: torch.device) -> None:
        self._spec = spec
        self._dense = []
        self.size = hidden_size
        for dense in spec.dense:
            self._dense.append((_load_dense(dense, directory, self.size, device), dense.activation))
            self.size = dense.out_features

    def __call__(self, hidden: torch.Tensor, seq_starts: torch.Tensor) -> torch.Tensor:
        """`hidden` [T, hidden] of S texts that begin at `seq_starts` [S + 1] -> [S, size]."""
        vectors = pool(hidden, seq_starts, self._spec.pooling)
        for linear, activation in self._dense:
            vectors = linear(vectors)
            if activation == "tanh":
                vectors = torch.tanh(vectors)
        return normalise(vectors) if self._spec.normalise else vectors


def _load_dense(spec: DenseSpec, directory: Path, in_features: int, device: torch.device) -> DenseLinear:
    source = SafetensorsSource(directory / spec.folder)
    expected: dict[str, Shape] = {"linear.weight": (spec.out_features, in_features)}
    if spec.has_bias:
        expected |= {"linear.bias": (spec.out_features,)}
    if dict(source.shapes()) != expected or spec.in_features != in_features:
        raise ModelError(f"{spec.folder}: the weights of this dense layer do not fit its config.json or the model")
    tensors = {name: source.load(name).to(device, torch.float32, copy=True) for name in expected}
    source.close()
    return DenseLinear(tensors["linear.weight"], tensors.get("linear.bias"))
