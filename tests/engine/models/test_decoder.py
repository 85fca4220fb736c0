"""Every family equals transformers: logits in one piece, and greedy tokens however the work is cut up."""

from typing import Any

import numpy as np
import pytest
import torch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.attention.reference import ReferenceAttention
from servekit.engine.attention.sdpa import SdpaAttention
from servekit.engine.batch import Batch
from tests.engine.families import FAMILIES, TinyModel, make_tiny
from tests.engine.stepping import Stepper, load_decoder

_LENGTHS = (1, 7, 40, 63, 64, 100)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


def _prompt(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng([seed, length]).integers(3, 131, length).tolist()
    return ids


def cacheless_batch(prompts: list[list[int]]) -> Batch:
    lengths = np.array([len(prompt) for prompt in prompts])
    return Batch(
        input_ids=torch.tensor([token_id for prompt in prompts for token_id in prompt]),
        positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        logits_idx=torch.arange(int(lengths.sum())),
        slot_mapping=None,
        block_tables=None,
        query_lens=lengths,
        context_lens=lengths,
        block_size=8,
        num_tokens=int(lengths.sum()),
        num_seqs=len(prompts),
    )


@pytest.mark.parametrize("backend", [SdpaAttention(), ReferenceAttention()], ids=lambda b: b.name)
def test_logits_equal_transformers_for_a_ragged_batch(tiny: TinyModel, backend: AttentionBackend[object]) -> None:
    decoder = load_decoder(tiny.directory, backend=backend)
    prompts = [_prompt(length) for length in _LENGTHS]
    with torch.inference_mode():
        logits = decoder.logits(decoder.forward(cacheless_batch(prompts), None))
    expected = torch.cat([tiny.logits(prompt) for prompt in prompts])
    torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)


def test_greedy_equals_transformers_alone_and_however_it_is_scheduled(tiny: TinyModel) -> None:
    decoder = load_decoder(tiny.directory)
    prompts = {f"r{length}": _prompt(length) for length in (*_LENGTHS, 33, 90)}
    expected = {name: tiny.greedy(prompt, 24) for name, prompt in prompts.items()}

    def outputs(**config: Any) -> tuple[dict[str, list[int]], Stepper]:
        stepper = Stepper(decoder, **config)
        for name, prompt in prompts.items():
            stepper.add(name, prompt, max_tokens=24, ignore_eos=True)
        return stepper.drain(), stepper

    assert outputs(max_num_seqs=1)[0] == expected
    assert outputs()[0] == expected
    assert outputs(max_num_batched_tokens=13)[0] == expected
    assert outputs(policy="static", max_num_seqs=4)[0] == expected
    assert outputs(policy="dynamic", max_num_seqs=3)[0] == expected
    cramped, stepper = outputs(num_blocks=28, enable_prefix_caching=False)
    assert stepper.num_preempted > 0
    assert cramped == expected


def test_a_prefix_hit_changes_nothing(tiny: TinyModel) -> None:
    decoder = load_decoder(tiny.directory)
    stepper = Stepper(decoder)
    prompt = _prompt(100)
    stepper.add("cold", prompt, max_tokens=24, ignore_eos=True)
    stepper.drain()
    stepper.add("warm", prompt, max_tokens=24, ignore_eos=True)
    stepper.add("longer", [*prompt, 5], max_tokens=24, ignore_eos=True)
    outputs = stepper.drain()
    assert stepper.cached == {"cold": 0, "warm": 96, "longer": 96}
    assert outputs["warm"] == outputs["cold"] == tiny.greedy(prompt, 24)
    assert outputs["longer"] == tiny.greedy([*prompt, 5], 24)
