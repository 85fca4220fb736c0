"""What quantised weights cost in quality: perplexity of a text, and how often the likeliest token stays the same.

The reference is the same checkpoint with its weights in float32 (a GGUF file's dequantised). Every variant is computed
as it is served, with its own kernels and KV dtype.

    python -m benchmarks.perplexity --model demo --json perplexity.json
"""

import argparse
import json
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, get_args

import numpy as np
import torch

from servekit.config import EngineConfig, KvDTypeChoice
from servekit.engine.batch import Batch
from servekit.engine.device.select import select_device
from servekit.engine.host_batch import HostBatch
from servekit.engine.language_model import LoadedModel, RunnerNeeds, load_language_model
from servekit.engine.load import open_model
from servekit.engine.models.native_decoder import NativeDecoder
from servekit.engine.native_runner import NativeRunner
from servekit.engine.runner import ModelRunner
from servekit.engine.text.tokenizer import Tokenizer
from servekit.kvcalc.memory import PoolPlan, kv_block_bytes, plan_pool
from servekit.kvcalc.model_shape import ModelShape
from servekit.store.resolve import ensure_model

_TEXT = Path(__file__).parent / "data" / "prose.txt"
_BLOCK = 16
VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {"quantize": "none", "dtype": "float32", "kv_dtype": "float32"},
    "int8": {"quantize": "int8"},
    "int4": {"quantize": "int4"},
}


@dataclass(frozen=True, slots=True)
class Quality:
    """Of one variant. `agreement` is the share of places where float32's likeliest token is its own as well."""

    variant: str
    weights: str
    kv_dtype: str
    kernels: str
    tokens: int
    perplexity: float
    relative: float
    agreement: float


def main() -> None:
    """Parse, measure, print, and write the numbers if asked."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="a model as `servekit serve` takes it")
    parser.add_argument("--text", type=Path, default=_TEXT, help="a text file in UTF-8")
    parser.add_argument("--context", type=int, default=512, help="tokens that are read together")
    parser.add_argument("--tokens", type=int, default=None, help="stop after so many")
    parser.add_argument("--kv-dtype", default="auto", choices=get_args(KvDTypeChoice), help="of the quantised variants")
    parser.add_argument("--threads", type=int, default=None)
    parser.add_argument("--json", type=Path, default=None)
    arguments = parser.parse_args()
    results: list[Quality] = []
    for result in measure(
        arguments.model, arguments.text, arguments.context, arguments.tokens, arguments.threads, arguments.kv_dtype
    ):
        print(
            f"{result.variant:8} perplexity {result.perplexity:8.4f} ({result.relative:+.2%}), "
            f"likeliest token the same in {result.agreement:.2%} of {result.tokens:,}; "
            f"{result.kernels} kernels; KV in {result.kv_dtype}; {result.weights}",
            flush=True,
        )
        results.append(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps([asdict(result) for result in results], indent=2), encoding="utf-8")


def measure(
    model: str, text: Path, context: int, limit: int | None, threads: int | None, kv_dtype: KvDTypeChoice
) -> Iterator[Quality]:
    """Each variant in turn, float32 first; the others with keys and values in `kv_dtype`."""
    files = ensure_model(model)
    tokenizer = Tokenizer.from_directory(files.directory)
    start = tokenizer.encode("")  # a BOS where the model expects one: some read nothing sensible without
    token_ids = tokenizer.encode(text.read_text(encoding="utf-8"))[len(start) :][:limit]
    size = context - len(start)
    pieces = [start + token_ids[first : first + size] for first in range(0, len(token_ids) - 1, size)]
    reference, best = math.nan, []
    for name, choices in VARIANTS.items():
        opened = open_model(files)
        choices = {"kv_dtype": kv_dtype, **choices}
        config = EngineConfig(model=model, threads=threads, max_model_len=context, device="cpu", **choices)
        device, _ = select_device("cpu")
        loaded = load_language_model(files, opened.spec, opened.source, config, device)
        opened.source.close()
        losses, likeliest = [], []
        for scores, targets in _scores(loaded, opened.shape, pieces):
            losses.append(torch.nn.functional.cross_entropy(scores, targets, reduction="none"))
            likeliest.append(scores.argmax(-1))
        if loaded.kernels is not None:
            loaded.kernels.close()
        loss = float(torch.cat(losses).double().mean())
        if name == "float32":
            reference, best = loss, likeliest
        yield Quality(
            variant=name,
            weights=loaded.reasons["quantize"],
            kv_dtype=loaded.config.kv_dtype,
            kernels=str(loaded.describe()["running"]),
            tokens=sum(map(len, likeliest)),
            perplexity=math.exp(loss),
            relative=math.exp(loss - reference) - 1,
            agreement=float((torch.cat(likeliest) == torch.cat(best)).double().mean()),
        )


@torch.inference_mode()
def _scores(
    loaded: LoadedModel, shape: ModelShape, pieces: list[list[int]]
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Scores [n - 1, vocab] of each piece of n tokens, and the tokens that came next."""
    model = loaded.model
    runner = loaded.make_runner(RunnerNeeds(_pool(shape, loaded.config, max(map(len, pieces))), 1, frozenset()))
    for piece in pieces:
        batch = _batch(piece)
        if isinstance(model, NativeDecoder):
            assert isinstance(runner, NativeRunner)
            scores = torch.from_numpy(model.logits(model.forward(batch, runner.kv_cache)[:-1]))
        else:
            assert isinstance(runner, ModelRunner)
            tensors = [torch.from_numpy(array) for array in batch.arrays()]
            scores = model.logits(model.forward(Batch.of(batch, tensors), runner.kv_cache)[:-1])
        yield scores, torch.tensor(piece[1:])


def _pool(shape: ModelShape, config: EngineConfig, longest: int) -> PoolPlan:
    """Blocks for one piece, and the null block."""
    memory = (1 + -(-longest // _BLOCK)) * kv_block_bytes(shape, block_size=_BLOCK, kv_dtype=config.kv_dtype)
    return plan_pool(shape, kv_memory=memory, block_size=_BLOCK, kv_dtype=config.kv_dtype, max_model_len=longest)


def _batch(piece: list[int]) -> HostBatch:
    """One sequence from position 0, in the blocks after the null block."""
    length = len(piece)
    return HostBatch(
        input_ids=np.array(piece),
        positions=np.arange(length),
        logits_idx=np.array([length - 1]),
        slot_mapping=np.arange(_BLOCK, _BLOCK + length),
        block_tables=np.arange(1, 1 + -(-length // _BLOCK)).reshape(1, -1),
        query_lens=np.array([length]),
        context_lens=np.array([length]),
        block_size=_BLOCK,
    )


if __name__ == "__main__":
    main()
