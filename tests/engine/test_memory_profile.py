"""What a full step needs, what graphs may take, and that the pool is sized from the rest."""

from pathlib import Path

import pytest

from servekit.config import EngineConfig
from servekit.engine.attention.sdpa import SdpaAttention
from servekit.engine.device.cpu import CpuDevice
from servekit.engine.device.fake import FakeCuda
from servekit.engine.graphs import MOST_MEMORY, plan_graphs
from servekit.engine.memory_profile import full_step_memory
from servekit.errors import ConfigError
from tests.engine.attention.capturable import CapturableAttention
from tests.engine.families import make_tiny
from tests.engine.stepping import load_decoder


@pytest.mark.parametrize(("num_tokens", "context"), [(40, 512), (40, 16), (3, 16)])
def test_the_largest_step_is_run_once_on_a_device_that_can_say_what_it_took(
    tmp_path: Path, num_tokens: int, context: int
) -> None:
    decoder = load_decoder(make_tiny("qwen2", tmp_path / "model", num_hidden_layers=1).directory)
    config = EngineConfig(max_model_len=context, parallel=8, max_num_batched_tokens=256)
    device = FakeCuda(work_memory=12345)
    assert full_step_memory(decoder, device, num_tokens=num_tokens, config=config) == 12345
    assert device.record.uploads == 1
    assert full_step_memory(decoder, CpuDevice(), num_tokens=num_tokens, config=config) == 0


def test_graphs_get_a_share_of_what_is_free() -> None:
    backend = CapturableAttention()
    assert plan_graphs(FakeCuda(memory=2000), backend, EngineConfig(graph_warmup=True))[0] == 100
    assert plan_graphs(FakeCuda(memory=2**40), backend, EngineConfig())[0] == MOST_MEMORY


def test_why_there_are_no_graphs() -> None:
    config = EngineConfig()
    assert plan_graphs(CpuDevice(), CapturableAttention(), config) == (
        0,
        "off: a cpu computes each step as it is launched",
    )
    assert plan_graphs(FakeCuda(), SdpaAttention(), config) == (0, "off: sdpa attention plans its steps on the host")
    eager = plan_graphs(FakeCuda(), CapturableAttention(), EngineConfig(enforce_eager=True))
    assert eager == (0, "off: --enforce-eager")
    with pytest.raises(ConfigError, match="--graph-warmup: there are no graphs here") as caught:
        plan_graphs(FakeCuda(), SdpaAttention(), EngineConfig(graph_warmup=True))
    assert caught.value.param == "graph_warmup"


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"memory_utilization": 0.0}, "memory_utilization"),
        ({"memory_utilization": 1.1}, "memory_utilization"),
        ({"memory_utilization": 0.5, "kv_memory": 100}, "memory_utilization"),
        ({"enforce_eager": True, "graph_warmup": True}, "graph_warmup"),
    ],
)
def test_choices_that_contradict_each_other_are_refused(given: dict[str, float], param: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig(**given)  # type: ignore[arg-type]
    assert caught.value.param == param
