"""The learned attention bias by distance that T5 introduced (arXiv:1910.10683, section 2.1), both ways."""

import math

import torch

_MAX_DISTANCE = 128


def relative_bias(table: torch.Tensor, max_positions: int) -> torch.Tensor:
    """`table` [buckets, H] -> [H, 2 * max_positions - 1], by key - query + max_positions - 1.

    Half of the buckets are for keys behind the query, half for those ahead; near distances have one each, far ones
    share by logarithm up to 128.
    """
    distance = torch.arange(-max_positions + 1, max_positions)
    side = table.shape[0] // 2
    exact = side // 2
    far = distance.abs().clamp(min=1).float()
    shared = exact + (torch.log(far / exact) / math.log(_MAX_DISTANCE / exact) * (side - exact)).long()
    bucket = torch.where(distance.abs() < exact, distance.abs(), shared.clamp(max=side - 1))
    return table.float()[(bucket + side * (distance > 0)).to(table.device)].T.contiguous()
