"""Finds the first operator of a forward pass whose result on a rank is not that of one device."""

from collections import Counter
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from meshwright.proof.record.operators import OperatorCall, PartOfTensor, Place

_TOLERANCE = {torch.float64: 1e-8, torch.float32: 1e-3}  # relative to the largest value of a tensor


def first_different_operator(
    whole: Sequence[OperatorCall], ranks: Sequence[Sequence[OperatorCall]], groups: int
) -> str | None:
    """Returns, as text, the first operator that has other values on a rank than on one device; None if none is found.
    `whole` are the calls of one device, which took the batch in so many `groups`."""
    counts = Counter(call.place[:3] for call in whole)
    by_place: list[Mapping[Place, OperatorCall]] = [{call.place: call for call in calls} for calls in ranks]
    for expected in whole:
        line, name, module, number = expected.place
        if number >= max(1, counts[line, name, module] // groups):  # a rank's next microbatch may be another one
            continue
        for rank, of_rank in enumerate(by_place):
            found = of_rank.get(expected.place)
            if found is None:  # of another pipeline stage
                continue
            which = _different_side(found, expected)
            if which is not None:
                of_module = f" of {module}" if module else ""
                return f"{which} {name}{of_module} ({line}) is the first value that differs, on rank {rank}"
    return None


def _different_side(found: OperatorCall, expected: OperatorCall) -> str | None:
    if _differ(found.arguments, expected.arguments):
        return "an argument of"
    return "the result of" if _differ(found.results, expected.results) else None


def _differ(found: Sequence[PartOfTensor | None], expected: Sequence[PartOfTensor | None]) -> bool:
    """Whether a value is certainly different: values that cannot be compared are not."""
    if len(found) != len(expected):
        return False
    return any(a and b and not _is_part(a, b.value) for a, b in zip(found, expected, strict=True))


def _is_part(part: PartOfTensor, whole: Tensor) -> bool:
    """Whether a rank's part of a tensor has the values of the whole one; or whether that is not known, because the
    shapes belong to different tensors."""
    value = part.value
    if value.dim() != whole.dim() or value.dtype != whole.dtype:
        return True
    for dim, ranges in part.divisions:
        if sum(length for _, length in ranges) > whole.shape[dim]:
            return True
        whole = torch.cat([whole.narrow(dim, *_within(range_, whole.shape[dim])) for range_ in ranges], dim)
    if value.shape == whole.shape:
        return _close(value, whole)
    # A rank's samples, or those of a microbatch.
    if not value.dim() or value.shape[1:] != whole.shape[1:] or not 0 < value.shape[0] < whole.shape[0]:
        return True
    size = value.shape[0]
    return any(_close(value, whole.narrow(0, first, size)) for first in range(whole.shape[0] - size + 1))


def _within(indices: tuple[int, int], size: int) -> tuple[int, int]:
    begin, length = indices
    return min(begin, size), max(0, min(length, size - begin))


def _close(value: Tensor, whole: Tensor) -> bool:
    if whole.is_complex():
        value, whole = torch.view_as_real(value), torch.view_as_real(whole)
    tolerance = _TOLERANCE[whole.dtype]
    finite = whole[whole.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 0.0
    return torch.allclose(value, whole, rtol=tolerance, atol=tolerance * scale, equal_nan=True)
