"""Every encoder family equals transformers, each text alone and all of them in one ragged batch."""

import json

import numpy as np
import pytest
import torch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.attention.reference import ReferenceAttention
from servekit.engine.attention.sdpa import SdpaAttention
from servekit.engine.batch import Batch
from servekit.engine.layers.packed import unquantised_format
from servekit.engine.models.build_encoder import build_encoder
from servekit.engine.models.encoder import Encoder
from servekit.engine.models.encoder_parameters import check_encoder_parameters
from servekit.engine.models.weights import SafetensorsSource
from servekit.engine.spec.encoder_families import read_encoder_spec
from tests.engine.encoder_families import ENCODERS, hidden_states, make_encoder
from tests.engine.families import TinyModel

_LENGTHS = (1, 7, 40, 40, 63, 64, 100, 200)
_CPU = torch.device("cpu")


@pytest.fixture(scope="module", params=sorted(ENCODERS))
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_encoder(request.param, tmp_path_factory.mktemp(request.param))


def _load(tiny: TinyModel, backend: AttentionBackend[object]) -> Encoder:
    spec = read_encoder_spec(json.loads((tiny.directory / "config.json").read_text(encoding="utf-8")))
    source = SafetensorsSource(tiny.directory)
    check_encoder_parameters(spec, source.shapes())
    return build_encoder(
        spec,
        source,
        linear=unquantised_format(torch.float32, _CPU)[0],
        backend=backend,
        dtype=torch.float32,
        device=_CPU,
        max_positions=spec.max_position_embeddings,
    )


def _text(length: int, seed: int = 0) -> list[int]:
    ids: list[int] = np.random.default_rng([seed, length]).integers(3, 131, length).tolist()
    return ids


def ragged_batch(texts: list[list[int]]) -> Batch:
    lengths = np.array([len(text) for text in texts])
    return Batch(
        input_ids=torch.tensor([token_id for text in texts for token_id in text]),
        positions=torch.cat([torch.arange(n) for n in lengths.tolist()]),
        logits_idx=torch.empty(0, dtype=torch.int64),
        slot_mapping=None,
        block_tables=None,
        query_lens=lengths,
        context_lens=lengths,
        block_size=1,
        num_tokens=int(lengths.sum()),
        num_seqs=len(texts),
    )


@pytest.mark.parametrize("backend", [SdpaAttention(), ReferenceAttention()], ids=lambda b: b.name)
def test_hidden_states_equal_transformers_in_a_ragged_batch(tiny: TinyModel, backend: AttentionBackend[object]) -> None:
    encoder = _load(tiny, backend)
    texts = [_text(length, seed) for seed, length in enumerate(_LENGTHS)]
    with torch.inference_mode():
        hidden = encoder.forward(ragged_batch(texts))
        alone = torch.cat([encoder.forward(ragged_batch([text])) for text in texts])
    expected = torch.cat([hidden_states(tiny, text) for text in texts])
    torch.testing.assert_close(hidden, expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(alone, expected, atol=1e-4, rtol=0)
