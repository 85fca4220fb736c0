"""Which weights and kernels a model is loaded with, what is kept on disk for the next start, and what is said."""

import logging
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf.constants import GGMLQuantizationType
from tokenizers import Tokenizer, models

from servekit.config import EngineConfig
from servekit.engine.load import LoadedEngine, load_engine, open_model
from servekit.engine.models.decoder import Decoder
from servekit.engine.models.native_decoder import NativeDecoder
from servekit.engine.native.kernels import BFLOAT16_ISAS
from servekit.errors import ConfigError
from servekit.store.resolve import find_model
from tests.engine.families import make_tiny
from tests.engine.native.kernels import needs_kernels
from tests.engine.stepping import Stepper
from tests.store.gguf_files import byte_level_vocabulary, tensors, write_gguf


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A store of its own, and torch's threads as they were."""
    monkeypatch.setenv("SERVEKIT_HOME", str(tmp_path / "home"))
    threads = torch.get_num_threads()
    yield tmp_path / "home"
    torch.set_num_threads(threads)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Floats, in safetensors."""
    return _floats(tmp_path / "floats", "llama")


def _floats(directory: Path, family: str) -> Path:
    directory.mkdir()
    make_tiny(family, directory)
    Tokenizer(models.BPE(vocab={"a": 0}, merges=[])).save(str(directory / "tokenizer.json"))
    return directory


@pytest.fixture
def no_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("servekit.engine.language_model.load_library", lambda: (None, "the CPU kernels were not built"))


def _gguf(path: Path, kind: str) -> Path:
    """A model whose matrices are all of one kind, its embedding in eight bits."""
    weights = tensors(vocab_size=len(byte_level_vocabulary()["tokens"]))
    kinds = {name: GGMLQuantizationType[kind] for name, values in weights.items() if values.ndim == 2}
    return write_gguf(path, weights=weights, kinds={**kinds, "token_embd.weight": GGMLQuantizationType.Q8_0})


def _load(model: Path, **config: Any) -> LoadedEngine:
    settings: dict[str, Any] = {"device": "cpu", "threads": 1, "kv_memory": 400_000}
    return load_engine(open_model(find_model(str(model))), EngineConfig(**{**settings, **config}))


def _decoder(loaded: LoadedEngine) -> Any:
    return loaded.runner._decoder


def _answer(loaded: LoadedEngine) -> list[int]:
    """Greedy, in a cache of the engine's KV dtype."""
    stepper = Stepper(_decoder(loaded), kv_dtype=loaded.config.kv_dtype, block_size=16)
    stepper.add("r", [5, 6, 7, 8, 9], max_tokens=12, ignore_eos=True)
    return stepper.drain()["r"]


def _close(*loaded: LoadedEngine) -> None:
    for engine in loaded:
        engine.runner.close()


def _packed(home: Path) -> list[Path]:
    return sorted(home.rglob("packed-*"))


@needs_kernels
@pytest.mark.parametrize(
    ("kind", "quantize", "why"),
    [
        ("Q4_0", "int4", "int4: the four-bit blocks of the file as they are; nothing is rounded"),
        ("Q4_1", "int4", "int4: the four-bit blocks of the file as they are; nothing is rounded"),
        ("Q8_0", "int8", "int8: the file's own blocks have more than four bits; nothing is rounded"),
    ],
)
def test_a_gguf_file_is_served_in_its_own_bits(tmp_path: Path, kind: str, quantize: str, why: str) -> None:
    loaded = _load(_gguf(tmp_path / "m.gguf", kind))
    assert isinstance(_decoder(loaded), NativeDecoder)
    assert (loaded.config.quantize, loaded.config.attention) == (quantize, "native")
    assert (loaded.config.dtype, loaded.config.kv_dtype) == ("float32", "bfloat16")
    props = loaded.props()
    assert props["reasons"]["quantize"] == why
    assert props["kernels"]["running"] in props["kernels"]["available"]
    assert props["kernels"]["why"] == why
    _close(loaded)


@needs_kernels
def test_floats_are_served_in_eight_bits_when_that_changes_little(checkpoint: Path) -> None:
    loaded = _load(checkpoint)
    assert loaded.config.quantize == "int8"
    assert loaded.reasons["quantize"].startswith("int8: half the bytes of bfloat16; rounding changes no matrix by more")
    _close(loaded)


@needs_kernels
def test_floats_stay_floats_when_rounding_would_change_them(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, home: Path
) -> None:
    monkeypatch.setattr("servekit.engine.auto.LARGEST_ROUNDING_ERROR", 0.001)
    loaded = _load(checkpoint)
    assert loaded.config.quantize == "none"
    assert loaded.reasons["quantize"].startswith("none: int8 would change matrix ")
    assert loaded.weights_bytes > 1.5 * _load(checkpoint, quantize="int8").weights_bytes
    # Asked for, it is not held against anybody.
    asked = _load(checkpoint, quantize="int8")
    assert asked.config.quantize == "int8"
    _close(loaded, asked)


