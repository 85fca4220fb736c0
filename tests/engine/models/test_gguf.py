from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from numpy.typing import NDArray

from servekit.engine.models.gguf import GgufSource
from servekit.errors import ModelError
from tests.store.gguf_files import HEAD_DIM, HEADS, HIDDEN, INNER, KV_HEADS, byte_level_vocabulary, tensors, write_gguf

VOCAB = len(byte_level_vocabulary()["tokens"])


@contextmanager
def opened(path: Path) -> Iterator[GgufSource]:
    source = GgufSource(path)
    try:
        yield source
    finally:
        source.close()


def interleave(values: NDArray[np.float32], num_heads: int) -> NDArray[np.float32]:
    """What llama.cpp's conversion does to Llama's query and key projections."""
    rows = values.shape[0] // num_heads
    order = [
        head * rows + half * rows // 2 + pair
        for head in range(num_heads)
        for pair in range(rows // 2)
        for half in (0, 1)
    ]
    return values[order]


def test_names_and_shapes_are_transformers(tmp_path: Path) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=HIDDEN,
        intermediate_size=INNER,
        num_hidden_layers=2,
        num_attention_heads=HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        tie_word_embeddings=True,
    )
    expected = {name: tuple(value.shape) for name, value in LlamaForCausalLM(config).state_dict().items()}
    del expected["lm_head.weight"]
    with opened(write_gguf(tmp_path / "m.gguf")) as source:
        assert source.shapes() == expected


@pytest.mark.parametrize(
    ("architecture", "gguf_name", "name"),
    [
        ("gemma2", "blk.1.post_attention_norm.weight", "model.layers.1.post_attention_layernorm.weight"),
        ("gemma2", "blk.1.ffn_norm.weight", "model.layers.1.pre_feedforward_layernorm.weight"),
        ("gemma3", "blk.0.post_ffw_norm.weight", "model.layers.0.post_feedforward_layernorm.weight"),
        ("gemma3", "blk.0.attn_q_norm.weight", "model.layers.0.self_attn.q_norm.weight"),
        ("gemma3", "output_norm.weight", "model.norm.weight"),
    ],
)
def test_gemma_norms_lose_the_one_that_was_added(tmp_path: Path, architecture: str, gguf_name: str, name: str) -> None:
    weights = tensors(vocab_size=VOCAB, architecture=architecture)
    with opened(write_gguf(tmp_path / "m.gguf", architecture=architecture, weights=weights)) as source:
        np.testing.assert_array_equal(source.load(name).numpy(), weights[gguf_name] - 1)


def test_llama_projections_are_put_back_in_halves(tmp_path: Path) -> None:
    original = tensors(vocab_size=VOCAB)
    stored = dict(original)
    for part, num_heads in (("attn_q", HEADS), ("attn_k", KV_HEADS)):
        stored[f"blk.0.{part}.weight"] = interleave(original[f"blk.0.{part}.weight"], num_heads)
    with opened(write_gguf(tmp_path / "m.gguf", weights=stored)) as source:
        for part, module in (("attn_q", "q_proj"), ("attn_k", "k_proj"), ("attn_v", "v_proj")):
            loaded = source.load(f"model.layers.0.self_attn.{module}.weight")
            np.testing.assert_array_equal(loaded.numpy(), original[f"blk.0.{part}.weight"])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q8_0"])
def test_blocks_are_the_stored_rows_in_the_order_of_the_loaded_ones(tmp_path: Path, kind: str) -> None:
    quantisation = GGMLQuantizationType[kind]
    kinds = {f"blk.0.{part}.weight": quantisation for part in ("attn_q", "attn_k", "attn_v", "ffn_down")}
    names = [f"model.layers.0.{module}.weight" for module in ("self_attn.q_proj", "self_attn.k_proj", "mlp.down_proj")]
    with opened(write_gguf(tmp_path / "m.gguf", kinds=kinds)) as source:
        for name in names:
            blocks = source.blocks(name)
            assert blocks is not None
            np.testing.assert_array_equal(gguf.quants.dequantize(blocks, quantisation), source.load(name).numpy())
            del blocks  # a view of the file, which has to be closed
        assert source.blocks("model.layers.0.mlp.up_proj.weight") is None


def test_llama_projection_biases_are_put_back_too(tmp_path: Path) -> None:
    bias = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    weights = tensors(vocab_size=VOCAB) | {"blk.0.attn_q.bias": interleave(bias, HEADS)}
    with opened(write_gguf(tmp_path / "m.gguf", weights=weights)) as source:
        np.testing.assert_array_equal(source.load("model.layers.0.self_attn.q_proj.bias").numpy(), bias)


