"""One check of everything that needs a GPU, sized for six minutes of one: is it right, and how fast is it?

    python scripts/gpu_check.py --json gpu.json          # on a machine with a CUDA GPU
    python scripts/gpu_check.py --dry                    # anywhere: tiny sizes on FakeCuda, every line but the kernels

It needs torch, transformers and the source tree, no network and no weights: models are random, at published shapes.
Prints one table, and ends with 1 when a check has failed. `--only correctness` is small enough for compute-sanitizer.
"""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

sys.path[:0] = [str(Path(__file__).resolve().parents[1] / "src"), str(Path(__file__).resolve().parents[1])]

import torch
import transformers
from tests.engine.attention.paged_batches import LAYERS, MIXES, RAGGED, paged_batch, ragged_batch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.attention.reference import ReferenceAttention
from servekit.engine.attention.sdpa import SdpaAttention
from servekit.engine.attention.select import attention_backends
from servekit.engine.batch import Batch
from servekit.engine.core.embed_queue import EmbedInput
from servekit.engine.core.request import Request, SamplingParams
from servekit.engine.core.scheduler import Scheduler, SchedulerConfig
from servekit.engine.device.base import Device
from servekit.engine.device.cuda import CudaDevice
from servekit.engine.device.fake import FakeCuda
from servekit.engine.embed_runner import ModelEmbedRunner
from servekit.engine.graphs import GraphCache
from servekit.engine.kv_cache import KvCache
from servekit.engine.layers.linear import Dense
from servekit.engine.layers.pooling import normalise, pool
from servekit.engine.models.build import build_decoder
from servekit.engine.models.decoder import Decoder
from servekit.engine.runner import ModelRunner
from servekit.engine.spec.attention import AttentionShape
from servekit.engine.spec.families import read_decoder_spec

T = TypeVar("T")

QWEN25_05B: dict[str, Any] = {"family": "Qwen2", "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "vocab_size": 151936, "tie_word_embeddings": True}  # fmt: skip
QWEN3_4B: dict[str, Any] = {"family": "Qwen3", "hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151936,
    "tie_word_embeddings": True}  # fmt: skip
QWEN25_7B: dict[str, Any] = {"family": "Qwen2", "hidden_size": 3584, "intermediate_size": 18944,
    "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
    "tie_word_embeddings": False}  # fmt: skip
TINY: dict[str, Any] = {"family": "Qwen2", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 300, "tie_word_embeddings": True}  # fmt: skip


@dataclass(frozen=True)
class Sizes:
    """What is run; the dry ones are small enough for a CPU."""

    models: Mapping[str, Mapping[str, Any]]
    batches: tuple[int, ...]
    prefills: tuple[int, ...]
    texts: tuple[int, ...]
    context: int
    decode_steps: int
    leak_steps: int
    matmul: int
    copy_bytes: int
    peers: frozenset[str]


FULL = Sizes(
    models={"qwen2.5-0.5b": QWEN25_05B, "qwen3-4b": QWEN3_4B, "qwen2.5-7b": QWEN25_7B},
    batches=(1, 4, 16, 64, 256),
    prefills=(128, 512, 2048, 8192),
    texts=(128, 512, 4096),
    context=8448,
    decode_steps=40,
    leak_steps=2000,
    matmul=8192,
    copy_bytes=2**32,
    peers=frozenset({"qwen2.5-0.5b"}),
)
DRY = Sizes(
    models={"tiny": TINY},
    batches=(1, 4),
    prefills=(16, 40),
    texts=(8, 24),
    context=96,
    decode_steps=4,
    leak_steps=20,
    matmul=64,
    copy_bytes=2**16,
    peers=frozenset({"tiny"}),
)


@dataclass
class Report:
    """Rows of the one table. A row that is not `ok` fails the run; None means that it is a measurement."""

    deadline: float
    rows: list[dict[str, Any]] = field(default_factory=list)

    def add(self, what: str, value: str, *, ok: bool | None = None, **numbers: Any) -> None:
        """Print a row as it comes: a lease that ends early has shown what it got to."""
        self.rows.append({"check": what, "value": value, "ok": ok, **numbers})
        mark = {True: "ok  ", False: "FAIL", None: "    "}[ok]
        print(f"{mark} {what:<58} {value}", flush=True)

    def part(self, name: str, work: Callable[[], T]) -> T | None:
        """A part that may fail without ending the others; it is not begun once the time is up."""
        if self.time_is_up:
            self.add(name, "not run: the time is up", ok=False)
            return None
        began = time.monotonic()
        result = None
        try:
            result = work()
        except Exception as error:
            self.add(name, f"{type(error).__name__}: {str(error)[:150].splitlines()[:1]}", ok=False)
        print(f"     -- {name}: {time.monotonic() - began:.1f} s", flush=True)
        return result

    @property
    def time_is_up(self) -> bool:
        return time.monotonic() > self.deadline


class RandomWeights:
    """A WeightSource of random matrices, made on the device when they are asked for."""

    def __init__(self, model: Any) -> None:
        self._state = dict(model.state_dict())

    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in self._state.items()}

    def load(self, name: str) -> torch.Tensor:
        tensor: torch.Tensor = self._state[name]
        return tensor

    def numbers(self, name: str) -> Any:
        """For kernels on the host."""
        return self._state[name].float().cpu().numpy()

    def stored(self, name: str) -> str:
        """Numbers, all of them."""
        return "float"

    def blocks(self, name: str) -> None:
        """None."""

    def close(self) -> None:
        """Nothing is open."""


