"""NativeRunner: one step of a decoder on the CPU kernels, from scheduled tokens to chosen ones, without torch.

It must not know requests' text, the API or the scheduler's rules.
"""

import numpy as np

from servekit.engine.core.scheduler import ScheduleOutput
from servekit.engine.device.lazy import LazyResult, Ready
from servekit.engine.host_batch import BatchBuilder
from servekit.engine.models.native_decoder import NativeDecoder
from servekit.engine.native.kv_cache import NativeKvCache
from servekit.engine.native.matrix import FloatArray
from servekit.engine.native_sampler import NativeSampler
from servekit.engine.sampling_plan import draws_of, plan_sampling
from servekit.engine.step import AllowedTokens, GraphStats, StepTokens, spread


class NativeRunner:
    """The Runner over a NativeDecoder; a step is done when it returns.

    `kv_cache` and `kernels` are public for whoever measures; the kernels are closed when the runner is. Else as in
    ModelRunner.
    """

    steps_ahead = 0
    graph_failure: str | None = None

    def __init__(
        self,
        decoder: NativeDecoder,
        kv_cache: NativeKvCache,
        *,
        eos_token_ids: frozenset[int] = frozenset(),
        grammars: AllowedTokens | None = None,
    ) -> None:
        self.kv_cache = kv_cache
        self.kernels = decoder.kernels
        self._decoder = decoder
        self._eos_token_ids = eos_token_ids
        self._grammars = grammars
        self._builder = BatchBuilder(kv_cache.block_size)
        self._sampler = NativeSampler(decoder.kernels)
        self._scores = np.empty((0, decoder.spec.vocab_size), dtype=np.float32)

    def step(self, output: ScheduleOutput) -> LazyResult[StepTokens]:
        """Compute every scheduled token, and choose one for each sequence that has caught up."""
        batch = self._builder.build(output)
        hidden = self._decoder.forward(batch, self.kv_cache)
        draws = draws_of(output)
        if not draws:
            return Ready([None] * len(output.scheduled))
        # Every token is its sequence's last one where all have one: nothing to pick.
        last = hidden if len(draws) == batch.num_tokens else hidden[batch.logits_idx]
        scores = self._decoder.logits(last, self._room(len(draws)))
        plan = plan_sampling(draws, self._eos_token_ids)
        allowed = None
        if plan.grammar_rows:
            assert self._grammars is not None, "a grammar was admitted where none can be followed"
            allowed = self._grammars.allowed([plan.draws[row].seq for row in plan.grammar_rows], {})
        return Ready(spread(output, self._sampler.sample(scores, plan, allowed)))

    def graph_stats(self) -> GraphStats:
        """Nothing is recorded."""
        return GraphStats()

    def close(self) -> None:
        """End the kernels' threads; memory goes with the last reference."""
        self.kernels.close()

    def _room(self, num_rows: int) -> FloatArray:
        """Where scores go. The same memory in every step: fresh megabytes would be faulted in page by page."""
        if len(self._scores) < num_rows:
            self._scores = np.empty((num_rows, self._scores.shape[1]), dtype=np.float32)
        return self._scores[:num_rows]
