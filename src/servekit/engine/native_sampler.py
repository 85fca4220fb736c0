"""NativeSampler: what engine/sampler.py does on a device, done on the host with numpy and the CPU kernels.

It chooses by the same rules. Its sums are rounded differently, so a number that falls on the edge between two tokens
may go to the other one.
"""

import numpy as np
import numpy.typing as npt

from servekit.engine.adjustments import FORBIDDEN, Adjustments
from servekit.engine.core.request import SampledToken, TokenLogprob
from servekit.engine.host_batch import IntArray
from servekit.engine.native import structs
from servekit.engine.native.kernels import Kernels
from servekit.engine.native.matrix import FloatArray
from servekit.engine.sampling_plan import SamplingPlan

BoolArray = npt.NDArray[np.bool_]


class NativeSampler:
    """Scores of a batch -> a token for each row, on all threads of the kernels."""

    def __init__(self, kernels: Kernels) -> None:
        self._kernels = kernels

    def sample(self, scores: FloatArray, plan: SamplingPlan, allowed: BoolArray | None = None) -> list[SampledToken]:
        """`scores` [S, vocab], left as they are; `allowed` [rows with a grammar, vocab] says what those may take."""
        adjusted = scores
        if plan.adjustments is not None or allowed is not None:
            adjusted = scores.copy()
        if plan.adjustments is not None:
            _adjust(adjusted, plan.adjustments)
        if allowed is not None:
            for row, mask in zip(plan.grammar_rows, allowed, strict=True):
                adjusted[row, ~mask] = FORBIDDEN
        token_ids: list[int] = self.pick(adjusted, plan).tolist()
        tokens = [SampledToken(token_id) for token_id in token_ids]
        for row, draw in enumerate(plan.draws):
            if draw.params.logprobs is not None:
                tokens[row] = _with_logprob(scores[row], token_ids[row], draw.params.logprobs)
        return tokens

    def pick(self, scores: FloatArray, plan: SamplingPlan) -> IntArray:
        """Adjusted `scores` [S, vocab] -> token ids [S]."""
        num_rows, vocab = scores.shape
        choices = (structs.Choice * num_rows)()  # zeros: the most likely token
        if plan.random is not None:
            for choice, row in zip(choices, plan.random.tolist(), strict=True):
                temperature, top_k, choice.top_p, choice.min_p, choice.uniform, is_greedy = row
                choice.temperature = 0.0 if is_greedy else temperature
                choice.top_k = int(top_k)
        token_ids = np.empty(num_rows, dtype=np.int64)
        self._kernels.choose(scores.ctypes.data, num_rows, vocab, choices, token_ids.ctypes.data)
        return token_ids


def _adjust(scores: FloatArray, adjustments: Adjustments) -> None:
    """Move the scores that penalties, bias and min_tokens concern, in place; the rules of penalties.adjust_logits."""
    rows, ids = adjustments.seen
    if len(rows):
        presence, frequency, repetition = adjustments.penalties[rows].T
        values = scores[rows, ids]
        values = np.where(values > 0, values / repetition, values * repetition)
        scores[rows, ids] = values - (presence * (adjustments.counts > 0) + frequency * adjustments.counts)
    # One token may be biased once a row only, so that fancy indexing adds to each place once.
    scores[adjustments.biased[0], adjustments.biased[1]] += adjustments.biases
    scores[adjustments.forbidden[0], adjustments.forbidden[1]] = FORBIDDEN


def _with_logprob(scores: FloatArray, token_id: int, num_top: int) -> SampledToken:
    """The token with the model's own log-probabilities: its, and those of the `num_top` most likely ones."""
    shifted = scores - scores.max()
    logprobs = shifted - np.log(np.exp(shifted).sum())
    num_top = min(num_top, len(scores))
    top: list[tuple[int, float]] = []
    if num_top:
        best = np.argpartition(-logprobs, num_top - 1)[:num_top]
        best = best[np.argsort(-logprobs[best], kind="stable")]
        top = list(zip(best.tolist(), logprobs[best].tolist(), strict=True))
    return SampledToken(token_id, TokenLogprob(token_id, float(logprobs[token_id]), tuple(top)))
