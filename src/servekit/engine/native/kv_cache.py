"""NativeKvCache: the paged keys and values of all layers as the CPU kernels read them.

It must not know which sequence owns which block.
"""

from servekit.engine.native import structs
from servekit.engine.native.matrix import ByteArray, aligned_zeros

_FORMATS = {
    "float32": (structs.KV_F32, 4, 1),
    "bfloat16": (structs.KV_BF16, 2, 1),
    "q8_0": (structs.KV_Q8_0, 34, structs.GROUP),
}
"""What the kernels call a KV dtype, and the bytes of how many numbers."""


class NativeKvCache:
    """A layer is `[num_blocks, block_size, 2, num_kv_heads, head_dim]`, keys at index 0 and values at 1.

    In q8_0 a block is made of tiles of 16 tokens instead, which csrc/servekit.h describes: `head_dim` is a multiple of
    32, and `block_size` of 16.

    Block 0 is the null block that pads block tables: no sequence's tokens are written there.
    """

    def __init__(
        self, *, num_layers: int, num_blocks: int, block_size: int, num_kv_heads: int, head_dim: int, dtype: str
    ) -> None:
        self.block_size = block_size
        self.dtype = dtype
        self.format, group_bytes, group = _FORMATS[dtype]
        assert head_dim % group == 0
        assert group == 1 or block_size % structs.KV_TILE == 0
        num_bytes = num_blocks * block_size * 2 * num_kv_heads * head_dim // group * group_bytes
        self._layers: list[ByteArray] = [aligned_zeros(num_bytes) for _ in range(num_layers)]

    @property
    def nbytes(self) -> int:
        """What all layers occupy together, null block included."""
        return sum(layer.nbytes for layer in self._layers)

    def layer(self, index: int) -> ByteArray:
        """The bytes of one layer."""
        return self._layers[index]
