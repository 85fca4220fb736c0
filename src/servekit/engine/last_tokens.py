"""The last token of every slot, kept on the device, so that a step can follow one whose tokens nobody has read yet."""

from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from servekit.engine.batch import Batch
from servekit.engine.sampling_plan import SamplingPlan


class LastTokens:
    """One token id for each slot; what lies in a slot before its sequence has chosen one is never asked for."""

    def __init__(self, num_slots: int, device: torch.device) -> None:
        self._token_ids = torch.zeros(num_slots, dtype=torch.int64, device=device)

    @staticmethod
    def arrays(plan: SamplingPlan) -> list[npt.NDArray[Any]]:
        """For each draw the slot that `before` reads, -1 where the host knows the token, and the one `keep` writes."""
        slots = np.array([draw.seq.slot for draw in plan.draws], dtype=np.int64)
        pending = np.array([draw.has_pending for draw in plan.draws], dtype=bool)
        return [np.where(pending, slots, -1), slots]

    def fill_in(self, batch: Batch) -> Batch:
        """`batch` with the tokens that only the device knows."""
        assert batch.token_sources is not None, "the batch was not built for a device with a queue"
        known = self.before(batch.token_sources)
        return replace(batch, input_ids=torch.where(known < 0, batch.input_ids, known))

    def before(self, slots: torch.Tensor) -> torch.Tensor:
        """The last tokens of `slots`, -1 where the slot is -1."""
        return torch.where(slots < 0, -1, self._token_ids[slots.clamp(min=0)])

    def keep(self, slots: torch.Tensor, token_ids: torch.Tensor) -> None:
        """Remember what was chosen for `slots`."""
        self._token_ids.index_copy_(0, slots, token_ids)
