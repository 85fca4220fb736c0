"""The stand-in for a GPU shows nothing before its time, and packs what it is given as a GPU's driver is given it."""

import numpy as np
import pytest
import torch

from servekit.engine.device.base import CaptureError
from servekit.engine.device.cpu import CpuDevice
from servekit.engine.device.fake import FakeCuda, NoWaiting, poison_
from servekit.engine.device.lazy import Mapped
from servekit.engine.device.packing import pack, packed_size, unpack

_ARRAYS = [
    np.arange(5, dtype=np.int64),
    np.array([True, False, True]),
    np.arange(3, dtype=np.int32),
    np.zeros((2, 0), dtype=np.int64),
    np.linspace(0, 1, 6).reshape(2, 3),
    np.arange(6, dtype=np.float32).reshape(3, 2).T,
]


def test_packed_arrays_come_back_aligned() -> None:
    block = np.empty(packed_size(_ARRAYS), dtype=np.uint8)
    assert len(block) == 48 + 16 + 16 + 0 + 48 + 32
    pack(_ARRAYS, block)
    tensors = unpack(torch.from_numpy(block), _ARRAYS)
    for tensor, array in zip(tensors, _ARRAYS, strict=True):
        assert tensor.dtype == torch.from_numpy(array.copy()).dtype
        assert tensor.tolist() == array.tolist()


@pytest.mark.parametrize("device", [CpuDevice(), FakeCuda()], ids=["cpu", "fake"])
def test_what_is_uploaded_arrives(device: CpuDevice | FakeCuda) -> None:
    assert [t.tolist() for t in device.upload(_ARRAYS)] == [a.tolist() for a in _ARRAYS]
    assert device.upload([]) == []


def test_one_upload_is_one_copy() -> None:
    device = FakeCuda()
    device.upload(_ARRAYS)
    device.upload([])
    assert device.record.uploads == 1


def test_a_fetched_value_is_the_one_of_that_moment_and_hidden_until_it_is_waited_for() -> None:
    device = FakeCuda()
    tensor = torch.tensor([1, 2])
    result = device.fetch(tensor)
    tensor.add_(10)
    assert not result.ready()
    assert device.record.events == ["fetch 0"]
    (host,) = result.get()
    assert host.tolist() == [1, 2]
    assert result.ready()
    result.get()
    assert device.record.events == ["fetch 0", "wait 0"]


def test_a_mapped_result_is_converted_once_and_not_before_it_is_asked_for() -> None:
    device = FakeCuda()
    calls: list[int] = []

    def convert(tensors: tuple[torch.Tensor, ...]) -> int:
        calls.append(int(tensors[0]))
        return calls[-1]

    result = Mapped(device.fetch(torch.tensor(7)), convert)
    assert (result.ready(), calls) == (False, [])
    assert (result.get(), result.get(), calls) == (7, 7, [7])
    assert result.ready()


def test_a_capture_runs_nothing_and_a_replay_runs_on_what_the_memory_holds_by_then() -> None:
    device = FakeCuda()
    source, target = torch.tensor([1.0]), torch.zeros(1)

    def double() -> None:
        target.copy_(source * 2)

    graph = device.capture(double)
    assert target.item() == 0.0
    source.fill_(21.0)
    graph.replay()
    assert target.item() == 42.0
    assert device.record.events == ["capture 0", "replay 0"]


def test_captures_fail_as_often_as_told_and_never_succeed_on_a_host() -> None:
    device = FakeCuda()
    device.fail_captures = ["no room"]
    with pytest.raises(CaptureError, match="no room"):
        device.capture(lambda: None)
    device.capture(lambda: None)
    with pytest.raises(CaptureError, match="as it comes"):
        CpuDevice().capture(lambda: None)


@pytest.mark.parametrize(
    "wait",
    [
        lambda t: t.item(),
        lambda t: t.tolist(),
        lambda t: bool(t > 0),
        lambda t: t.nonzero(),
        lambda t: t.numpy(),
        lambda t: torch.tensor([1]),
    ],
)
def test_whatever_waits_is_noticed(wait: object) -> None:
    assert callable(wait)
    with NoWaiting(), pytest.raises(AssertionError, match="waits for the device"):
        wait(torch.ones(()))


def test_a_graph_that_would_wait_is_refused() -> None:
    def compute() -> None:
        torch.ones(()).item()

    with pytest.raises(AssertionError, match="waits for the device"):
        FakeCuda().capture(compute).replay()


def test_poison_is_no_value() -> None:
    assert torch.isnan(poison_(torch.zeros(2))).all()
    assert (poison_(torch.zeros(2, dtype=torch.int64)) < -(2**60)).all()
    assert poison_(torch.zeros(2, dtype=torch.bool)).all()
