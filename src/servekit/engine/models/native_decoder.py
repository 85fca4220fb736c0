"""NativeDecoder: what Decoder is, computed by the CPU kernels of engine/native in one call a step.

It must not know how its batch was scheduled, nor how its weights came to be packed.
"""

import numpy as np

from servekit.engine.host_batch import HostBatch
from servekit.engine.models.native_parts import attention_struct, rotary_tables, step_struct
from servekit.engine.native import structs
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.kv_cache import NativeKvCache
from servekit.engine.native.matrix import FloatArray, PackedMatrix
from servekit.engine.native.weights import PackedWeights
from servekit.engine.spec.attention import AttentionShape, attention_shapes
from servekit.engine.spec.decoder import DecoderSpec


class NativeDecoder:
    """Token ids in, hidden states out; `logits` turns chosen rows into scores over the vocabulary.

    Norms, rotations and the residual stream are float32, as in Decoder; the inputs of matrix products are quantised to
    eight bits in groups of 32. One thread may call it at a time. `kernels` belong to whoever opened them.
    """

    def __init__(self, spec: DecoderSpec, weights: PackedWeights, kernels: Kernels, max_positions: int) -> None:
        self.spec = spec
        self._weights = weights  # owns the memory that every struct points into
        self.kernels = kernels
        self._tables = rotary_tables(spec.ropes, spec.head_dim, max_positions)
        self._layers = (structs.Layer * spec.num_layers)()
        for index, (shape, rope) in enumerate(zip(attention_shapes(spec), spec.ropes, strict=True)):
            self._fill(self._layers[index], index, shape, self._tables[rope])
        self._decoder = structs.Decoder(
            num_layers=spec.num_layers,
            hidden=spec.hidden_size,
            activation=structs.ACTIVATIONS[spec.activation],
            eps=spec.norm_eps,
            layers=self._layers,
            final_norm=weights.vectors["final_norm"].ctypes.data,
        )
        self._embedding = weights.matrices["embedding"].struct()
        head = "embedding" if spec.tie_embeddings else "head"
        self._head = weights.matrices[head].struct() if head in weights.matrices else None
        self._cache: NativeKvCache | None = None

    @property
    def nbytes(self) -> int:
        """What the matrices occupy, embedding included; the norms are too small to count."""
        return self._weights.nbytes

    def forward(self, batch: HostBatch, cache: NativeKvCache | None) -> FloatArray:
        """Hidden states [T, hidden] of every token, normalised; keys and values are written to `cache`."""
        shape = (batch.num_tokens, self.spec.hidden_size)
        x, out = np.empty(shape, dtype=np.float32), np.empty(shape, dtype=np.float32)
        self.kernels.unpack(self._embedding, batch.input_ids.ctypes.data, batch.num_tokens, x.ctypes.data)
        if self.spec.embed_scale is not None:
            x *= np.float32(self.spec.embed_scale)
        if cache is not None and cache is not self._cache:
            self._bind(cache)
        starts = batch.cu_seqlens_q
        self.kernels.forward(self._decoder, step_struct(batch, starts), x.ctypes.data, out.ctypes.data)
        return out

    def logits(self, hidden: FloatArray, out: FloatArray | None = None) -> FloatArray:
        """`hidden` [S, hidden] -> scores [S, vocab], in `out` if given."""
        assert self._head is not None, "this decoder was built without its head"
        assert hidden.flags.c_contiguous
        num_rows = len(hidden)
        scores = np.empty((num_rows, self.spec.vocab_size), dtype=np.float32) if out is None else out
        self.kernels.linear(self._head, hidden.ctypes.data, num_rows, scores.ctypes.data)
        cap = self.spec.logits_softcap
        return scores if cap is None else np.float32(cap) * np.tanh(scores / np.float32(cap))

    def _bind(self, cache: NativeKvCache) -> None:
        """Point every layer at its part of `cache`."""
        self._cache = cache
        self._decoder.kv_dtype = cache.format
        for index, layer in enumerate(self._layers):
            layer.cache = cache.layer(index).ctypes.data

    def _fill(
        self, layer: structs.Layer, index: int, shape: AttentionShape, table: tuple[FloatArray, FloatArray]
    ) -> None:
        for name in ("input_norm", "qk_norm", "post_attention_norm", "mlp_norm", "post_mlp_norm"):
            vector = self._weights.vectors.get(f"{index}.{name}")
            setattr(layer, name, None if vector is None else vector.ctypes.data)
        layer.cos, layer.sin = (array.ctypes.data for array in table)
        layer.attention = attention_struct(shape)
        for name in ("qkv", "output", "gate_up", "down"):
            matrix: PackedMatrix = self._weights.matrices[f"{index}.{name}"]
            setattr(layer, name, matrix.struct())
