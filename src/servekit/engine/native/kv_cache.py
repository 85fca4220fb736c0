"""NativeKvCache: the paged keys and values of all layers as the CPU kernels read them.

It must not know which sequence owns which block.
"""

from servekit.engine.native import structs
from servekit.engine.native.matrix import ByteArray, aligned_zeros

_FORMATS = {"float32": (structs.KV_F32, 4), "bfloat16": (structs.KV_BF16, 2)}
"""What the kernels call a KV dtype, and the bytes of a number."""


class NativeKvCache:
    """A layer is `[num_blocks, block_size, 2, num_kv_heads, head_dim]`, keys at index 0 and values at 1.

    Block 0 is the null block that pads block tables: no sequence's tokens are written there.
    """

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> None:
        self.block_size = block_size
        self.dtype = dtype
        self.format, itemsize = _FORMATS[dtype]
        num_bytes = num_blocks * block_size * 2 * num_kv_heads * head_dim * itemsize
        self._layers: list[ByteArray] = [aligned_zeros(num_bytes) for _ in range(num_layers)]

    @property
    def nbytes(self) -> int:
        """What all layers occupy together, null block included."""
        return sum(layer.nbytes for layer in self._layers)

    def layer(self, index: int) -> ByteArray:
        """The bytes of one layer."""
        return self._layers[index]
