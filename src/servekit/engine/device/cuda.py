"""A CUDA GPU as a device: pinned copies that nobody waits for, and graphs of recorded launches."""

from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy.typing as npt
import torch

from servekit.engine.device.base import CapturedGraph, CaptureError, Device
from servekit.engine.device.lazy import Deferred, LazyResult
from servekit.engine.device.packing import pack, packed_size, unpack
from servekit.errors import ConfigError


class CudaDevice(Device):
    """Computes on the current GPU. The cache may take nine tenths of what the weights leave.

    Pinned memory comes from torch's pool, which gives a block out again only when the copy that used it is done.
    Raises ConfigError when torch sees no GPU.
    """

    kind: Literal["cpu", "cuda"] = "cuda"
    kv_share = 0.9
    default_batched_tokens = 2048
    is_queued = True

    def __init__(self) -> None:
        if not torch.cuda.is_available():
            raise ConfigError(
                "--device cuda: torch sees no CUDA GPU here", hint="leave --device out to use the CPU", param="device"
            )
        self._pool: Any = None
        self._stream: Any = None

    @property
    def torch_device(self) -> torch.device:
        """torch's current CUDA device."""
        return torch.device("cuda", torch.cuda.current_device())

    def describe(self) -> str:
        """The card's name."""
        return torch.cuda.get_device_name(self.torch_device)

    def free_memory(self) -> int:
        """What the driver says is free, and what torch holds without using it."""
        held = torch.cuda.memory_reserved() - torch.cuda.memory_allocated()
        return int(torch.cuda.mem_get_info(self.torch_device)[0]) + int(held)

    def default_threads(self) -> int:
        """One: the host only launches kernels."""
        return 1

    def peak_memory(self, work: Callable[[], object]) -> int:
        """Measured by torch's allocator. What it then holds is given back, so that one large tensor can have it."""
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        work()
        torch.cuda.synchronize()
        peak = torch.cuda.max_memory_allocated() - torch.cuda.memory_allocated()
        torch.cuda.empty_cache()
        return int(peak)

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Packed into pinned memory, then one copy behind the work that is queued."""
        if not arrays:
            return []
        host = torch.empty(packed_size(arrays), dtype=torch.uint8, pin_memory=True)
        pack(arrays, host.numpy())
        return unpack(host.to(self.torch_device, non_blocking=True), arrays)

    def fetch(self, *tensors: torch.Tensor) -> LazyResult[tuple[torch.Tensor, ...]]:
        """Copied into pinned memory behind the work that is queued, so that more can be queued meanwhile."""
        hosts = []
        for tensor in tensors:
            host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
            hosts.append(host.copy_(tensor, non_blocking=True))
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        copied.record()
        # The allocator reuses a freed device tensor only behind this copy, so nothing but the hosts must be kept.
        return Deferred(copied.query, copied.synchronize, lambda: tuple(hosts))

    def capture(self, compute: Callable[[], None]) -> CapturedGraph:
        """Record on a stream of its own, into the pool that all graphs share; only this thread's calls are watched.

        One graph runs at a time, so they can share what is scratch to each of them.
        """
        graph = torch.cuda.CUDAGraph()
        if self._pool is None:
            self._pool = torch.cuda.graph_pool_handle()
            self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        # Recording begins by giving cached memory back; doing so first makes the difference what the graph takes.
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        free = int(torch.cuda.mem_get_info()[0])
        try:
            with torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"):
                compute()
        except RuntimeError as error:
            raise CaptureError(str(error).splitlines()[0]) from error
        return _CudaGraph(graph, max(0, free - int(torch.cuda.mem_get_info()[0])))


class _CudaGraph:
    """A torch.cuda.CUDAGraph, and the bytes it took."""

    def __init__(self, graph: torch.cuda.CUDAGraph, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._graph = graph

    def replay(self) -> None:
        """Launch it on the current stream."""
        self._graph.replay()
