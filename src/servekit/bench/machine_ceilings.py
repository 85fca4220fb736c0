"""What this machine reaches at best: bytes a second out of its memory, and operations a second in a dtype.

A spec sheet says what nobody reaches; these are measured by the same library, threads and device that run the model,
with nothing but one long copy, one long sum and one large matrix product.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from servekit.bench.offline_roofline import Ceilings
from servekit.engine.layers.linear import DenseWeight
from servekit.engine.layers.quantised import Quantised
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.quantiser import Bits

_BYTES: Final = {"cpu": 256 * 2**20, "cuda": 2 * 2**30}
_MATRIX: Final = {"cpu": 1024, "cuda": 8192}
_SECONDS: Final = 0.5


def measure_ceilings(
    device: torch.device, dtype: torch.dtype, kernels: Kernels | None = None, bits: Bits = "int8"
) -> Ceilings:
    """Takes about two seconds, with as many threads as torch is set to.

    For a model that `kernels` compute, with weights of `bits`: with their threads, and their own large product.
    """
    with torch.inference_mode(), _threads_of(kernels):
        bytes_per_s = max(_read_rate(device), _copy_rate(device))
        if kernels is None:
            return Ceilings(bytes_per_s, _product_rate(device, dtype), str(dtype).removeprefix("torch."))
        torch.set_num_threads(1)
        return Ceilings(bytes_per_s, _native_product_rate(kernels, bits), bits)


@contextmanager
def _threads_of(kernels: Kernels | None) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(before if kernels is None else kernels.threads)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _read_rate(device: torch.device) -> float:
    source = torch.ones(_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    return source.nbytes / _best(lambda: source.sum(), device)


def _copy_rate(device: torch.device) -> float:
    source = torch.ones(_BYTES[device.type] // 4, dtype=torch.float32, device=device)
    target = torch.zeros_like(source)
    return 2 * source.nbytes / _best(lambda: target.copy_(source), device)


def _product_rate(device: torch.device, dtype: torch.dtype) -> float:
    size = _MATRIX[device.type]
    left = torch.ones(size, size, dtype=dtype, device=device)
    right = torch.ones(size, size, dtype=dtype, device=device)
    return 2 * size**3 / _best(lambda: torch.nn.functional.linear(left, right), device)


def _native_product_rate(kernels: Kernels, bits: Bits) -> float:
    size = _MATRIX["cpu"]
    linear = Quantised(kernels, bits).build([DenseWeight(torch.ones(size, size))], None)
    inputs = torch.ones(size, size)
    return 2 * size**3 / _best(lambda: linear(inputs), torch.device("cpu"))


def _best(run: Callable[[], object], device: torch.device) -> float:
    """Seconds of the fastest of as many runs as fit in half a second, three at least; the first only warms up."""
    run()
    _wait(device)
    best, deadline, rounds = float("inf"), time.perf_counter() + _SECONDS, 0
    while rounds < 3 or time.perf_counter() < deadline:
        began = time.perf_counter()
        run()
        _wait(device)
        best = min(best, time.perf_counter() - began)
        rounds += 1
    return best


def _wait(device: torch.device) -> None:
    if device.type != "cpu":
        torch.accelerator.synchronize()