def test_other_families_are_not_permuted(tmp_path: Path) -> None:
    weights = tensors(vocab_size=VOCAB, architecture="qwen2")
    weights["blk.0.attn_q.bias"] = np.arange(HEADS * HEAD_DIM, dtype=np.float32)
    with opened(write_gguf(tmp_path / "m.gguf", architecture="qwen2", weights=weights)) as source:
        loaded = source.load("model.layers.0.self_attn.q_proj.weight")
        np.testing.assert_array_equal(loaded.numpy(), weights["blk.0.attn_q.weight"])
        bias = source.load("model.layers.0.self_attn.q_proj.bias")
        np.testing.assert_array_equal(bias.numpy(), weights["blk.0.attn_q.bias"])


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1"])
def test_storage_types_are_dequantised(tmp_path: Path, kind: str) -> None:
    quantisation = GGMLQuantizationType[kind]
    weights = tensors(vocab_size=VOCAB)
    path = write_gguf(tmp_path / "m.gguf", weights=weights, kinds={"blk.0.ffn_up.weight": quantisation})
    name = "model.layers.0.mlp.up_proj.weight"
    with opened(path) as source:
        assert source.stored(name) == ("float" if kind in ("F32", "F16", "BF16") else kind)
        assert source.shapes()[name] == (INNER, HIDDEN)
        loaded = source.load(name)
    assert loaded.dtype == torch.float32
    packed = gguf.quants.quantize(weights["blk.0.ffn_up.weight"], quantisation)
    np.testing.assert_array_equal(loaded.numpy(), gguf.quants.dequantize(packed, quantisation))
    np.testing.assert_allclose(loaded.numpy(), weights["blk.0.ffn_up.weight"], atol=0.5)


@pytest.mark.parametrize(("kind", "block_bytes"), [("Q4_K", 144), ("Q5_K", 176), ("Q6_K", 210)])
def test_k_quants_are_dequantised(tmp_path: Path, kind: str, block_bytes: int) -> None:
    # The gguf package cannot make these, so random blocks stand for a file's bytes.
    quantisation = GGMLQuantizationType[kind]
    blocks = np.random.default_rng(0).integers(0, 60, (HIDDEN, block_bytes), dtype=np.uint8)
    path = tmp_path / "m.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_context_length(128)
    writer.add_embedding_length(256)
    writer.add_block_count(1)
    writer.add_feed_forward_length(HIDDEN)
    writer.add_head_count(4)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_tensor("token_embd.weight", blocks, raw_dtype=quantisation)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    with opened(path) as source:
        loaded = source.load("model.embed_tokens.weight")
    assert loaded.shape == (HIDDEN, 256)
    np.testing.assert_array_equal(loaded.numpy(), gguf.quants.dequantize(blocks, quantisation))


def test_loaded_tensors_outlive_the_file(tmp_path: Path) -> None:
    weights = tensors(vocab_size=VOCAB)
    with opened(write_gguf(tmp_path / "m.gguf", weights=weights)) as source:
        loaded = source.load("model.norm.weight")
    loaded += 1
    np.testing.assert_array_equal(loaded.numpy(), weights["output_norm.weight"] + 1)


def test_a_type_that_is_not_read_is_named(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    # The type of a tensor follows its name, the number of dimensions and the dimensions.
    content = bytearray(path.read_bytes())
    start = content.index(b"blk.1.ffn_up.weight") + len(b"blk.1.ffn_up.weight") + 4 + 2 * 8
    content[start : start + 4] = int(GGMLQuantizationType.Q2_K).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"blk\.1\.ffn_up\.weight is stored as Q2_K, which is not read"):
        GgufSource(path)
    content[start : start + 4] = (200).to_bytes(4, "little")
    path.write_bytes(content)
    with pytest.raises(ModelError, match="unknown type 200"):
        GgufSource(path)


def test_tensors_without_a_place_are_listed(tmp_path: Path) -> None:
    weights = tensors(vocab_size=VOCAB) | {"blk.0.attn_sinks.weight": np.ones(4, np.float32)}
    with pytest.raises(ModelError, match=r"not read: blk\.0\.attn_sinks\.weight"):
        GgufSource(write_gguf(tmp_path / "m.gguf", weights=weights))


def test_a_file_that_ends_inside_its_last_tensor_is_refused(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf")
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(ModelError, match="past the end of the file"):
        GgufSource(path)