@needs_kernels
def test_four_bits_are_what_was_asked_for(checkpoint: Path) -> None:
    four, eight = (_load(checkpoint, quantize=bits) for bits in ("int4", "int8"))
    assert four.reasons["quantize"] == "int4: asked for"
    assert four.weights_bytes < 0.75 * eight.weights_bytes
    _close(four, eight)


@needs_kernels
def test_keys_and_values_take_eight_bits_where_heads_allow(tmp_path: Path) -> None:
    """Nearly half of bfloat16's bytes, 34 for 32 numbers, and an answer of its own."""
    model = _floats(tmp_path / "wide", "qwen3")
    loaded, halves = _load(model, quantize="int4"), _load(model, quantize="int4", kv_dtype="bfloat16")
    assert (loaded.config.kv_dtype, loaded.config.block_size) == ("q8_0", 16)
    assert loaded.reasons["kv_dtype"].startswith("q8_0: half the bytes of bfloat16")
    assert 32 * loaded.plan.bytes_per_token == 17 * halves.plan.bytes_per_token
    assert loaded.kv_bytes == loaded.plan.kv_bytes
    assert _answer(loaded) == _answer(halves)
    _close(loaded, halves)


@needs_kernels
@pytest.mark.parametrize(
    ("family", "config", "why"),
    [
        ("llama", {}, "a scale for every 32 numbers of a head, and a head has 16 here"),
        ("qwen3", {"block_size": 24}, "tiles of 16 tokens, and --block-size 24 was asked for"),
        ("qwen3", {"attention": "sdpa"}, "torch computes here (weights: none: --attention sdpa was asked for"),
        ("qwen3", {"quantize": "int8", "attention": "sdpa"}, "torch computes here (weights: int8: asked for"),
        ("qwen3", {"quantize": "none", "dtype": "float32"}, "torch computes here (weights: none: asked for"),
    ],
)
def test_eight_bits_are_refused_where_nothing_reads_them(
    tmp_path: Path, family: str, config: dict[str, Any], why: str
) -> None:
    model = _floats(tmp_path / family, family)
    with pytest.raises(ConfigError, match="--kv-dtype q8_0") as caught:
        _load(model, kv_dtype="q8_0", **config)
    assert why in str(caught.value)
    assert caught.value.hint
    assert caught.value.param == "kv_dtype"


@pytest.mark.usefixtures("no_kernels")
def test_eight_bits_without_kernels_are_refused(checkpoint: Path) -> None:
    with pytest.raises(ConfigError, match=r"q8_0 .* the CPU kernels were not built"):
        _load(checkpoint, kv_dtype="q8_0")


@needs_kernels
@pytest.mark.parametrize("attention", ["sdpa", "reference"])
def test_attention_in_torch_over_native_products(tmp_path: Path, attention: str) -> None:
    model = _gguf(tmp_path / "m.gguf", "Q4_1")
    loaded = _load(model, quantize="int4", attention=attention)
    assert isinstance(_decoder(loaded), Decoder)
    assert (loaded.config.attention, loaded.config.kv_dtype) == (attention, "float32")
    assert loaded.props()["kernels"]["running"] != "torch"
    native = _load(model, kv_dtype="float32")
    answers = []
    for engine in (loaded, native):
        stepper = Stepper(_decoder(engine))
        stepper.add("r", [5, 6, 7, 8, 9], max_tokens=12, ignore_eos=True)
        answers.append(stepper.drain()["r"])
    assert answers[0] == answers[1]
    _close(loaded, native)


@needs_kernels
def test_bfloat16_is_computed_by_kernels_that_are_quick_at_it(checkpoint: Path) -> None:
    loaded = _load(checkpoint, dtype="bfloat16")
    quick = loaded.props()["kernels"]["available"][0] in BFLOAT16_ISAS
    assert isinstance(_decoder(loaded), NativeDecoder if quick else Decoder)
    assert (loaded.config.quantize, loaded.config.dtype) == ("none", "bfloat16")
    assert loaded.config.attention == ("native" if quick else "sdpa")
    in_torch = _load(checkpoint, dtype="bfloat16", attention="sdpa")
    assert isinstance(_decoder(in_torch), Decoder)
    _close(loaded, in_torch)


def test_without_kernels_torch_serves_and_says_why(tmp_path: Path, no_kernels: None) -> None:
    loaded = _load(_gguf(tmp_path / "m.gguf", "Q4_0"))
    assert isinstance(_decoder(loaded), Decoder)
    assert loaded.config.quantize == "none"
    assert loaded.props()["kernels"] == {
        "running": "torch",
        "available": [],
        "library": "the CPU kernels were not built",
        "why": loaded.reasons["quantize"],
    }
    assert loaded.reasons["quantize"].startswith("none: the CPU kernels were not built; ")


@pytest.mark.parametrize("bits", ["int8", "int4"])
def test_bits_without_kernels_are_refused_with_a_way_out(checkpoint: Path, no_kernels: None, bits: str) -> None:
    with pytest.raises(ConfigError, match=f"--quantize {bits}: the CPU kernels were not built") as caught:
        _load(checkpoint, quantize=bits)
    assert caught.value.hint is not None
    assert "C compiler" in caught.value.hint


