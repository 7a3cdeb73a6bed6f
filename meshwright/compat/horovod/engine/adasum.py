"""Adasum: adds gradients without the part that they have in common.

Two gradients a and b become (1 - a·b / 2|a|²) a + (1 - a·b / 2|b|²) b (`combine`): their sum where they are orthogonal,
their mean where they are equal. More ranks are combined in pairs, then the pairs in pairs (`adasum`).
"""

import torch
from torch import Tensor

from meshwright.compat.horovod.engine.data_group import DataGroup


def adasum(tensor: Tensor, group: DataGroup) -> Tensor:
    """Returns the combination of the tensors of all ranks, whose number is a power of two."""
    result = tensor.clone()
    distance = 1
    while distance < group.size:
        peer = group.rank ^ distance
        received = group.exchange(result, peer)
        lower, higher = (result, received) if group.rank < peer else (received, result)
        result = combine(lower, higher)
        distance *= 2
    return result


def combine(a: Tensor, b: Tensor) -> Tensor:
    """Returns the Adasum of two tensors, in their type. Dot products are computed in fp64."""
    x, y = a.double().flatten(), b.double().flatten()
    dot, a_square, b_square = torch.dot(x, y), torch.dot(x, x), torch.dot(y, y)
    a_factor = torch.where(a_square > 0, 1 - dot / (2 * a_square), 1.0)
    b_factor = torch.where(b_square > 0, 1 - dot / (2 * b_square), 1.0)
    return (a_factor * x + b_factor * y).view_as(a).to(a.dtype)
