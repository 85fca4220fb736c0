"""Drives a decoder through scheduler and runner without a thread: what the engine loop does, step by step."""

import json
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from servekit.engine.attention.base import AttentionBackend
from servekit.engine.attention.sdpa import SdpaAttention
from servekit.engine.core.request import Request, SamplingParams
from servekit.engine.core.scheduler import ScheduleOutput, Scheduler, SchedulerConfig
from servekit.engine.device.base import Device
from servekit.engine.device.cpu import CpuDevice
from servekit.engine.device.lazy import LazyResult
from servekit.engine.kv_cache import KvCache
from servekit.engine.layers.packed import unquantised_format
from servekit.engine.models.build import build_decoder
from servekit.engine.models.decoder import Decoder
from servekit.engine.models.native_decoder import NativeDecoder
from servekit.engine.models.parameters import check_parameters
from servekit.engine.models.weights import SafetensorsSource, WeightSource
from servekit.engine.native.kv_cache import NativeKvCache
from servekit.engine.native_runner import NativeRunner
from servekit.engine.runner import ModelRunner
from servekit.engine.spec.decoder import DecoderSpec
from servekit.engine.spec.families import read_decoder_spec
from servekit.engine.step import StepTokens

CPU = torch.device("cpu")


def load_decoder(
    directory: Path,
    *,
    source: WeightSource | None = None,
    backend: AttentionBackend[Any] | None = None,
    dtype: torch.dtype = torch.float32,
    max_positions: int = 512,
) -> Decoder:
    """The decoder of a checkpoint, checked and built as the engine does."""
    spec = read_decoder_spec(json.loads((directory / "config.json").read_text(encoding="utf-8")))
    source = source or SafetensorsSource(directory)
    check_parameters(spec, source.shapes())
    return build_decoder(
        spec,
        source,
        linear=unquantised_format(dtype, CPU)[0],
        backend=backend or SdpaAttention(),
        dtype=dtype,
        device=CPU,
        max_positions=max_positions,
    )


def make_cache(spec: DecoderSpec, num_blocks: int, block_size: int, dtype: torch.dtype = torch.float32) -> KvCache:
    """A cache for `spec`."""
    return KvCache(
        num_layers=spec.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
        device=CPU,
    )


def make_native_cache(spec: DecoderSpec, num_blocks: int, block_size: int, dtype: str = "float32") -> NativeKvCache:
    """The same for a decoder on the CPU kernels."""
    return NativeKvCache(
        num_layers=spec.num_layers,
        num_blocks=num_blocks,
        block_size=block_size,
        num_kv_heads=spec.num_kv_heads,
        head_dim=spec.head_dim,
        dtype=dtype,
    )


class Stepper:
    """A scheduler and a runner in one thread, as far ahead of the device as the runner allows.

    Keyword arguments go to SchedulerConfig.
    """

    def __init__(
        self,
        decoder: Decoder | NativeDecoder,
        device: Device | None = None,
        kv_dtype: str = "float32",
        **config: Any,
    ) -> None:
        settings: dict[str, Any] = {
            "max_num_seqs": 8,
            "max_num_batched_tokens": 256,
            "max_model_len": 512,
            "num_blocks": 400,
            "block_size": 8,
        }
        self.scheduler = Scheduler(SchedulerConfig(**{**settings, **config}))
        limits = self.scheduler.config
        shape, eos = (limits.num_blocks, limits.block_size), limits.eos_token_ids
        self.runner: ModelRunner | NativeRunner
        if isinstance(decoder, NativeDecoder):
            cache = make_native_cache(decoder.spec, *shape, kv_dtype)
            self.runner = NativeRunner(decoder, cache, eos_token_ids=eos)
        else:
            self.runner = ModelRunner(
                decoder,
                make_cache(decoder.spec, *shape, getattr(torch, kv_dtype)),
                device or CpuDevice(),
                max_num_seqs=limits.max_num_seqs,
                eos_token_ids=eos,
            )
        self.num_preempted = 0
        self.outputs: dict[str, list[int]] = {}
        self.cached: dict[str, int] = {}
        self._in_flight: deque[tuple[ScheduleOutput, LazyResult[StepTokens]]] = deque()
        self._now = 0.0

    def add(self, request_id: str, prompt: Sequence[int], **sampling: Any) -> None:
        """Queue a request; greedy unless told otherwise."""
        params = SamplingParams(**{"temperature": 0.0, **sampling})
        self.outputs[request_id] = []
        self.scheduler.add(Request(request_id, tuple(prompt), params, self._now), self._now)

    def step(self) -> bool:
        """One step; False when there was nothing to do."""
        self._now += 1.0
        output = self.scheduler.schedule(self._now)
        if output.is_empty and not self._in_flight:
            return self.scheduler.has_work
        if not output.is_empty:
            self.num_preempted += output.num_preempted
            self._in_flight.append((output, self.runner.step(output)))
            if self.runner.steps_ahead:
                self.scheduler.launched(output)
        while len(self._in_flight) > (0 if output.is_empty else self.runner.steps_ahead):
            self._land(*self._in_flight.popleft())
        self.scheduler.check_integrity()
        return True

    def _land(self, output: ScheduleOutput, result: LazyResult[StepTokens]) -> None:
        for update in self.scheduler.apply(output, result.get(), self._now):
            self.outputs[update.request_id] += update.token_ids
            self.cached[update.request_id] = update.num_cached_tokens

    def drain(self) -> dict[str, list[int]]:
        """Step until nothing is left; every request's tokens."""
        while self.scheduler.has_work or self._in_flight:
            self.step()
        return self.outputs
