"""Every feature that changes the bytes, on minimal configs with published field values."""

from fractions import Fraction
from typing import Any

import pytest

from servekit.kvcalc.kv_formats import parse_kv_dtype
from servekit.kvcalc.memory import KvTerms, kv_terms
from servekit.kvcalc.model_shape import read_model_shape
from tests.kvcalc.published import ALL, Terms


@pytest.mark.parametrize(("config", "expected"), ALL.values(), ids=ALL.keys())
def test_five_terms(config: dict[str, Any], expected: Terms) -> None:
    shape = read_model_shape(config)

    terms = kv_terms(shape, parse_kv_dtype("bf16"))

    growth, indexer, window, state, cross = expected
    assert terms == KvTerms(Fraction(growth), Fraction(indexer), window, state, cross)
    assert shape.assumed == ()


def test_whisper_has_a_fixed_number_of_source_tokens() -> None:
    config, _ = ALL["Whisper-tiny: the decoder's own names"]

    assert read_model_shape(config).source_tokens == 1500


def test_an_image_of_mllama_has_its_tiles_tokens() -> None:
    config, _ = ALL["Llama-3.2-90B-Vision: cross layers do not grow with text"]

    assert read_model_shape(config).source_tokens == 1601 * 4


def test_mtp_layers_are_kept_apart() -> None:
    config, _ = ALL["DeepSeek-V3"]

    shape = read_model_shape({**config, "num_nextn_predict_layers": 1})

    assert len(shape.layers) == 61
    assert len(shape.mtp_layers) == 1
