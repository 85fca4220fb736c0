"""Hidden states of many tokens -> one vector a text. Ragged: texts lie one after the other, without padding."""

import torch

from servekit.engine.spec.pooling import Pooling


def pool(hidden: torch.Tensor, seq_starts: torch.Tensor, pooling: Pooling) -> torch.Tensor:
    """`hidden` [T, hidden] of S texts that begin at `seq_starts` [S + 1] -> [S, hidden] in float32."""
    starts, ends = seq_starts[:-1].long(), seq_starts[1:].long()
    if pooling == "cls":
        return hidden[starts].float()
    if pooling == "last":
        return hidden[ends - 1].float()
    lengths = ends - starts
    if pooling == "weighted_mean":
        # A token counts as much as its place, from 1 (SGPT, arXiv:2202.08904).
        places = torch.arange(1, hidden.shape[0] + 1, device=hidden.device) - starts.repeat_interleave(lengths)
        sums = torch.segment_reduce(hidden.float() * places.unsqueeze(1), "sum", lengths=lengths, unsafe=True)
        return sums / (lengths * (lengths + 1) / 2).unsqueeze(1)
    if pooling == "mean_sqrt_len":
        sums = torch.segment_reduce(hidden.float(), "sum", lengths=lengths, unsafe=True)
        return sums / lengths.sqrt().unsqueeze(1)
    reduce = "mean" if pooling == "mean" else "max"
    return torch.segment_reduce(hidden.float(), reduce, lengths=lengths, unsafe=True)


def normalise(vectors: torch.Tensor) -> torch.Tensor:
    """Unit length over the last dimension; a vector of zeros stays one."""
    return torch.nn.functional.normalize(vectors, dim=-1)
