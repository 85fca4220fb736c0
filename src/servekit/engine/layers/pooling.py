"""Hidden states of many tokens -> one vector a text. Ragged: texts lie one after the other, without padding."""

import torch

from servekit.engine.batch import IntArray
from servekit.engine.spec.pooling import Pooling


def pool(hidden: torch.Tensor, cu_seqlens: IntArray, pooling: Pooling) -> torch.Tensor:
    """`hidden` [T, hidden] of S texts that begin at `cu_seqlens` [S + 1] -> [S, hidden] in float32."""
    starts = torch.from_numpy(cu_seqlens[:-1]).to(hidden.device)
    ends = torch.from_numpy(cu_seqlens[1:]).to(hidden.device)
    if pooling == "cls":
        return hidden[starts].float()
    if pooling == "last":
        return hidden[ends - 1].float()
    reduce = "mean" if pooling == "mean" else "max"
    return torch.segment_reduce(hidden.float(), reduce, lengths=ends - starts, unsafe=True)


def normalise(vectors: torch.Tensor) -> torch.Tensor:
    """Unit length over the last dimension; a vector of zeros stays one."""
    return torch.nn.functional.normalize(vectors, dim=-1)
