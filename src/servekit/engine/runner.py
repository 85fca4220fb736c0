"""ModelRunner: one step of a decoder on a device. It must not know requests' text, the API or the scheduler's rules."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from servekit.engine.batch import Batch
from servekit.engine.core.request import SampledToken
from servekit.engine.core.scheduler import ScheduleOutput
from servekit.engine.core.sequence import Sequence
from servekit.engine.device.base import Device
from servekit.engine.device.lazy import LazyResult, Mapped, Ready
from servekit.engine.graphs import GraphCache, GraphKey
from servekit.engine.host_batch import BatchBuilder, HostBatch
from servekit.engine.kv_cache import KvCache
from servekit.engine.last_tokens import LastTokens
from servekit.engine.models.decoder import Decoder
from servekit.engine.native.kernels import Kernels
from servekit.engine.native_sampler import NativeSampler
from servekit.engine.sampler import choose, log_probabilities, read
from servekit.engine.sampling_plan import SamplingPlan, draws_of, plan_sampling
from servekit.engine.step import AllowedTokens, GraphStats, StepTokens, spread


class ModelRunner:
    """The Runner over a real model: batch, forward, choose. Nothing waits for the device before the result is read.

    `kv_cache` is public because its size is what the plan promised, and a test holds the two together. `eos_token_ids`
    is what `min_tokens` keeps from being chosen; `grammars` says what may follow in a sequence that has a grammar, and
    the others share its step untouched. `kernels` are those that the decoder computes with, if it does not in torch;
    they choose tokens as well, and are closed when the runner is.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv_cache: KvCache,
        device: Device,
        *,
        max_num_seqs: int,
        eos_token_ids: frozenset[int] = frozenset(),
        grammars: AllowedTokens | None = None,
        graphs: GraphCache | None = None,
        kernels: Kernels | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self._decoder = decoder
        self._device = device
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._graphs = graphs
        self.kernels = kernels
        self._native_sampler = None if kernels is None else NativeSampler(kernels)
        self._builder = BatchBuilder(kv_cache.block_size, follows_device=device.is_queued)
        self._last_tokens = LastTokens(max_num_seqs, device.torch_device) if device.is_queued else None
        self._last_step: tuple[list[Sequence], LazyResult[list[SampledToken]]] = ([], Ready([]))

    @property
    def steps_ahead(self) -> int:
        """One where the device has a queue of its own."""
        return int(self._device.is_queued)

    @torch.inference_mode()
    def step(self, output: ScheduleOutput) -> LazyResult[StepTokens]:
        """Compute every scheduled token, and choose one for each sequence that has caught up."""
        host = self._builder.build(output)
        sampled = [item.seq for item in output.scheduled if item.needs_sample]
        plan = plan_sampling(draws_of(output), self._eos_token_ids)
        key = self._graphs.key("text", host) if self._graphs is not None and sampled else None
        if key is not None:
            host = host.padded(key.num_tokens, key.num_seqs)
        batch_arrays, plan_arrays = host.arrays(), plan.arrays()
        slots = [] if self._last_tokens is None else LastTokens.arrays(plan)
        tensors = self._device.upload([*batch_arrays, *plan_arrays, *slots])
        num = len(batch_arrays)
        logits = self._logits(key, host, tensors[:num], num_rows=len(sampled))
        if logits is None:
            return Ready([None] * len(output.scheduled))
        result = self._choose(logits, plan, iter(tensors[num:]))
        self._last_step = (sampled, result)
        return Mapped(result, lambda chosen: spread(output, chosen))

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Record every size of a decoding step now, on dummies, so that none is recorded while somebody waits."""
        if self._graphs is None:
            return
        for key in self._graphs.decode_keys():
            host = self._builder.nothing().padded(key.num_tokens, key.num_seqs)
            for _ in range(2):
                self._graphs.run(key, host, self._device.upload(host.arrays()), self._compute)

    def graph_stats(self) -> GraphStats:
        """What became of the steps."""
        return GraphStats() if self._graphs is None else self._graphs.stats()

    @property
    def graph_failure(self) -> str | None:
        """Why the last step that could not be recorded was not."""
        return None if self._graphs is None else self._graphs.failure

    def close(self) -> None:
        """End the kernels' threads; memory goes with the last reference."""
        if self.kernels is not None:
            self.kernels.close()

    def _logits(
        self, key: GraphKey | None, host: HostBatch, tensors: list[torch.Tensor], num_rows: int
    ) -> torch.Tensor | None:
        """The scores [num_rows, vocab] of the sequences that get a token; None when none does."""
        if key is not None:
            assert self._graphs is not None
            return self._graphs.run(key, host, tensors, self._compute)[:num_rows]
        batch = Batch.of(host, tensors)
        if num_rows:
            return self._compute(batch)
        self._forward(batch)
        return None

    def _compute(self, batch: Batch) -> torch.Tensor:
        """What a graph records."""
        hidden = self._forward(batch)
        # Every token is its sequence's last one where all have one: nothing to pick. Padding has empty sequences.
        is_decode = batch.longest is None and batch.num_seqs == batch.num_tokens == batch.logits_idx.shape[0]
        return self._decoder.logits(hidden if is_decode else hidden[batch.logits_idx])

    def _forward(self, batch: Batch) -> torch.Tensor:
        if self._last_tokens is not None:
            batch = self._last_tokens.fill_in(batch)
        return self._decoder.forward(batch, self.kv_cache)

    def _choose(
        self, logits: torch.Tensor, plan: SamplingPlan, tensors: Iterator[torch.Tensor]
    ) -> LazyResult[list[SampledToken]]:
        """Queue the choice behind the logits, and the copies of what was chosen behind that."""
        if self._native_sampler is not None:
            mask = self._grammar_mask(plan) if plan.grammar_rows else None
            return Ready(self._native_sampler.sample(logits.contiguous().numpy(), plan, mask))
        plan_tensors = [next(tensors) for _ in plan.arrays()]
        pending, keep = None, None
        if self._last_tokens is not None:
            pending, keep = self._last_tokens.before(next(tensors)), next(tensors)
        token_ids = choose(
            logits,
            plan,
            iter(plan_tensors),
            pending=pending,
            allowed=self._allowed(plan) if plan.grammar_rows else None,
            may_wait=not self._device.is_queued,
        )
        if self._last_tokens is not None:
            assert keep is not None
            self._last_tokens.keep(keep, token_ids)
        found = (token_ids, *log_probabilities(logits, plan, token_ids)) if plan.has_logprobs else (token_ids,)
        return Mapped(self._device.fetch(*found), lambda tensors: read(plan, tensors))

    def _allowed(self, plan: SamplingPlan) -> tuple[torch.Tensor, torch.Tensor]:
        """Which rows have a grammar, and what it lets follow."""
        mask = self._grammar_mask(plan)
        on_device = self._device.upload([np.array(plan.grammar_rows, dtype=np.int64), mask])
        return on_device[0], on_device[1]

    def _grammar_mask(self, plan: SamplingPlan) -> npt.NDArray[np.bool_]:
        """What may follow in each row that has a grammar.

        A grammar has to see the token before. So where that is still being chosen, this waits for the step before;
        the forward pass of this one is queued by then, and the device has work meanwhile.
        """
        assert self._grammars is not None, "a grammar was admitted where none can be followed"
        draws = [plan.draws[row] for row in plan.grammar_rows]
        pending: dict[Sequence, int] = {}
        if any(draw.has_pending for draw in draws):
            seqs, result = self._last_step
            known = {seq: token.token_id for seq, token in zip(seqs, result.get(), strict=True)}
            pending = {draw.seq: known[draw.seq] for draw in draws if draw.has_pending}
        return self._grammars.allowed([draw.seq for draw in draws], pending)
