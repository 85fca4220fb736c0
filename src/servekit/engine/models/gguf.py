"""The tensors of a GGUF file under transformers' names and in transformers' layout. It must not know the model's code.

llama.cpp's conversion renames every tensor, interleaves the rows of Llama's query and key projections, and adds one to
Gemma's norm weights; all three are undone here, so that safetensors and GGUF look the same to a loader.
"""

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize
from numpy.typing import NDArray

from servekit.engine.native.matrix import ByteArray, FloatArray
from servekit.errors import ModelError
from servekit.store.gguf_config import gguf_config
from servekit.store.gguf_metadata import GgufFile, GgufTensor

if TYPE_CHECKING:
    import torch

T = TypeVar("T", np.float32, np.uint8)

# Q5_0 and Q5_1 are what "Q4_K_M" files fall back to for rows that are no multiple of 256.
_READABLE = {
    GGMLQuantizationType[name]
    for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q4_K", "Q5_K", "Q6_K")
}
_GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
_GEMMA_LAYER_NAMES = _LAYER_NAMES | {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
# Not a weight: it is read into the configuration's rope settings.
_NOT_WEIGHTS = frozenset({"rope_freqs.weight"})
_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")


class GgufSource:
    """A weight source over one memory-mapped GGUF file; `load` dequantises to float32.

    Raises ModelError when the file cannot be read, uses a storage type that is not read, holds a tensor that has no
    place in its architecture, or ends before its last tensor does.
    """

    def __init__(self, path: Path) -> None:
        self._file = GgufFile(path)
        try:
            config = gguf_config(self._file)
            self._gemma = str(config["model_type"]).startswith("gemma")
            # Only llama.cpp's Llama conversion interleaves; the other families rotate halves as transformers does.
            llama = config["model_type"] == "llama"
            self._interleaved = (
                {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]} if llama else {}
            )
            self._tensors = self._renamed()
        except ModelError:
            self._file.close()
            raise

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The shape of every tensor, by its transformers name."""
        return {name: tensor.shape for name, tensor in self._tensors.items()}

    def load(self, name: str) -> "torch.Tensor":
        """One tensor as float32; its memory is its own."""
        import torch

        return torch.from_numpy(self.numbers(name))

    def numbers(self, name: str) -> FloatArray:
        """One tensor dequantised; its memory is its own."""
        tensor = self._tensors[name]
        values = dequantize(self._raw(tensor), GGMLQuantizationType(tensor.type_id)).reshape(tensor.shape)
        values = self._in_order(name, values)
        if self._gemma and name.split(".")[-2].endswith("norm"):
            values = values - np.float32(1.0)
        return np.require(values, np.float32, ["C_CONTIGUOUS", "WRITEABLE", "OWNDATA"])

    def stored(self, name: str) -> str:
        """ggml's name of the blocks that a tensor is stored in, such as Q4_1; "float" for F32, F16 and BF16."""
        kind = GGMLQuantizationType(self._tensors[name].type_id)
        return "float" if GGML_QUANT_SIZES[kind][0] == 1 else kind.name

    def blocks(self, name: str) -> ByteArray | None:
        """The stored rows, in transformers' order; a view of the file where that is the file's own."""
        if self.stored(name) == "float":
            return None
        return self._in_order(name, self._raw(self._tensors[name]))

    def close(self) -> None:
        """Unmap the file; loaded tensors stay valid."""
        self._file.close()

    def _in_order(self, name: str, rows: NDArray[T]) -> NDArray[T]:
        num_heads = self._interleaved.get(name.split(".")[-2])
        return rows if num_heads is None else _halves(rows, num_heads)

    def _raw(self, tensor: GgufTensor) -> ByteArray:
        block_size, type_size = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.type_id)]
        row_bytes = tensor.shape[-1] // block_size * type_size
        num_rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
        flat = np.frombuffer(self._file.data, np.uint8, num_rows * row_bytes, tensor.offset)
        return flat.reshape(num_rows, row_bytes)

    def _renamed(self) -> dict[str, GgufTensor]:
        found, strangers = {}, []
        for tensor in self._file.tensors.values():
            if tensor.name in _NOT_WEIGHTS:
                continue
            name = self._transformers_name(tensor.name)
            if name is None:
                strangers.append(tensor.name)
                continue
            self._check(tensor)
            found[name] = tensor
        if strangers:
            raise ModelError(f"{self._file.path.name} holds tensors that are not read: {', '.join(strangers[:8])}")
        return found

    def _transformers_name(self, name: str) -> str | None:
        match = _LAYER.fullmatch(name)
        if match is None:
            return _GLOBAL_NAMES.get(name)
        layer, part, kind = match.groups()
        module = (_GEMMA_LAYER_NAMES if self._gemma else _LAYER_NAMES).get(part)
        return None if module is None else f"model.layers.{layer}.{module}.{kind}"

    def _check(self, tensor: GgufTensor) -> None:
        where = f"{self._file.path.name}: {tensor.name}"
        try:
            kind = GGMLQuantizationType(tensor.type_id)
        except ValueError as error:
            raise ModelError(f"{where} is stored in the unknown type {tensor.type_id}") from error
        if kind not in _READABLE:
            raise ModelError(
                f"{where} is stored as {kind.name}, which is not read",
                hint=f"read are {', '.join(sorted(readable.name for readable in _READABLE))}",
            )
        block_size, type_size = GGML_QUANT_SIZES[kind]
        num_values = int(np.prod(tensor.shape, dtype=np.int64))
        if not tensor.shape or tensor.shape[-1] % block_size:
            raise ModelError(f"{where} has rows that are no multiple of {block_size}, as {kind.name} needs")
        if tensor.offset + num_values // block_size * type_size > len(self._file.data):
            raise ModelError(f"{where} runs past the end of the file", hint="is the download complete?")


def _halves(values: NDArray[T], num_heads: int) -> NDArray[T]:
    """Rows (or biases, or rows of blocks) of each head from pairs side by side to first halves, then second halves."""
    by_pair = values.reshape(num_heads, values.shape[0] // num_heads // 2, 2, *values.shape[1:])
    return by_pair.swapaxes(1, 2).reshape(values.shape)
