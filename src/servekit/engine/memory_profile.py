"""What the largest step needs beside weights and cache: measured by running one on dummies before the pool is sized."""

import numpy as np
import torch

from servekit.config import EngineConfig
from servekit.engine.batch import Batch
from servekit.engine.device.base import Device
from servekit.engine.host_batch import HostBatch
from servekit.engine.models.decoder import Decoder


def full_step_memory(decoder: Decoder, device: Device, *, num_tokens: int, config: EngineConfig) -> int:
    """Bytes for a while: `num_tokens` through the model, and the costliest choice for as many sequences as may run.

    0 on a device that is not asked (Device.peak_memory). `config` is resolved as far as its compute part.
    """
    assert config.max_model_len is not None, "resolve_compute comes first"
    longest = config.max_model_len
    lengths = [longest] * (num_tokens // longest) + ([num_tokens % longest] if num_tokens % longest else [])
    lens = np.array(lengths, dtype=np.int64)
    ends = np.cumsum(lens)
    host = HostBatch(
        input_ids=np.zeros(num_tokens, dtype=np.int64),
        positions=np.arange(num_tokens) - np.repeat(ends - lens, lens),
        logits_idx=np.arange(min(num_tokens, config.parallel)),
        slot_mapping=None,
        block_tables=None,
        query_lens=lens,
        context_lens=lens,
        block_size=1,
    )

    @torch.inference_mode()
    def step() -> None:
        batch = Batch.of(host, device.upload(host.arrays()))
        logits = decoder.logits(decoder.forward(batch, None)[batch.logits_idx])
        probs = logits.softmax(dim=-1)
        best = probs.sort(dim=-1, descending=True)
        (probs * (probs >= best.values[:, :1])).double().cumsum(dim=-1)

    return device.peak_memory(step)
