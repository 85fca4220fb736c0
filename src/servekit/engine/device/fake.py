"""FakeCuda: the device seam of a GPU, played on the host, so that what depends on its order can be tested anywhere.

It computes at once, but shows nothing before its time: a fetched value is poison until somebody has waited for it, and
a captured graph has run only once it is replayed. It keeps what was asked of it.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch.overrides import TorchFunctionMode

from servekit.engine.device.base import CapturedGraph, CaptureError, Device
from servekit.engine.device.lazy import Deferred, LazyResult
from servekit.engine.device.packing import pack, packed_size, unpack

_READS = frozenset({"item", "tolist", "numpy", "__bool__", "__int__", "__float__", "__index__", "nonzero", "cpu"})
"""Calls of a tensor that would wait for a GPU."""
_HOST_FACTORIES = frozenset({"tensor", "as_tensor"})
"""Functions that would copy from memory that is not pinned, which waits as well."""


@dataclass(slots=True)
class FakeRecord:
    """What a FakeCuda was asked for: `events` in order, and how often something was `upload`ed or `fetch`ed."""

    events: list[str] = field(default_factory=list)
    uploads: int = 0
    fetches: int = 0
    captures: int = 0
    replays: int = 0


class FakeCuda(Device):
    """A Device whose tensors lie on the host. Each entry of `fail_captures` makes one more capture fail with its text.

    `memory` is what is free; `work_memory` what `peak_memory` says any work needs; `graph_memory` what a graph takes.
    """

    kind: Literal["cpu", "cuda"] = "cuda"
    kv_share = 0.5
    default_batched_tokens = 256
    is_queued = True

    def __init__(self, *, memory: int = 2**28, work_memory: int = 2**20, graph_memory: int = 2**20) -> None:
        self.record = FakeRecord()
        self.fail_captures: list[str] = []
        self._memory = memory
        self._work_memory = work_memory
        self._graph_memory = graph_memory

    @property
    def torch_device(self) -> torch.device:
        """The host's."""
        return torch.device("cpu")

    def describe(self) -> str:
        """What it is."""
        return "FakeCuda"

    def free_memory(self) -> int:
        """What it was made with."""
        return self._memory

    def default_threads(self) -> int:
        """One, as of a GPU's host."""
        return 1

    def peak_memory(self, work: Callable[[], object]) -> int:
        """Does the work, and says what it was told to say."""
        work()
        return self._work_memory

    def upload(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Packed and unpacked as for a GPU."""
        if not arrays:
            return []
        self.record.uploads += 1
        block = np.empty(packed_size(arrays), dtype=np.uint8)
        pack(arrays, block)
        return unpack(torch.from_numpy(block), arrays)

    def fetch(self, *tensors: torch.Tensor) -> LazyResult[tuple[torch.Tensor, ...]]:
        """The values as of now, in buffers that hold poison until the event has been waited for."""
        number = self.record.fetches
        self.record.fetches += 1
        self.record.events.append(f"fetch {number}")
        with torch.inference_mode(False):
            values = tuple(tensor.clone() for tensor in tensors)
            hosts = tuple(poison_(torch.empty(tensor.shape, dtype=tensor.dtype)) for tensor in tensors)

        def wait() -> None:
            self.record.events.append(f"wait {number}")
            for host, value in zip(hosts, values, strict=True):
                host.copy_(value)

        return Deferred(lambda: False, wait, lambda: hosts)

    def buffer(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Poison, so that whoever reads what nobody wrote is found out."""
        return poison_(super().buffer(shape, dtype))

    def capture(self, compute: Callable[[], None]) -> CapturedGraph:
        """Keep `compute`; nothing is run before it is replayed. Raises what the next of `fail_captures` says."""
        if self.fail_captures:
            raise CaptureError(self.fail_captures.pop(0))
        number = self.record.captures
        self.record.captures += 1
        self.record.events.append(f"capture {number}")
        return _FakeGraph(self.record, number, compute, self._graph_memory)


class _FakeGraph:
    """A recorded computation."""

    def __init__(self, record: FakeRecord, number: int, compute: Callable[[], None], num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._record = record
        self._number = number
        self._compute = compute

    def replay(self) -> None:
        """Run it, on whatever its memory holds now. What could not have been recorded is refused."""
        self._record.replays += 1
        self._record.events.append(f"replay {self._number}")
        with NoWaiting():
            self._compute()


class NoWaiting(TorchFunctionMode):
    """While it is active, whatever would make the host wait for a GPU raises AssertionError."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        """Refuse, or pass on."""
        name = getattr(func, "__name__", "")
        assert name not in _READS | _HOST_FACTORIES, f"{name} waits for the device"
        return func(*args, **(kwargs or {}))


def poison_(tensor: torch.Tensor) -> torch.Tensor:
    """Fill with what cannot be mistaken for a value: NaN, or an index that is out of every range."""
    if tensor.dtype == torch.bool:
        return tensor.fill_(True)
    return tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).min // 2)
