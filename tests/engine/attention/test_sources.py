"""Sources of attention for a GPU, on the host: which is chosen and why not, and what their kernels are given."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from servekit.engine.attention import flash, paged, varlen
from servekit.engine.attention.flash import VERSIONS, FlashAttention
from servekit.engine.attention.paged import plan_paged, window_sides
from servekit.engine.attention.reference import ReferenceAttention
from servekit.engine.attention.select import select_attention
from servekit.engine.attention.triton_paged import TritonAttention
from servekit.engine.attention.varlen import VarlenAttention
from servekit.engine.spec.attention import AttentionShape
from servekit.errors import ConfigError
from tests.engine.attention.paged_batches import LAYERS, MIXES, paged_batch, ragged_batch

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def kernel(shape: AttentionShape, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, lengths: dict[str, Any]) -> Any:
    """What a flash kernel computes from its own arguments: every sequence by itself, lower-right aligned."""
    starts, contexts, tables = lengths["starts"].tolist(), lengths["contexts"].tolist(), lengths["tables"]
    out = torch.empty_like(q)
    for row, context in enumerate(contexts):
        if tables is None:
            first = starts[row]
            keys, values = k[first : first + context], v[first : first + context]
        else:
            keys, values = (t[tables[row].long()].flatten(0, 1)[:context] for t in (k, v))
        tokens = slice(starts[row], starts[row + 1])
        out[tokens] = ReferenceAttention._attend(shape, q[tokens], keys, values, None)
    return out


def shape_from(like: AttentionShape, given: dict[str, Any]) -> AttentionShape:
    """The layer that a call describes."""
    left, right = given["window_size"]
    left = -1 if left is None else left
    return replace(
        like,
        scale=given["softmax_scale"] if "softmax_scale" in given else given["scale"],
        window=None if left < 0 else left + 1,
        softcap=given.get("softcap") or None,
        causal=given.get("causal", (left, right)[1] == 0),
    )


class Library:
    """The functions of all three packages over one computation."""

    def __init__(self, like: AttentionShape) -> None:
        self._like = like

    def flash_attn_varlen_func(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        tables = given.get("block_table", given.get("page_table"))
        contexts = given.get("seqused_k")
        if contexts is None:
            contexts = given["cu_seqlens_k"].diff()
        assert given["cu_seqlens_q"].dtype == contexts.dtype == torch.int32
        assert tables is None or tables.dtype == torch.int32
        lengths = {"starts": given["cu_seqlens_q"], "contexts": contexts, "tables": tables}
        out: torch.Tensor = kernel(shape_from(self._like, given), q, k, v, lengths)
        return out

    def flash_attn_with_kvcache(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, **given: Any) -> torch.Tensor:
        lengths = {
            "starts": given["cu_seqlens_q"],
            "contexts": given["cache_seqlens"],
            "tables": given["page_table"],
        }
        out: torch.Tensor = kernel(shape_from(self._like, given), q, k, v, lengths)
        return out


@pytest.mark.parametrize("version", VERSIONS, ids=[version.name for version in VERSIONS])
@pytest.mark.parametrize("shape", LAYERS.values(), ids=LAYERS)
def test_every_version_of_the_package_is_called_with_what_the_layer_asks(
    version: flash.FlashVersion, shape: AttentionShape, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(flash, "_version_for", lambda capability: version)
    monkeypatch.setattr(flash.importlib, "import_module", lambda name: Library(shape))  # type: ignore[attr-defined]
    backend = FlashAttention(CPU)
    assert backend.default_block_size % backend.block_size_multiple == 0
    batch, q, kv, cache = paged_batch(shape, MIXES["mixed"], backend.default_block_size)
    expected = ReferenceAttention().forward(shape, q, kv, cache, batch)
    torch.testing.assert_close(backend.forward(shape, q, kv, cache, backend.plan(batch)), expected)
    for causal in (True, False):
        layer = replace(shape, causal=causal)
        batch, q, kv = ragged_batch(layer, [3, 20, 1])
        expected = ReferenceAttention().forward(layer, q, kv, None, batch)
        torch.testing.assert_close(backend.forward(layer, q, kv, None, backend.plan(batch)), expected)


@pytest.mark.parametrize("name", ["grouped", "windowed"])
def test_torchs_own_kernel_is_called_with_what_the_layer_asks(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shape = LAYERS[name]

    def attend(q: Any, k: Any, v: Any, starts: Any, context_starts: Any, max_q: int, max_k: int, **given: Any) -> Any:
        contexts = given.get("seqused_k")
        contexts = context_starts.diff() if contexts is None else contexts
        assert max_q >= int(starts.diff().max())
        assert max_k >= int(contexts.max())
        assert given["enable_gqa"] is True
        lengths = {"starts": starts, "contexts": contexts, "tables": given.get("block_table")}
        return kernel(shape_from(shape, given), q, k, v, lengths)

    monkeypatch.setattr(varlen, "_varlen_attn", lambda: attend)
    backend = VarlenAttention()
    batch, q, kv, cache = paged_batch(shape, MIXES["mixed"], 16)
    expected = ReferenceAttention().forward(shape, q, kv, cache, batch)
    torch.testing.assert_close(backend.forward(shape, q, kv, cache, backend.plan(batch)), expected)


def test_a_plan_is_made_of_the_batchs_tensors_and_bounds() -> None:
    batch, *_ = paged_batch(LAYERS["grouped"], [(1, 9), (4, 12)], 8)
    captured = replace(batch, query_lens=np.array([9, 9]), context_lens=np.array([9, 9]), longest=(6, 99))
    plan = plan_paged(captured)
    assert plan.query_starts.tolist() == [0, 1, 5]
    assert plan.context_starts.tolist() == [0, 9, 21]
    assert plan.context_lens.tolist() == [9, 12]
    assert (plan.max_query_len, plan.max_context_len) == (6, 99)


def test_windows_as_kernels_count_them() -> None:
    layer = LAYERS["windowed"]
    assert window_sides(layer) == (8, 0)
    assert window_sides(replace(layer, causal=False)) == (8, 8)
    assert window_sides(LAYERS["grouped"]) == (-1, 0)
    assert window_sides(replace(LAYERS["grouped"], causal=False)) == (-1, -1)


def on_gpu(monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], packages: set[str], has_varlen: bool) -> None:
    monkeypatch.setattr(paged, "compute_capability", lambda device: capability)
    monkeypatch.setattr(flash, "compute_capability", lambda device: capability)
    monkeypatch.setattr(flash, "_is_installed", lambda module: module in packages)
    monkeypatch.setattr(FlashAttention, "__init__", lambda self: None)
    monkeypatch.setattr(varlen, "_varlen_attn", lambda: max if has_varlen else None)


@pytest.mark.parametrize(
    ("capability", "packages", "has_varlen", "layer", "dtype", "chosen"),
    [
        ((9, 0), {"flash_attn"}, True, "grouped", torch.bfloat16, "flash"),
        ((9, 0), {"flash_attn_interface"}, True, "grouped", torch.bfloat16, "flash"),
        ((8, 0), {"flash_attn_interface"}, True, "grouped", torch.bfloat16, "varlen"),
        ((9, 0), set(), True, "windowed", torch.float16, "varlen"),
        ((9, 0), set(), True, "softcapped", torch.float16, "sdpa"),
        ((9, 0), {"flash_attn"}, True, "softcapped", torch.float16, "flash"),
        ((9, 0), {"flash_attn"}, True, "grouped", torch.float32, "sdpa"),
        ((7, 5), {"flash_attn"}, True, "grouped", torch.bfloat16, "sdpa"),
    ],
)
def test_the_first_source_that_serves_every_layer_is_chosen(
    capability: tuple[int, int],
    packages: set[str],
    has_varlen: bool,
    layer: str,
    dtype: torch.dtype,
    chosen: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    on_gpu(monkeypatch, capability, packages, has_varlen)
    monkeypatch.setattr(TritonAttention, "unsupported", lambda *asked: ["triton is not installed"])
    shapes = {**LAYERS, "softcapped": replace(LAYERS["grouped"], softcap=5.0)}
    backend, reason = select_attention("auto", [LAYERS["grouped"], shapes[layer]], dtype, GPU)
    assert backend.name == chosen
    assert reason.startswith(f"{chosen}: the first")
    if chosen == "sdpa":
        assert "triton cannot: triton is not installed" in reason


def test_on_a_cpu_every_source_for_a_gpu_says_so_and_one_asked_for_is_refused() -> None:
    backend, reason = select_attention("auto", [LAYERS["grouped"]], torch.float32, CPU)
    assert backend.name == "sdpa"
    assert "flash cannot: it needs a CUDA GPU, and this is cpu" in reason
    with pytest.raises(ConfigError, match="varlen cannot: it needs a CUDA GPU"):
        select_attention("varlen", [LAYERS["grouped"]], torch.float32, CPU)
