"""What the sources of paged attention on a GPU share: lengths as kernels take them, and why a layer cannot be served.

A source is a library's kernel or our own. All attend ragged queries to paged keys in one call, for decoding, prefill
and both mixed, and to the step's own keys where there is no cache.
"""

from dataclasses import dataclass

import torch

from servekit.engine.batch import Batch
from servekit.engine.spec.attention import AttentionShape

HALF_PRECISION = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class PagedPlan:
    """Lengths int32 on the device, and bounds on the host. `block_tables` is None where there is no cache."""

    query_starts: torch.Tensor  # [S + 1]
    context_starts: torch.Tensor  # [S + 1]
    context_lens: torch.Tensor  # [S]
    block_tables: torch.Tensor | None  # [S, M]
    max_query_len: int
    max_context_len: int


def plan_paged(batch: Batch) -> PagedPlan:
    """From the batch's tensors and bounds alone, so that it can be recorded."""
    assert batch.seq_starts is not None, "the batch was built without lengths on the device"
    assert batch.seq_lens is not None
    tables = batch.block_tables
    context_starts = batch.seq_starts
    if tables is not None:
        context_starts = torch.nn.functional.pad(batch.seq_lens.cumsum(0, dtype=torch.int32), (1, 0))
    return PagedPlan(
        query_starts=batch.seq_starts,
        context_starts=context_starts,
        context_lens=batch.seq_lens,
        block_tables=None if tables is None else tables.to(torch.int32),
        max_query_len=batch.max_query_len,
        max_context_len=batch.max_context_len,
    )


def keys_and_values(
    kv: torch.Tensor, cache: torch.Tensor | None, plan: PagedPlan
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """What queries look at, as AttentionBackend.forward is given it, and the block tables to find it by.

    Pages `[num_blocks, block_size, K, D]` and their tables where there is a cache, else the step's own `[T, K, D]`.
    """
    if cache is None or plan.block_tables is None:
        keys, values = kv.chunk(2, dim=1)
        return keys, values, None
    return cache[:, :, 0], cache[:, :, 1], plan.block_tables


def window_sides(shape: AttentionShape) -> tuple[int, int]:
    """How many tokens a query sees to its left and right beside itself; -1 for all."""
    left = -1 if shape.window is None else shape.window - 1
    return left, 0 if shape.causal else left


def half_precision_reasons(dtype: torch.dtype) -> list[str]:
    """Why a kernel for half precision cannot serve `dtype`."""
    return [] if dtype in HALF_PRECISION else [f"it computes in bfloat16 and float16, not {_name(dtype)}"]


def head_reasons(shape: AttentionShape, largest: int) -> list[str]:
    """Why a kernel cannot serve heads of such a size."""
    if shape.head_dim > largest:
        return [f"heads of {shape.head_dim} are larger than {largest}"]
    return [f"heads of {shape.head_dim} are no multiple of 8"] if shape.head_dim % 8 else []


def bias_reasons(shape: AttentionShape) -> list[str]:
    """Why a kernel without a place for added scores cannot serve a layer."""
    return ["it has no place for a bias by distance"] if shape.has_bias else []


def compute_capability(device: torch.device) -> tuple[int, int]:
    """(0, 0) where the device is no CUDA GPU."""
    return torch.cuda.get_device_capability(device) if device.type == "cuda" else (0, 0)


def gpu_reasons(device: torch.device, least: tuple[int, int]) -> list[str]:
    """Why a kernel that needs compute capability `least` cannot run on `device`."""
    if device.type != "cuda":
        return [f"it needs a CUDA GPU, and this is {device.type}"]
    found = compute_capability(device)
    return (
        []
        if found >= least
        else [f"it needs compute capability {least[0]}.{least[1]}, and this is {found[0]}.{found[1]}"]
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
