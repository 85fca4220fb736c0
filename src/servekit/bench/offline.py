"""The two textbook experiments in process: decoding by batch size, and prefill by prompt length.

Drives the engine's Scheduler and ModelRunner step by step on this thread, with no server, no text and no waiting in
between, so that a time is the time of steps. It must not know how results are shown.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from servekit.bench.machine_ceilings import measure_ceilings
from servekit.bench.offline_memory import PeakMemory
from servekit.bench.offline_roofline import Ceilings, Roofline, decode_work, prefill_work, roofline
from servekit.bench.stats import percentile
from servekit.config import EngineConfig
from servekit.engine.core.request import Request, SamplingParams
from servekit.engine.core.scheduler import Scheduler
from servekit.engine.load import LoadedEngine, OpenModel, load_engine, open_model
from servekit.engine.native.quantiser import Bits
from servekit.engine.spec.decoder import DecoderSpec
from servekit.errors import ConfigError
from servekit.kvcalc.memory import kv_block_bytes
from servekit.store.resolve import LocalModel

SEED = 0


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One batch size. Seconds are medians over the repeats; rates are tokens a second.

    `total_s` is from the start of the prefill of the whole batch to its last token, `tokens_per_s` all tokens over it,
    `per_request_tokens_per_s` what one reader sees while decoding. KV bytes are those of the blocks that the batch
    held at its last step: as the tensors have it, and as the calculator says. `peak_bytes` is None where unknown.
    """

    batch: int
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float
    total_s: float
    tokens_per_s: float
    per_request_tokens_per_s: float
    spread: float
    peak_bytes: int | None
    kv_bytes: int
    kv_bytes_formula: int
    roofline: Roofline


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One prompt length, computed in a single step, alone. `seconds` is the median over the repeats."""

    prompt_tokens: int
    seconds: float
    tokens_per_s: float
    spread: float
    roofline: Roofline


@dataclass(frozen=True, slots=True)
class OfflineReport:
    """Both experiments, the machine's ceilings, and what the engine had decided."""

    model: str
    device: str
    threads: int | None
    quantize: str
    dtype: str
    kv_dtype: str
    num_parameters: int
    weights_bytes: int
    ceilings: Ceilings
    decode: tuple[DecodePoint, ...]
    prefill: tuple[PrefillPoint, ...]


@dataclass(frozen=True, slots=True)
class Plan:
    """What to run. Every point is run `repeats` times after one run that does not count."""

    batches: tuple[int, ...] = (1, 4, 16)
    prompt_tokens: int = 110
    output_tokens: int = 64
    prefill_lengths: tuple[int, ...] = (128, 512, 1024, 2048)
    repeats: int = 3


Progress = Callable[[str], None]


def run_offline(files: LocalModel, config: EngineConfig, plan: Plan, progress: Progress) -> OfflineReport:
    """Load the model and run both experiments. Raises ConfigError for a plan that the context or the pool cannot hold.

    `progress` is told what is about to start.
    """
    progress("loading the model")
    model = open_model(files)
    loaded = load_engine(model, _engine_config(config, model, plan))
    bench = OfflineBench(model, loaded)
    progress("measuring the machine's ceilings")
    ceilings = bench.ceilings()
    decode = []
    for batch in plan.batches:
        progress(f"decoding, batch of {batch}")
        decode.append(bench.decode(batch, plan, ceilings))
    prefill = []
    for length in plan.prefill_lengths:
        progress(f"prefill of {length} tokens")
        prefill.append(bench.prefill(length, plan.repeats, ceilings))
    return OfflineReport(
        model=loaded.engine.model_name,
        device=loaded.device.describe(),
        threads=loaded.config.threads if loaded.device.kind == "cpu" else None,
        quantize=loaded.config.quantize,
        dtype=loaded.config.dtype,
        kv_dtype=loaded.config.kv_dtype,
        num_parameters=loaded.num_parameters,
        weights_bytes=loaded.weights_bytes,
        ceilings=ceilings,
        decode=tuple(decode),
        prefill=tuple(prefill),
    )


def _engine_config(config: EngineConfig, model: OpenModel, plan: Plan) -> EngineConfig:
    """A context and a pool that hold the largest point. Raises ConfigError when the model's context does not."""
    longest = max([plan.prompt_tokens + plan.output_tokens, *(length + 1 for length in plan.prefill_lengths)])
    context = model.spec.max_position_embeddings
    if longest > context:
        raise ConfigError(
            f"the longest point has {longest} tokens, but the model's context is {context}",
            hint="lower --prefill, --prompt-tokens or --output-tokens",
            param="prefill",
        )
    parallel = max(plan.batches, default=1)
    budget = config.max_num_batched_tokens or max(256, parallel)
    return replace(config, parallel=parallel, max_model_len=longest, max_num_batched_tokens=budget)


