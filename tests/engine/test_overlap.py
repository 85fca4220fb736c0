"""A decoder behind a queue: launched a step ahead, it answers as one that is read after every step."""

import random
from collections.abc import Sequence as Seq
from typing import Any

import pytest

from servekit.engine.core.request import Request, SampledToken, SamplingParams
from servekit.engine.core.scheduler import ScheduleOutput, Scheduler, SchedulerConfig
from servekit.engine.device.base import Device
from servekit.engine.device.cpu import CpuDevice
from servekit.engine.device.fake import FakeCuda, NoWaiting
from servekit.engine.models.decoder import Decoder
from servekit.engine.runner import ModelRunner
from tests.engine.families import make_tiny
from tests.engine.stepping import Stepper, load_decoder, make_cache

_SAMPLINGS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.8, "seed": 5, "top_p": 0.9},
    {"temperature": 1.2, "seed": 6, "top_k": 20, "min_p": 0.02},
    {"presence_penalty": 1.0, "frequency_penalty": 0.7},
    {"temperature": 0.9, "seed": 7, "repetition_penalty": 1.4},
    {"min_tokens": 5, "stop_token_ids": frozenset(range(0, 131, 3))},
    {"logit_bias": {7: 4.0}, "stop_token_ids": frozenset({7, 8, 9})},
]


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Decoder:
    model = make_tiny("qwen2", tmp_path_factory.mktemp("overlap") / "model", num_hidden_layers=2)
    return load_decoder(model.directory)


def answers(decoder: Decoder, device: Device, seed: int) -> dict[str, list[int]]:
    """Random requests that join and leave at random, in a pool too small for them. Aborted ones are left out."""
    rng = random.Random(seed)
    stepper = Stepper(decoder, device, num_blocks=9, max_num_seqs=4, max_num_batched_tokens=20, max_model_len=60)
    script = [
        (rng.randint(0, 12), [rng.randrange(131) for _ in range(rng.randint(1, 20))], rng.choice(_SAMPLINGS))
        for _ in range(12)
    ]
    lengths = [rng.randint(1, 20) for _ in script]
    doomed = {f"r{rng.randrange(12)}": rng.randint(5, 25) for _ in range(3)}
    for now in range(60):
        for index, (arrival, prompt, sampling) in enumerate(script):
            if arrival == now:
                stepper.add(
                    f"r{index}", prompt, max_tokens=max(lengths[index], sampling.get("min_tokens", 1)), **sampling
                )
        for name, end in doomed.items():
            if end == now:
                stepper.scheduler.abort(name)
        stepper.step()
    stepper.drain()
    assert stepper.num_preempted > 0
    return {name: tokens for name, tokens in stepper.outputs.items() if name not in doomed}


@pytest.mark.parametrize("seed", range(6))
def test_a_step_ahead_gives_the_same_answers(decoder: Decoder, seed: int) -> None:
    device = FakeCuda()
    assert answers(decoder, device, seed) == answers(decoder, CpuDevice(), seed)


def launch(runner: ModelRunner, scheduler: Scheduler) -> ScheduleOutput:
    output = scheduler.schedule(0.0)
    scheduler.launched(output)
    return output


def fresh(decoder: Decoder, device: Device) -> tuple[Scheduler, ModelRunner]:
    scheduler = Scheduler(SchedulerConfig(8, 64, 60, 60, 8))
    runner = ModelRunner(decoder, make_cache(decoder.spec, 60, 8), device, max_num_seqs=8)
    for index, sampling in enumerate(_SAMPLINGS):
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": 9, "logprobs": index % 3, **sampling})
        scheduler.add(Request(f"r{index}", (3, 4, 5, index), params, 0.0), 0.0)
    return scheduler, runner


def test_a_step_is_launched_without_reading_anything_and_with_one_copy_each_way(decoder: Decoder) -> None:
    device = FakeCuda()
    scheduler, runner = fresh(decoder, device)
    runner.step(launch(runner, scheduler))
    uploads = device.record.uploads
    output = launch(runner, scheduler)
    with NoWaiting():
        result = runner.step(output)
    assert device.record.uploads - uploads == 1
    assert not result.ready()
    assert not [event for event in device.record.events if event.startswith("wait")]


def named(output: ScheduleOutput, tokens: Seq[SampledToken | None]) -> dict[str, SampledToken | None]:
    return {item.seq.request.request_id: token for item, token in zip(output.scheduled, tokens, strict=True)}


def test_tokens_and_log_probabilities_are_those_of_the_host(decoder: Decoder) -> None:
    """Two steps, launched together on the one and one after the other on the other."""
    scheduler, runner = fresh(decoder, FakeCuda())
    outputs = [launch(runner, scheduler)]
    results = [runner.step(outputs[0])]
    outputs.append(launch(runner, scheduler))
    results.append(runner.step(outputs[1]))
    ahead = [named(output, result.get()) for output, result in zip(outputs, results, strict=True)]
    assert len(ahead[1]) == len(_SAMPLINGS)

    scheduler, runner = fresh(decoder, CpuDevice())
    for step in ahead:
        output = scheduler.schedule(0.0)
        tokens = runner.step(output).get()
        scheduler.apply(output, tokens, 0.0)
        assert output.scheduled
        for name, token in named(output, tokens).items():
            other = step[name]
            assert token is not None
            assert other is not None
            assert (token.token_id, token.logprob is None) == (other.token_id, other.logprob is None)
            if token.logprob is not None and other.logprob is not None:
                assert token.logprob.logprob == pytest.approx(other.logprob.logprob, abs=1e-5)
                assert [i for i, _ in token.logprob.top] == [i for i, _ in other.logprob.top]


def test_a_device_that_queues_is_one_step_ahead(decoder: Decoder) -> None:
    cache = make_cache(decoder.spec, 4, 8)
    assert ModelRunner(decoder, cache, FakeCuda(), max_num_seqs=1).steps_ahead == 1
    assert ModelRunner(decoder, cache, CpuDevice(), max_num_seqs=1).steps_ahead == 0
