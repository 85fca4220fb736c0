"""A short measurement of what this machine computes fastest in. CPUs differ by more than an order of magnitude here:
with bf16 instructions bfloat16 halves the time of a step, without them it takes several times as long."""

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from servekit.engine.layers.linear import DenseWeight
from servekit.engine.layers.packed import unquantised_format

_ROUNDS = 12


@dataclass(frozen=True, slots=True)
class DTypeProbe:
    """Seconds that bfloat16 takes for each second of float32, for a matrix product and for attention over a cache."""

    linear_ratio: float
    attention_ratio: float


@torch.inference_mode()
def probe_dtypes(device: torch.device) -> DTypeProbe:
    """Measure both at the size of a decode step of 16 sequences. Takes about 70 ms.

    One thread computes: on a busy machine several would wait for each other, and the noise would choose.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return DTypeProbe(_ratio(_linear, device), _ratio(_attention, device))
    finally:
        torch.set_num_threads(num_threads)


def _ratio(make: Callable[[torch.dtype, torch.device], Callable[[], object]], device: torch.device) -> float:
    """The two are measured in turn, so that a busy moment of the machine strikes both; the best of each counts."""
    runs = [make(dtype, device) for dtype in (torch.float32, torch.bfloat16)]
    best = [float("inf")] * 2
    for round_ in range(_ROUNDS + 1):
        for i, run in enumerate(runs):
            began = time.perf_counter()
            run()
            if round_:  # the first round warms caches and lets kernels be chosen
                best[i] = min(best[i], time.perf_counter() - began)
    return best[1] / best[0]


def _linear(dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    x = torch.ones(16, 1024, dtype=dtype, device=device)
    linear_format, _ = unquantised_format(dtype, device)
    linear = linear_format.build([DenseWeight(torch.ones(2048, 1024))], None)
    return lambda: linear(x)


def _attention(dtype: torch.dtype, device: torch.device) -> Callable[[], object]:
    """float32 queries over a cache of `dtype`, converted as it is read."""
    cache = torch.ones(256, 16, 2, 4, 64, dtype=dtype, device=device)
    blocks = torch.arange(256, device=device)
    q = torch.ones(16, 4, 4, 64, device=device)

    def run() -> object:
        paged = cache.index_select(0, blocks).view(16, 256, 2, 4, 64).float()
        keys, values = paged[:, :, 0].transpose(1, 2), paged[:, :, 1].transpose(1, 2)
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values)

    return run
