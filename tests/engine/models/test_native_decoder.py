"""NativeDecoder computes what Decoder does with the same rounded numbers, however the work is cut up."""

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from servekit.engine.attention.reference import ReferenceAttention
from servekit.engine.host_batch import HostBatch
from servekit.engine.layers.linear import DenseWeight
from servekit.engine.layers.quantised import Quantised
from servekit.engine.models.build import build_decoder
from servekit.engine.models.decoder import Decoder
from servekit.engine.models.native_decoder import NativeDecoder
from servekit.engine.models.pack_decoder import pack_decoder
from servekit.engine.models.weights import SafetensorsSource
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.matrix import unpack
from servekit.engine.native.quantiser import Bits, Quantiser
from servekit.engine.spec.decoder import DecoderSpec
from servekit.engine.spec.families import read_decoder_spec
from tests.engine.families import FAMILIES, TinyModel, make_tiny
from tests.engine.models.test_decoder import cacheless_batch
from tests.engine.native.kernels import ISAS, library, needs_kernels, opened, rounded_inputs
from tests.engine.native.rounded import RoundedFormat, RoundedSource
from tests.engine.stepping import CPU, Stepper, make_native_cache

pytestmark = needs_kernels

_LENGTHS = (1, 7, 40, 63, 64, 100)