class OfflineBench:
    """A loaded model, and one point of an experiment at a time."""

    def __init__(self, model: OpenModel, loaded: LoadedEngine) -> None:
        self._loaded = loaded
        self._spec: DecoderSpec = model.spec
        self._limits = replace(loaded.limits, policy="continuous", enable_prefix_caching=False)
        self._runner = loaded.runner
        self._block_bytes = kv_block_bytes(
            model.shape, block_size=self._limits.block_size, kv_dtype=loaded.config.kv_dtype
        )
        numbers = self._limits.block_size * self._spec.num_layers * 2 * self._spec.kv_size
        self._kv_element_bytes = self._block_bytes / numbers

    def ceilings(self) -> Ceilings:
        """This machine's, on the device and in the dtype of the model."""
        config, device = self._loaded.config, self._loaded.device.torch_device
        bits: Bits = "bfloat16" if config.quantize not in ("int8", "int4") else config.quantize
        return measure_ceilings(device, _torch_dtype(config.dtype), self._runner.kernels, bits)

    def decode(self, batch: int, plan: Plan, ceilings: Ceilings) -> DecodePoint:
        """A batch that is prefilled together in one step and then decodes together. Raises ConfigError for one that
        the KV pool cannot hold."""
        blocks = batch * self._blocks_for(plan.prompt_tokens + plan.output_tokens)
        if blocks > self._limits.num_blocks - 1:
            raise ConfigError(
                f"a batch of {batch} needs {blocks} KV blocks, but the pool has {self._limits.num_blocks - 1}",
                hint="raise --kv-memory, or lower --batches",
                param="batches",
            )
        memory = PeakMemory(self._loaded.device.kind)
        self._play(batch, plan.prompt_tokens, plan.output_tokens)
        memory.restart()
        plays = [self._play(batch, plan.prompt_tokens, plan.output_tokens) for _ in range(plan.repeats)]
        peak = memory.peak()
        ttft = percentile([play.step_seconds[0] for play in plays], 0.5)
        totals = [sum(play.step_seconds) for play in plays]
        total = percentile(totals, 0.5)
        tpots = [sum(play.step_seconds[1:]) / max(1, plan.output_tokens - 1) for play in plays]
        tpot = percentile(tpots, 0.5)
        work = decode_work(
            self._spec,
            batch=batch,
            context=plan.prompt_tokens + plan.output_tokens // 2,  # the mean over the steps
            weights_bytes=self._loaded.weights_bytes,
            kv_element_bytes=self._kv_element_bytes,
        )
        return DecodePoint(
            batch=batch,
            prompt_tokens=plan.prompt_tokens,
            output_tokens=plan.output_tokens,
            ttft_s=ttft,
            tpot_s=tpot,
            total_s=total,
            tokens_per_s=batch * plan.output_tokens / total,
            per_request_tokens_per_s=1 / tpot,
            spread=_spread(tpots),
            peak_bytes=peak,
            kv_bytes=plays[-1].kv_bytes,
            # The last token of an answer is never stored: nobody reads it.
            kv_bytes_formula=batch * self._blocks_for(plan.prompt_tokens + plan.output_tokens - 1) * self._block_bytes,
            roofline=roofline(work, tpot, ceilings),
        )

    def prefill(self, length: int, repeats: int, ceilings: Ceilings) -> PrefillPoint:
        """One prompt of `length` tokens in one step."""
        self._play(1, length, 1)
        times = [self._play(1, length, 1).step_seconds[0] for _ in range(repeats)]
        seconds = percentile(times, 0.5)
        work = prefill_work(
            self._spec,
            tokens=length,
            weights_bytes=self._loaded.weights_bytes,
            kv_element_bytes=self._kv_element_bytes,
        )
        return PrefillPoint(length, seconds, length / seconds, _spread(times), roofline(work, seconds, ceilings))

    def _play(self, batch: int, prompt_tokens: int, output_tokens: int) -> "_Play":
        limits = replace(self._limits, max_num_seqs=batch, max_num_batched_tokens=max(batch * prompt_tokens, batch))
        scheduler = Scheduler(limits)
        rng = random.Random(SEED)  # noqa: S311 - prompts, no secrets
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        for index in range(batch):
            prompt = tuple(rng.randrange(self._spec.vocab_size) for _ in range(prompt_tokens))
            scheduler.add(Request(str(index), prompt, sampling, 0.0), 0.0)
        seconds: list[float] = []
        kv_bytes = 0
        while scheduler.has_work:
            began = time.perf_counter()
            output = scheduler.schedule(began)
            tokens = self._runner.step(output).get()
            kv_bytes = self._held_bytes(scheduler)
            scheduler.apply(output, tokens, began)
            seconds.append(time.perf_counter() - began)
        assert len(seconds) == output_tokens, "a batch that fits decodes together"
        return _Play(tuple(seconds), kv_bytes)

    def _held_bytes(self, scheduler: Scheduler) -> int:
        """Bytes of the cache itself that belong to the blocks in use."""
        return scheduler.pool.num_live * (self._runner.kv_cache.nbytes // self._limits.num_blocks)

    def _blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self._limits.block_size)


@dataclass(frozen=True, slots=True)
class _Play:
    """One batch from prompt to end: seconds of every step, and KV bytes held at the last."""

    step_seconds: tuple[float, ...]
    kv_bytes: int


def _torch_dtype(name: str) -> Any:
    import torch

    return getattr(torch, name)


def _spread(times: Sequence[float]) -> float:
    """Largest over smallest, less one: how much the repeats disagree."""
    return max(times) / min(times) - 1
