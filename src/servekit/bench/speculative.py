"""What speculative decoding can gain, from the acceptance rate alone. Arithmetic only.

A draft model proposes k tokens and the target checks them in one pass. With each accepted with probability alpha,
independently, a pass yields 1 + alpha + ... + alpha^k tokens on average (Leviathan et al., arXiv:2211.17192).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from servekit.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Speculation:
    """`k` drafted tokens at acceptance `alpha`; costs are in passes of the target model.

    `break_even_draft_cost` is what one drafted token may cost at most before drafting slows things down. `speedup` is
    that at `draft_cost`, None when no cost was given.
    """

    alpha: float
    k: int
    tokens_per_pass: float
    break_even_draft_cost: float
    draft_cost: float | None = None
    speedup: float | None = None


def speculate(alpha: float, k: int, draft_cost: float | None = None) -> Speculation:
    """Raises ConfigError, naming the option, for an alpha outside 0 to 1, k below 1 or a negative cost."""
    if not 0.0 <= alpha <= 1.0:
        raise ConfigError(f"--alpha is a share of drafted tokens, from 0 to 1, not {alpha:g}", param="alpha")
    if k < 1:
        raise ConfigError(f"--k must be at least 1, not {k}", param="k")
    if draft_cost is not None and not (math.isfinite(draft_cost) and draft_cost >= 0):
        raise ConfigError(f"--draft-cost must be a number of target passes, not {draft_cost:g}", param="draft_cost")
    tokens = expected_tokens(alpha, k)
    return Speculation(
        alpha=alpha,
        k=k,
        tokens_per_pass=tokens,
        break_even_draft_cost=(tokens - 1) / k,
        draft_cost=draft_cost,
        speedup=None if draft_cost is None else tokens / (1 + k * draft_cost),
    )


def expected_tokens(alpha: float, k: int) -> float:
    """Tokens a pass of the target: (1 - alpha^(k+1)) / (1 - alpha), and k + 1 when everything is accepted."""
    return float(k + 1) if alpha == 1.0 else (1 - alpha ** (k + 1)) / (1 - alpha)


def best(speculations: Sequence[Speculation]) -> Speculation:
    """The one with the largest speedup, or without costs the most tokens a pass; the shortest draft of equals."""
    return max(speculations, key=lambda found: (found.speedup or found.tokens_per_pass, -found.k))
