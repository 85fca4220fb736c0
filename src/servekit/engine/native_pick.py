"""NativePick: the sampler's last step on the CPU kernels, for a batch at once and on all their threads.

It chooses by the same rules as `sampler.choose`. Its sums are rounded differently, so a number that falls on the edge
between two tokens may go to the other one.
"""

import torch

from servekit.engine.native import structs
from servekit.engine.native.kernels import Kernels
from servekit.engine.sampling_plan import SamplingPlan


class NativePick:
    """A sampler.Pick over kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def __call__(self, scores: torch.Tensor, plan: SamplingPlan) -> torch.Tensor:
        """`scores` [S, vocab] float32 -> token ids [S] int64."""
        scores = scores.contiguous()
        num_rows, vocab = scores.shape
        choices = (structs.Choice * num_rows)()  # zeros: the most likely token
        if plan.random is not None:
            for choice, row in zip(choices, plan.random.tolist(), strict=True):
                temperature, top_k, choice.top_p, choice.min_p, choice.uniform, is_greedy = row
                choice.temperature = 0.0 if is_greedy else temperature
                choice.top_k = int(top_k)
        token_ids = torch.empty(num_rows, dtype=torch.int64)
        self._kernels.choose(scores.data_ptr(), num_rows, vocab, choices, token_ids.data_ptr())
        return token_ids