@pytest.fixture(scope="module", params=sorted(FAMILIES))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module", params=["gemma2", "gemma3", "llama3-rope", "qwen3"])
def tiny_of_32(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Those whose heads have 32 numbers, as a cache in eight bits wants them: windows, soft caps and norms of heads."""
    return make_tiny(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture
def kernels() -> Iterator[Kernels]:
    with opened() as found:
        yield found


def _rounded_weights(bits: Bits) -> Callable[[str, torch.Tensor], torch.Tensor]:
    """As the packed weights hold them: rounded, and back in float32."""
    quantiser = Quantiser(library(), bits)

    def rounded(name: str, tensor: torch.Tensor) -> torch.Tensor:
        is_head = "embed_tokens" in name or "lm_head" in name
        matrix, _ = quantiser.pack([DenseWeight(tensor)], is_head=is_head)
        return torch.from_numpy(unpack(library(), matrix))

    return rounded


def _rounded_inputs(x: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(rounded_inputs(x.numpy()))


def _spec(directory: Path) -> DecoderSpec:
    return read_decoder_spec(json.loads((directory / "config.json").read_text(encoding="utf-8")))


def _native(directory: Path, kernels: Kernels, bits: Bits) -> NativeDecoder:
    spec = _spec(directory)
    weights = pack_decoder(spec, SafetensorsSource(directory), Quantiser(library(), bits), threads=2)
    return NativeDecoder(spec, weights, kernels, 512)


def _in_torch(directory: Path, bits: Bits) -> Decoder:
    return build_decoder(
        _spec(directory),
        RoundedSource(SafetensorsSource(directory), _rounded_weights(bits)),
        linear=RoundedFormat(_rounded_inputs),
        backend=ReferenceAttention(),
        dtype=torch.float32,
        device=CPU,
        max_positions=512,
    )


def _logits(native: NativeDecoder, prompts: list[list[int]]) -> torch.Tensor:
    """Of all tokens of all prompts, without a KV cache."""
    return torch.from_numpy(native.logits(native.forward(cacheless_batch(prompts).on_host(), None)))


def _prompt(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng([seed, length]).integers(3, 131, length).tolist()
    return ids


def _cached_batch(prompt: list[int]) -> HostBatch:
    """One prompt of whole blocks of 8 tokens, in blocks 1, 2, 3 and so on."""
    length = len(prompt)
    return HostBatch(
        input_ids=np.array(prompt),
        positions=np.arange(length),
        logits_idx=np.array([length - 1]),
        slot_mapping=np.arange(8, 8 + length),
        block_tables=np.arange(1, 1 + length // 8).reshape(1, -1),
        query_lens=np.array([length]),
        context_lens=np.array([length]),
        block_size=8,
    )


def _relative(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Root of mean squares of the difference, over that of what is expected."""
    return float((found - expected).double().square().mean().sqrt() / expected.double().square().mean().sqrt())


@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_logits_are_those_of_the_rounded_numbers(tiny: TinyModel, bits: Bits) -> None:
    """Every instruction set, against torch with weights and inputs rounded alike.

    A sum in another order may move a number over the middle between two roundings, by one step of 127 in its group:
    that is the whole difference, and it is rare.
    """
    prompts = [_prompt(length) for length in _LENGTHS]
    decoder = _in_torch(tiny.directory, bits)
    with torch.inference_mode():
        expected = decoder.logits(decoder.forward(cacheless_batch(prompts), None))
        for isa in ISAS:
            with opened(isa) as kernels:
                native = _native(tiny.directory, kernels, bits)
                found = _logits(native, prompts)
            assert _relative(found, expected) < 0.02, isa


def test_eight_bits_stay_near_transformers(tiny: TinyModel, kernels: Kernels) -> None:
    """The models are random and small, so that rounding shows more than in trained ones."""
    native = _native(tiny.directory, kernels, "int8")
    prompts = [_prompt(length) for length in _LENGTHS]
    with torch.inference_mode():
        found = _logits(native, prompts)
    assert _relative(found, torch.cat([tiny.logits(prompt) for prompt in prompts])) < 0.06


@pytest.mark.parametrize("bits", ["int4", "int8"])
def test_greedy_is_the_same_however_it_is_scheduled(tiny: TinyModel, kernels: Kernels, bits: Bits) -> None:
    _check_schedules(_native(tiny.directory, kernels, bits), cramped_blocks=28)


@pytest.mark.parametrize("block_size", [16, 48])
def test_greedy_over_eight_bits_is_the_same_however_it_is_scheduled(
    tiny_of_32: TinyModel, kernels: Kernels, block_size: int
) -> None:
    decoder = _native(tiny_of_32.directory, kernels, "int8")
    blocks = {16: 15, 48: 6}[block_size]
    _check_schedules(decoder, cramped_blocks=blocks, kv_dtype="q8_0", block_size=block_size)


def _check_schedules(decoder: NativeDecoder, *, cramped_blocks: int, **settings: Any) -> None:
    """Alone, together, in chunks, in fixed batches, and with preemption."""
    prompts = {f"r{length}": _prompt(length) for length in (*_LENGTHS, 33, 90)}

    def outputs(**config: Any) -> tuple[dict[str, list[int]], Stepper]:
        stepper = Stepper(decoder, **settings, **config)
        for name, prompt in prompts.items():
            stepper.add(name, prompt, max_tokens=24, ignore_eos=True)
        return stepper.drain(), stepper

    expected = outputs(max_num_seqs=1)[0]
    assert outputs()[0] == expected
    assert outputs(max_num_batched_tokens=13)[0] == expected
    assert outputs(policy="static", max_num_seqs=4)[0] == expected
    cramped, stepper = outputs(num_blocks=cramped_blocks, enable_prefix_caching=False)
    assert stepper.num_preempted > 0
    assert cramped == expected


def test_a_prefix_hit_changes_nothing(tiny: TinyModel, kernels: Kernels) -> None:
    _check_prefix_hit(_native(tiny.directory, kernels, "int8"))


def test_a_prefix_hit_in_eight_bits_changes_nothing(tiny_of_32: TinyModel, kernels: Kernels) -> None:
    _check_prefix_hit(_native(tiny_of_32.directory, kernels, "int8"), kv_dtype="q8_0", block_size=16)


def _check_prefix_hit(decoder: NativeDecoder, **settings: Any) -> None:
    stepper = Stepper(decoder, **settings)
    prompt = _prompt(100)
    stepper.add("cold", prompt, max_tokens=24, ignore_eos=True)
    stepper.drain()
    stepper.add("warm", prompt, max_tokens=24, ignore_eos=True)
    outputs = stepper.drain()
    assert stepper.cached == {"cold": 0, "warm": 96}
    assert outputs["warm"] == outputs["cold"]


def test_a_cache_in_eight_bits_gives_nearly_the_same(tiny_of_32: TinyModel, kernels: Kernels) -> None:
    decoder = _native(tiny_of_32.directory, kernels, "int8")
    batch = replace(_cached_batch(_prompt(64)), block_size=16, slot_mapping=np.arange(16, 80))
    batch = replace(batch, block_tables=np.arange(1, 5)[None, :])
    hidden = []
    for dtype in ("float32", "q8_0"):
        cache = make_native_cache(decoder.spec, 5, 16, dtype)
        hidden.append(torch.from_numpy(decoder.forward(batch, cache)))
        blocks = cache.layer(1).reshape(5, -1)
        assert not blocks[0].any()  # the null block
        assert blocks[1:].any(axis=1).all()
    assert cache.nbytes == 5 * 16 * decoder.spec.num_layers * 2 * decoder.spec.num_kv_heads * 34
    assert 0 < _relative(hidden[1], hidden[0]) < 0.05


def test_a_cache_in_bfloat16_gives_nearly_the_same(tiny: TinyModel, kernels: Kernels) -> None:
    decoder = _native(tiny.directory, kernels, "int8")
    prompt = _prompt(64)
    hidden = []
    for dtype in ("float32", "bfloat16"):
        cache = make_native_cache(decoder.spec, 9, 8, dtype)
        hidden.append(torch.from_numpy(decoder.forward(_cached_batch(prompt), cache)))
        tokens = cache.layer(1).reshape(9, 8, -1)
        assert not tokens[0].any()  # the null block
        assert tokens[1:].any(axis=2).all()
    assert 0 < _relative(hidden[1], hidden[0]) < 0.05


def test_the_decoder_in_torch_with_native_products(tiny: TinyModel, kernels: Kernels) -> None:
    decoder = build_decoder(
        _spec(tiny.directory),
        SafetensorsSource(tiny.directory),
        linear=Quantised(kernels, "int8"),
        backend=ReferenceAttention(),
        dtype=torch.float32,
        device=CPU,
        max_positions=512,
    )
    prompts = [_prompt(length) for length in _LENGTHS]
    native = _native(tiny.directory, kernels, "int8")
    with torch.inference_mode():
        found = decoder.logits(decoder.forward(cacheless_batch(prompts), None))
        expected = _logits(native, prompts)
    # The embedding is not rounded here.
    assert _relative(found, expected) < 0.05


def test_weights_are_counted_once(tmp_path: Path, kernels: Kernels) -> None:
    tied, untied = (make_tiny(name, tmp_path / name) for name in ("llama", "llama-biased"))
    sizes = [_native(model.directory, kernels, "int8").nbytes for model in (tied, untied)]
    # The head of 131 rows of 64: 144 channels of 64 inputs are 9 panels of one pair; biases are the rest.
    layer_biases = 4 * (128 + 64 + 192 + 64)
    assert sizes[1] - sizes[0] == 9 * 1088 + 4 * layer_biases
