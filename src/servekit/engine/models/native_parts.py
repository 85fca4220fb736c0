"""What native models have in common: shapes and tables as the CPU kernels read them."""

from collections.abc import Iterable

from servekit.engine.host_batch import HostBatch, IntArray
from servekit.engine.native import structs
from servekit.engine.native.matrix import FloatArray, aligned
from servekit.engine.spec.attention import AttentionShape
from servekit.engine.spec.rope import RopeSpec
from servekit.engine.spec.rotations import rotations

RotaryTables = dict[RopeSpec, tuple[FloatArray, FloatArray]]
"""cos and sin [positions, head_dim / 2] of each kind of rotation; layers that rotate alike share them."""


def attention_struct(shape: AttentionShape) -> structs.Attention:
    """One layer's attention."""
    return structs.Attention(
        heads=shape.num_heads,
        kv_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        window=shape.window or 0,
        scale=shape.scale,
        softcap=shape.softcap or 0.0,
        causal=shape.causal,
    )


def step_struct(batch: HostBatch, starts: IntArray) -> structs.Step:
    """One step. It points into the batch's arrays and `starts` (its cu_seqlens_q), which must outlive it."""
    slots, tables = batch.slot_mapping, batch.block_tables
    return structs.Step(
        tokens=batch.num_tokens,
        seqs=batch.num_seqs,
        block_size=batch.block_size,
        max_blocks=0 if tables is None else tables.shape[1],
        positions=batch.positions.ctypes.data,
        slot_mapping=None if slots is None else slots.ctypes.data,
        block_tables=None if tables is None else tables.ctypes.data,
        starts=starts.ctypes.data,
        context_lens=batch.context_lens.ctypes.data,
    )


def rotary_tables(ropes: Iterable[RopeSpec | None], head_dim: int, max_positions: int) -> RotaryTables:
    """A table for each kind of rotation among `ropes`."""
    tables: RotaryTables = {}
    for rope in ropes:
        if rope is not None and rope not in tables:
            cos, sin = rotations(rope, head_dim, max_positions)
            tables[rope] = (aligned(cos), aligned(sin))
    return tables