class Bench:
    """One random model on the device: ours and transformers' share its numbers."""

    def __init__(self, device: Device, shape: Mapping[str, Any], backend: AttentionBackend[Any], sizes: Sizes) -> None:
        self.device, self.backend, self.sizes = device, backend, sizes
        self.dtype = torch.bfloat16 if device.torch_device.type == "cuda" else torch.float32
        settings = {name: value for name, value in shape.items() if name != "family"}
        self.config = getattr(transformers, f"{shape['family']}Config")(
            **settings, max_position_embeddings=sizes.context, attn_implementation="sdpa"
        )
        torch.manual_seed(0)
        with torch.device(device.torch_device):
            peers: Any = transformers.AutoModelForCausalLM
            self.peer: Any = peers.from_config(self.config, dtype=self.dtype).eval()
        config = json.loads(self.config.to_json_string(use_diff=False))
        config["architectures"] = [f"{shape['family']}ForCausalLM"]
        self.spec = read_decoder_spec(config)
        self.decoder: Decoder = build_decoder(
            self.spec,
            RandomWeights(self.peer),
            linear=Dense(self.dtype, device.torch_device),
            backend=backend,
            dtype=self.dtype,
            device=device.torch_device,
            max_positions=sizes.context,
        )
        self.num_bytes = sum(p.numel() * p.element_size() for p in self.peer.parameters())
        self.num_parameters = sum(p.numel() for p in self.peer.parameters())

    def runner(self, num_seqs: int, *, graphs: bool, num_tokens: int | None = None) -> tuple[Scheduler, ModelRunner]:
        """A pool for `num_seqs` sequences of `num_tokens`, and what computes with it."""
        context = num_tokens or self.sizes.context
        block_size = self.backend.default_block_size
        num_blocks = num_seqs * -(-context // block_size) + 1
        cache = KvCache(
            num_layers=self.spec.num_layers,
            num_blocks=num_blocks,
            block_size=block_size,
            num_kv_heads=self.spec.num_kv_heads,
            head_dim=self.spec.head_dim,
            dtype=self.dtype,
            device=self.device.torch_device,
        )
        cached = None
        if graphs and self.backend.is_capturable:
            blocks = -(-context // block_size)
            cached = GraphCache(
                self.device, memory=2**31, max_num_seqs=num_seqs, max_context_len=context, max_blocks=blocks
            )
        runner = ModelRunner(self.decoder, cache, self.device, max_num_seqs=num_seqs, graphs=cached)
        budget = max(num_seqs, self.sizes.context)
        scheduler = Scheduler(
            SchedulerConfig(num_seqs, budget, context, num_blocks, block_size, enable_prefix_caching=False)
        )
        return scheduler, runner


def play(
    scheduler: Scheduler, runner: ModelRunner, ahead: int, stamps: list[float] | None = None
) -> dict[str, list[int]]:
    """Step until nothing is left, `ahead` steps before anything is read; the tokens of each request."""
    answers: dict[str, list[int]] = {}
    in_flight: list[Any] = []
    while scheduler.has_work or in_flight:
        output = scheduler.schedule(0.0)
        if not output.is_empty:
            in_flight.append((output, runner.step(output)))
            if ahead:
                scheduler.launched(output)
        while len(in_flight) > (0 if output.is_empty else ahead):
            landed, result = in_flight.pop(0)
            for update in scheduler.apply(landed, result.get(), 0.0):
                answers.setdefault(update.request_id, []).extend(update.token_ids)
            if stamps is not None:
                stamps.append(time.perf_counter())
    return answers


def add_requests(scheduler: Scheduler, vocab: int, lengths: Sequence[int], num_tokens: int, **sampling: Any) -> None:
    for index, length in enumerate(lengths):
        prompt = tuple((31 * place + 7 * index) % (vocab - 1) + 1 for place in range(length))
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": num_tokens, "ignore_eos": True, **sampling})
        scheduler.add(Request(str(index), prompt, params, 0.0), 0.0)


def synchronize(device: Device) -> None:
    """Wait for everything that is queued."""
    if device.torch_device.type == "cuda":
        torch.cuda.synchronize()


def timed(device: Device, work: Callable[[], object], repeats: int = 5) -> float:
    """Seconds of one `work`, the median of `repeats` after a warm-up."""
    work()
    times = []
    for _ in range(repeats):
        synchronize(device)
        began = time.perf_counter()
        work()
        synchronize(device)
        times.append(time.perf_counter() - began)
    return sorted(times)[len(times) // 2]


def usable_sources(device: Device, shapes: Sequence[AttentionShape], dtype: torch.dtype) -> dict[str, Any]:
    """Every source of attention that can serve all of `shapes` here, by name."""
    return {
        name: kind
        for name, kind in attention_backends().items()
        if name != "reference" and not any(kind.unsupported(shape, dtype, device.torch_device) for shape in shapes)
    }


def check_attention(report: Report, device: Device, dtype: torch.dtype) -> None:
    """Every source against the reference: decoding, chunks, mixed, windows, softcap, ragged without a cache."""
    where = device.torch_device.type
    tolerance = 3e-2 if dtype != torch.float32 else 2e-5
    for name, kind in attention_backends().items():
        if name == "reference":
            continue
        worst, served, refused = 0.0, 0, set()
        for layer, shape in LAYERS.items():
            reasons = kind.unsupported(shape, dtype, device.torch_device)
            if reasons:
                refused.add(f"{layer}: {', '.join(reasons)}")
                continue
            backend: Any = kind()
            for mix in MIXES.values():
                batch, q, kv, cache = paged_batch(shape, mix, backend.default_block_size, where)
                halves = [tensor.to(dtype) for tensor in (q, kv, cache)]
                expected = ReferenceAttention().forward(shape, q, kv, cache, batch)
                out = backend.forward(shape, *halves, backend.plan(batch))
                worst = max(worst, float((out.float() - expected).abs().max()))
                served += 1
            for lengths in RAGGED.values():
                for causal in (True, False):
                    both = AttentionShape(
                        shape.num_heads,
                        shape.num_kv_heads,
                        shape.head_dim,
                        shape.scale,
                        shape.window,
                        shape.softcap,
                        causal,
                    )
                    ragged, q, kv = ragged_batch(both, lengths, where)
                    expected = ReferenceAttention().forward(both, q, kv, None, ragged)
                    out = backend.forward(both, q.to(dtype), kv.to(dtype), None, backend.plan(ragged))
                    worst = max(worst, float((out.float() - expected).abs().max()))
                    served += 1
        if served:
            report.add(f"attention {name} = reference", f"{served} cases, off by {worst:.1e}", ok=worst < tolerance)
        for reason in sorted(refused):
            report.add(f"attention {name} cannot", reason)


def check_model(report: Report, bench: Bench) -> None:
    """graph = eager across bucket edges, depth 1 = depth 0, greedy = transformers, and no leak."""
    vocab, sizes = bench.spec.vocab_size, bench.sizes
    lengths = [min(length, sizes.context - 30) for length in (3, 17, 64, 65, 1, 33, 9)]

    def answers(ahead: int, *, graphs: bool, **sampling: Any) -> dict[str, list[int]]:
        scheduler, runner = bench.runner(len(lengths), graphs=graphs, num_tokens=128)
        add_requests(scheduler, vocab, [min(length, 90) for length in lengths], 20, **sampling)
        return play(scheduler, runner, ahead)

    eager = answers(0, graphs=False)
    report.add("depth 1 = depth 0", agreement(eager, answers(1, graphs=False)), ok=eager == answers(1, graphs=False))
    graphed = answers(1, graphs=True)
    # Padded matrix products may round otherwise, so close calls may differ in half precision.
    same = share_of_equal(eager, graphed)
    report.add(
        "graphs = eager across bucket edges",
        agreement(eager, graphed),
        ok=same >= (1.0 if bench.dtype == torch.float32 else 0.9),
    )
    drawn = answers(0, graphs=False, temperature=0.9, top_p=0.9, seed=5, presence_penalty=0.5, logprobs=2)
    ahead = answers(1, graphs=False, temperature=0.9, top_p=0.9, seed=5, presence_penalty=0.5, logprobs=2)
    report.add(
        "depth 1 = depth 0, sampled with penalties", agreement(drawn, ahead), ok=share_of_equal(drawn, ahead) > 0.9
    )
    report.add("greedy against transformers", *greedy_against_peer(bench))
    check_leak(report, bench)


def greedy_against_peer(bench: Bench) -> tuple[str]:
    """How many greedy tokens agree, teacher-forced so that one close call does not decide all that follow."""
    scheduler, runner = bench.runner(1, graphs=True, num_tokens=96)
    add_requests(scheduler, bench.spec.vocab_size, [16], 40)
    (ours,) = play(scheduler, runner, 1).values()
    prompt = [(31 * place) % (bench.spec.vocab_size - 1) + 1 for place in range(16)]
    ids = torch.tensor([prompt + ours], device=bench.device.torch_device)
    with torch.inference_mode():
        scores = bench.peer(ids).logits[0, 15:-1].float()
    chosen = torch.tensor(ours, device=scores.device)
    regret = scores.max(dim=-1).values - scores.gather(1, chosen.unsqueeze(1)).squeeze(1)
    equal = int((scores.argmax(dim=-1) == chosen).sum())
    allowed = 1e-3 if bench.dtype == torch.float32 else 0.1
    assert float(regret.max()) < allowed * max(1.0, float(scores.std())), f"a token is {float(regret.max()):.3f} worse"
    return (f"{equal} of {len(ours)} equal, the others within rounding",)


def check_leak(report: Report, bench: Bench) -> None:
    """Memory after many steps, with requests that come and go."""
    scheduler, runner = bench.runner(4, graphs=True, num_tokens=64)
    held = []
    for part in range(2):
        steps = 0
        while steps < bench.sizes.leak_steps // 2:
            for index in range(4):
                params = SamplingParams(temperature=0.8, top_p=0.9, seed=index, max_tokens=16, ignore_eos=True)
                scheduler.add(Request(f"{part}-{steps}-{index}", (1, 2, 3 + index), params, 0.0), 0.0)
            stamps: list[float] = []
            play(scheduler, runner, 1, stamps)
            steps += len(stamps)
        synchronize(bench.device)
        held.append(torch.cuda.memory_allocated() if bench.device.torch_device.type == "cuda" else 0)
    grown = held[1] - held[0]
    report.add(f"no leak over {bench.sizes.leak_steps} steps", f"{grown:,} bytes", ok=grown <= 2**20)


def share_of_equal(one: Mapping[str, list[int]], other: Mapping[str, list[int]]) -> float:
    """The share of tokens up to each answer's first difference."""
    total = sum(len(tokens) for tokens in one.values())
    equal = 0
    for name, tokens in one.items():
        pairs = list(zip(tokens, other[name], strict=True))
        equal += next((i for i, (a, b) in enumerate(pairs) if a != b), len(pairs))
    return equal / total


def agreement(one: Mapping[str, list[int]], other: Mapping[str, list[int]]) -> str:
    return f"{share_of_equal(one, other):.1%} of the tokens up to the first difference"


@dataclass(frozen=True)
class Ceilings:
    """Measured: bytes a second of a copy (read and written), and operations a second of a matrix product."""

    copy: float
    matmul: float


def measure_ceilings(report: Report, device: Device, sizes: Sizes, dtype: torch.dtype) -> Ceilings:
    source = torch.empty(sizes.copy_bytes, dtype=torch.uint8, device=device.torch_device)
    target = torch.empty_like(source)
    copy = 2 * sizes.copy_bytes / timed(device, lambda: target.copy_(source))
    n = sizes.matmul
    a, b = (torch.randn(n, n, device=device.torch_device, dtype=dtype) for _ in range(2))
    matmul = 2 * n**3 / timed(device, lambda: a @ b)
    report.add("copy", f"{copy / 1e12:.2f} TB/s", bytes_per_s=copy)
    report.add("matmul", f"{matmul / 1e12:.0f} TFLOP/s", flop_per_s=matmul)
    return Ceilings(copy, matmul)


def measure_decode(report: Report, name: str, bench: Bench, ceilings: Ceilings) -> None:
    """Milliseconds a token by batch: graphs, eager, transformers, and the bound of reading the weights."""
    bound = bench.num_bytes / ceilings.copy
    steps = bench.sizes.decode_steps
    for batch in bench.sizes.batches:
        if report.time_is_up:
            return
        seconds: dict[str, Any] = {}
        for kind in ("graphs", "eager"):
            if kind == "eager" and batch not in (1, 16, 64):
                continue
            scheduler, runner = bench.runner(batch, graphs=kind == "graphs", num_tokens=64 + 2 * steps)
            add_requests(scheduler, bench.spec.vocab_size, [32] * batch, steps + 10)
            stamps: list[float] = []
            play(scheduler, runner, 1, stamps)
            gaps = sorted(b - a for a, b in zip(stamps[-steps:], stamps[-steps + 1 :], strict=False))
            seconds[kind] = gaps[len(gaps) // 2]
            del scheduler, runner
        if name in bench.sizes.peers and batch <= 16:
            seconds["transformers"] = peer_decode(bench, batch)
        text = ", ".join(f"{kind} {1e3 * value:.3f} ms" for kind, value in seconds.items())
        report.add(
            f"{name} decode B={batch}",
            f"{text}; bound {1e3 * bound:.3f} ms = {bound / seconds['graphs']:.0%}",
            bound_s=bound,
            **seconds,
        )


@torch.inference_mode()
def peer_decode(bench: Bench, batch: int) -> float:
    """transformers' own step with its cache, seconds."""
    ids = torch.ones((batch, 32), dtype=torch.int64, device=bench.device.torch_device)
    out = bench.peer(ids, use_cache=True)
    cache, last = out.past_key_values, ids[:, -1:]

    def step() -> None:
        nonlocal last
        last = bench.peer(last, past_key_values=cache, use_cache=True).logits[:, -1:].argmax(dim=-1)

    return timed(bench.device, step, repeats=7)


def measure_prefill(report: Report, name: str, bench: Bench, ceilings: Ceilings) -> None:
    """Seconds of a prompt in one step, and the share of the matrix rate that this is."""
    head = bench.spec.vocab_size * bench.spec.hidden_size
    for length in bench.sizes.prefills:
        if report.time_is_up:
            return

        pair = bench.runner(1, graphs=False, num_tokens=length + 2)

        def prompt(length: int = length, pair: tuple[Scheduler, ModelRunner] = pair) -> None:
            scheduler, runner = pair
            add_requests(scheduler, bench.spec.vocab_size, [length], 1)
            play(scheduler, runner, 0)

        seconds = timed(bench.device, prompt, repeats=3)
        flop = 2 * length * (bench.num_parameters - head)
        share = flop / seconds / ceilings.matmul
        report.add(
            f"{name} prefill {length}", f"{1e3 * seconds:.2f} ms, {share:.0%} of matmul", seconds=seconds, share=share
        )


def measure_embeddings(report: Report, name: str, bench: Bench) -> None:
    """Texts as vectors, alone and in batches: ragged, by graphs where they are small enough."""

    def hidden(batch: Batch) -> torch.Tensor:
        return bench.decoder.forward(batch, None)

    def head(states: torch.Tensor, starts: torch.Tensor) -> torch.Tensor:
        return normalise(pool(states, starts, "last"))

    graphs = None
    if bench.backend.is_capturable:
        graphs = GraphCache(bench.device, memory=2**30, max_num_seqs=64, max_context_len=bench.sizes.context)
    runner = ModelEmbedRunner(hidden, head, bench.device, graphs=graphs)
    for length in bench.sizes.texts:
        for batch in (1, 8):
            texts = [EmbedInput(tuple(1 + i % 50 for i in range(length)))] * batch

            def embed(texts: list[EmbedInput] = texts) -> None:
                runner.embed(texts).get()

            embed()
            embed()
            seconds = timed(bench.device, embed)
            report.add(f"{name} embed {batch} x {length}", f"{1e3 * seconds:.2f} ms", seconds=seconds)


def measure_sources(report: Report, device: Device, sizes: Sizes, dtype: torch.dtype) -> None:
    """Which source of attention wins where: decoding and a chunk, at the heads of the 7B shape."""
    shape = AttentionShape(28, 4, 128, 128**-0.5) if sizes is FULL else AttentionShape(4, 2, 16, 0.25)
    longest = min(4096, sizes.context - 8)
    cases = {"decode B=1": [(1, longest)], "decode B=64": [(1, longest // 4)] * 64, "chunk": [(longest // 4, longest)]}
    for name, kind in usable_sources(device, [shape], dtype).items():
        backend = kind()
        for case, mix in cases.items():
            batch, q, kv, cache = paged_batch(shape, mix, backend.default_block_size, device.torch_device.type)
            halves = [tensor.to(dtype) for tensor in (q, kv, cache)]
            plan = backend.plan(batch)

            def attend(backend: Any = backend, halves: Any = halves, plan: Any = plan) -> None:
                backend.forward(shape, *halves, plan)

            seconds = timed(device, attend)
            report.add(f"attention {name} {case}", f"{1e6 * seconds:.0f} us a layer", seconds=seconds)


def pick_backend(
    device: Device, bench_shape: Mapping[str, Any], sizes: Sizes, dtype: torch.dtype
) -> AttentionBackend[Any]:
    """The first source that serves the shape; on the dry run the one that stands for a kernel."""
    if device.torch_device.type != "cuda":
        from tests.engine.attention.capturable import CapturableAttention

        return CapturableAttention()
    head_dim = bench_shape.get("head_dim", bench_shape["hidden_size"] // bench_shape["num_attention_heads"])
    shape = AttentionShape(
        bench_shape["num_attention_heads"], bench_shape["num_key_value_heads"], head_dim, head_dim**-0.5
    )
    sources = usable_sources(device, [shape], dtype)
    return next(iter(sources.values()))() if sources else SdpaAttention()


def run(report: Report, *, dry: bool, only: str) -> None:
    sizes: Sizes = DRY if dry else FULL
    device: Device = FakeCuda() if dry else CudaDevice()
    dtype = torch.float32 if dry else torch.bfloat16
    report.add("device", f"{device.describe()}, torch {torch.__version__}, transformers {transformers.__version__}")
    if only in ("all", "correctness"):
        report.part("attention", lambda: check_attention(report, device, dtype))
        shape = next(iter(sizes.models.values()))
        report.part(
            "model", lambda: check_model(report, Bench(device, shape, pick_backend(device, shape, sizes, dtype), sizes))
        )
    if only in ("all", "speed"):
        report.part("sources", lambda: measure_sources(report, device, sizes, dtype))
        ceilings = report.part("ceilings", lambda: measure_ceilings(report, device, sizes, dtype))
        for name, shape in sizes.models.items():
            if ceilings is not None:
                report.part(name, partial(measure_model, report, device, name, shape, sizes, ceilings))
                if not dry:
                    torch.cuda.empty_cache()


def measure_model(
    report: Report, device: Device, name: str, shape: Mapping[str, Any], sizes: Sizes, ceilings: Ceilings
) -> None:
    """Everything that is measured of one model."""
    dtype = torch.float32 if device.torch_device.type == "cpu" else torch.bfloat16
    bench = Bench(device, shape, pick_backend(device, shape, sizes, dtype), sizes)
    report.add(f"{name} attention", f"{bench.backend.name}, {bench.num_bytes / 1e9:.2f} GB of weights")
    measure_decode(report, name, bench, ceilings)
    measure_prefill(report, name, bench, ceilings)
    if name in bench.sizes.peers:
        measure_embeddings(report, name, bench)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print, write; 0 when no check has failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry", action="store_true", help="tiny sizes on FakeCuda, without a GPU")
    parser.add_argument("--only", choices=("all", "correctness", "speed"), default="all")
    parser.add_argument("--seconds", type=float, default=300.0, help="start no further part after so long")
    parser.add_argument("--json", type=Path, help="write the rows here as well")
    given = parser.parse_args(arguments)
    report = Report(time.monotonic() + given.seconds)
    run(report, dry=given.dry, only=given.only)
    if given.json is not None:
        versions = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        }
        document = {"dry": given.dry, "when": time.strftime("%Y-%m-%d"), "versions": versions, "rows": report.rows}
        given.json.write_text(json.dumps(document, indent=1), encoding="utf-8")
    failed = [row["check"] for row in report.rows if row["ok"] is False]
    print(f"{len(report.rows)} rows, {len(failed)} failed{': ' + ', '.join(failed) if failed else ''}")
    return 1 if failed else 0


if __name__ == "__main__":
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    sys.exit(main())
