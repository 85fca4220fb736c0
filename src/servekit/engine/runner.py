"""ModelRunner: one step of a decoder on a device. It must not know requests' text, the API or the scheduler's rules."""

import torch

from servekit.engine.batch import BatchBuilder
from servekit.engine.core.request import SampledToken
from servekit.engine.core.scheduler import ScheduleOutput
from servekit.engine.device.lazy import LazyResult, Ready
from servekit.engine.kv_cache import KvCache
from servekit.engine.models.decoder import LanguageModel
from servekit.engine.native.kernels import Kernels
from servekit.engine.sampler import Sampler
from servekit.engine.step import StepTokens


class ModelRunner:
    """The Runner over a real model: batch, forward, sample.

    `kv_cache` is public because its size is what the plan promised, and a test holds the two together. `kernels` are
    those that the decoder computes with, if it does not in torch; they are closed when the runner is.
    """

    def __init__(
        self,
        decoder: LanguageModel,
        kv_cache: KvCache,
        sampler: Sampler,
        device: torch.device,
        kernels: Kernels | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self._decoder = decoder
        self._sampler = sampler
        self.kernels = kernels
        self._builder = BatchBuilder(kv_cache.block_size, device)

    @torch.inference_mode()
    def step(self, output: ScheduleOutput) -> LazyResult[StepTokens]:
        """Compute every scheduled token, and choose one for each sequence that has caught up."""
        batch = self._builder.build(output)
        hidden = self._decoder.forward(batch, self.kv_cache)
        tokens: list[SampledToken | None] = [None] * len(output.scheduled)
        sampled = [row for row, scheduled in enumerate(output.scheduled) if scheduled.needs_sample]
        if sampled:
            logits = self._decoder.logits(hidden[batch.logits_idx])
            chosen = self._sampler.sample(logits, [output.scheduled[row].seq for row in sampled])
            for row, token in zip(sampled, chosen, strict=True):
                tokens[row] = token
        return Ready(tokens)

    def close(self) -> None:
        """End the kernels' threads; memory goes with the last reference."""
        if self.kernels is not None:
            self.kernels.close()
