"""KvCache: the paged keys and values of all layers. It must not know which sequence owns which block."""

import numpy as np
import torch


class KvCache:
    """One tensor a layer, `[num_blocks, block_size, 2, num_kv_heads, head_dim]`, keys at index 0 and values at 1.

    Keys and values of a token lie side by side, so that one indexed write stores both and one indexed read gathers
    both. Block 0 is the null block that pads block tables: no sequence's tokens are written there, only those of
    dummies, which are finite.
    """

    def __init__(
        self,
        *,
        num_layers: int,
        num_blocks: int,
        block_size: int,
        num_kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        shape = (num_blocks, block_size, 2, num_kv_heads, head_dim)
        self.block_size = block_size
        self.dtype = dtype
        self._layers = [_zeros(shape, dtype, device) for _ in range(num_layers)]

    @property
    def nbytes(self) -> int:
        """What all layers occupy together, null block included."""
        return sum(layer.nbytes for layer in self._layers)

    def layer(self, index: int) -> torch.Tensor:
        """`[num_blocks, block_size, 2, num_kv_heads, head_dim]` of one layer."""
        return self._layers[index]

    def write(self, index: int, kv: torch.Tensor, slot_mapping: torch.Tensor) -> None:
        """Store `kv` [T, 2 * num_kv_heads, head_dim], keys first, at `slot_mapping` [T]."""
        layer = self._layers[index]
        layer.view(-1, *kv.shape[1:]).index_copy_(0, slot_mapping, kv)


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Zeros. On a CPU from calloc, so that pages cost memory only once they are written, and start-up costs nothing.

    Zeroed memory is needed, not only tidy: padded positions are masked, but NaN times zero is NaN.
    """
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = int(np.prod(shape)) * dtype.itemsize
    return torch.from_numpy(np.zeros(num_bytes, dtype=np.uint8)).view(dtype).view(shape)