@needs_kernels
class TestKeptFile:
    """Packed once, read at the next start, and made again when anything about it is wrong."""

    def test_the_next_start_reads_what_the_first_packed(
        self, checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        first = _load(checkpoint)
        (file,) = _packed(home)
        assert file.name == "packed-int8-model.bin"
        assert not list(checkpoint.glob("packed*"))  # another's folder is not written into

        def never(*_: object, **__: object) -> None:
            raise AssertionError("packed again")

        monkeypatch.setattr("servekit.engine.packed_weights.pack_decoder", never)
        second = _load(checkpoint)
        assert second.reasons["quantize"] == first.reasons["quantize"]
        assert second.weights_bytes == first.weights_bytes
        _close(first, second)

    @pytest.mark.parametrize("content", [b"", b"SKPACKED", b"\0" * 100_000])
    def test_a_damaged_file_is_made_again_and_that_is_said(
        self, checkpoint: Path, home: Path, content: bytes, caplog: pytest.LogCaptureFixture
    ) -> None:
        _close(_load(checkpoint))
        (file,) = _packed(home)
        whole = file.read_bytes()
        file.write_bytes(content)
        with caplog.at_level(logging.WARNING, "servekit.engine"):
            _close(_load(checkpoint))
        assert "packed-int8-model.bin is packed again" in caplog.text
        assert file.read_bytes() == whole

    def test_new_weights_are_packed_anew(self, checkpoint: Path, home: Path, caplog: pytest.LogCaptureFixture) -> None:
        _close(_load(checkpoint))
        before = _packed(home)[0].read_bytes()
        make_tiny("llama", checkpoint, intermediate_size=128)
        with caplog.at_level(logging.WARNING, "servekit.engine"):
            _close(_load(checkpoint))
        assert "made from other weights" in caplog.text
        (file,) = _packed(home)
        assert file.read_bytes() != before

    def test_a_full_disk_does_not_keep_the_server_from_starting(
        self, checkpoint: Path, home: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        def full(*_: object) -> None:
            raise OSError(28, "No space left on device")

        monkeypatch.setattr("servekit.engine.packed_weights.write_packed", full)
        with caplog.at_level(logging.WARNING, "servekit.engine"):
            loaded = _load(checkpoint)
        assert isinstance(_decoder(loaded), NativeDecoder)
        assert "not kept for the next start: [Errno 28] No space left on device" in caplog.text
        assert _packed(home) == []
        _close(loaded)

    def test_each_kind_of_bits_has_a_file_of_its_own(self, tmp_path: Path, home: Path) -> None:
        model = _gguf(tmp_path / "m.gguf", "Q4_0")
        loaded = [_load(model, quantize=bits) for bits in ("int4", "int8")]
        assert [file.name for file in _packed(home)] == ["packed-int4-m.bin", "packed-int8-m.bin"]
        _close(*loaded)


def test_a_changed_spec_makes_the_file_foreign(checkpoint: Path) -> None:
    from servekit.engine.packed_weights import _identity

    model = open_model(find_model(str(checkpoint)))
    other = replace(model.spec, norm_offset=1.0)
    assert _identity(model.files, model.spec, "int8") != _identity(model.files, other, "int8")
    assert _identity(model.files, model.spec, "int8") == _identity(model.files, model.spec, "int8")
    model.source.close()


_WITHOUT_TORCH = """
import sys, time
from servekit.config import EngineConfig
from servekit.engine.core.request import Request, SamplingParams
from servekit.engine.core.scheduler import Scheduler
from servekit.engine.load import load_engine, open_model
from servekit.store.resolve import find_model
import servekit.cli.serve_models, servekit.server.app

loaded = load_engine(open_model(find_model(sys.argv[1])), EngineConfig(threads=1, kv_memory=400_000))
scheduler = Scheduler(loaded.limits)
sampling = SamplingParams(temperature=0.7, top_p=0.9, presence_penalty=1.0, logprobs=2, max_tokens=5, ignore_eos=True)
scheduler.add(Request("r", (3, 4, 5), sampling, 0.0), 0.0)
while scheduler.has_work:
    output = scheduler.schedule(0.0)
    scheduler.apply(output, loaded.runner.step(output).get(), 0.0)
loaded.runner.close()
print(loaded.config.attention, sorted({"torch", "transformers"} & set(sys.modules)))
"""


@needs_kernels
@pytest.mark.parametrize("kind", ["gguf", "safetensors"])
def test_a_server_on_the_kernels_never_imports_torch(tmp_path: Path, checkpoint: Path, kind: str) -> None:
    """Neither to pack the weights, nor to compute with them and choose."""
    model = _gguf(tmp_path / "tiny.gguf", "Q4_0") if kind == "gguf" else checkpoint
    command = [sys.executable, "-c", _WITHOUT_TORCH, str(model)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert (done.stdout, done.returncode) == ("native []\n", 0), done.stderr
