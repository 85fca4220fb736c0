"""NativeEncoder computes what Encoder does with numbers rounded to bfloat16, for every family that it takes."""

import json

import numpy as np
import pytest
import torch

from servekit.engine.attention.reference import ReferenceAttention
from servekit.engine.models.build_encoder import build_encoder
from servekit.engine.models.encoder import Encoder
from servekit.engine.models.native_encoder import build_native_encoder, native_encoder_problem
from servekit.engine.models.weights import SafetensorsSource
from servekit.engine.spec.encoder import EncoderSpec
from servekit.engine.spec.encoder_families import read_encoder_spec
from tests.engine.encoder_families import ENCODERS, hidden_states, make_encoder
from tests.engine.families import TinyModel
from tests.engine.models.test_encoder import ragged_batch
from tests.engine.native.kernels import ISAS, needs_kernels, opened
from tests.engine.native.rounded import RoundedFormat, RoundedSource

pytestmark = needs_kernels

_LENGTHS = (1, 7, 40, 40, 63, 64, 100, 200)
_CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=sorted(ENCODERS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_encoder(request.param, tmp_path_factory.mktemp(request.param))


def _rounded(x: torch.Tensor) -> torch.Tensor:
    return x.bfloat16().float()


def _spec(tiny: TinyModel) -> EncoderSpec:
    return read_encoder_spec(json.loads((tiny.directory / "config.json").read_text(encoding="utf-8")))


def _in_torch(tiny: TinyModel) -> Encoder:
    spec = _spec(tiny)
    return build_encoder(
        spec,
        RoundedSource(SafetensorsSource(tiny.directory), lambda name, tensor: _rounded(tensor)),
        linear=RoundedFormat(_rounded),
        backend=ReferenceAttention(),
        dtype=torch.float32,
        device=_CPU,
        max_positions=spec.max_position_embeddings,
    )


def _texts() -> list[list[int]]:
    return [np.random.default_rng([seed, n]).integers(3, 131, n).tolist() for seed, n in enumerate(_LENGTHS)]


def test_hidden_states_are_those_of_the_rounded_numbers(tiny: TinyModel) -> None:
    """Alone and in a ragged batch, by every instruction set; what is left is the order of sums, and what that moves
    from one bfloat16 to the next."""
    spec = _spec(tiny)
    if problem := native_encoder_problem(spec):
        assert "learned bias" in problem
        return
    texts = _texts()
    with torch.inference_mode():
        expected = _in_torch(tiny).forward(ragged_batch(texts))
        for isa in ISAS:
            with opened(isa) as kernels:
                native = build_native_encoder(
                    spec, SafetensorsSource(tiny.directory), kernels, max_positions=spec.max_position_embeddings
                )
                together = native.forward(ragged_batch(texts))
                alone = torch.cat([native.forward(ragged_batch([text])) for text in texts])
            for found in (together, alone):
                off = (found - expected).double().square().mean().sqrt()
                assert off < 0.01 * expected.double().square().mean().sqrt(), isa


def test_directions_are_transformers(tiny: TinyModel) -> None:
    spec = _spec(tiny)
    if native_encoder_problem(spec):
        return
    texts = _texts()
    with torch.inference_mode(), opened() as kernels:
        native = build_native_encoder(
            spec, SafetensorsSource(tiny.directory), kernels, max_positions=spec.max_position_embeddings
        )
        for text in texts:
            found, expected = native.forward(ragged_batch([text])), hidden_states(tiny, text)
            assert torch.nn.functional.cosine_similarity(found.mean(0), expected.mean(0), dim=0) > 0.999
