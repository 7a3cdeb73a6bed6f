"""The causes `low_precision` and `not_finite`: the candidate's gradients were rounded to a shorter type on their way,
or are no numbers."""

import torch
from torch import Tensor

from meshwright.audit.causes.counts import counts_of
from meshwright.audit.causes.wording import list_names, list_ranks, number
from meshwright.audit.evidence import Evidence, Verdict

_TYPES = (torch.bfloat16, torch.float16)
_MOST_ROUNDINGS = 64  # a larger difference has another cause
_ONE_ROUNDING_MORE = 2.0**-22  # of fp32, after a division by a number of ranks
_ONLY_SEEN = 2.0


def not_finite(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if gradients of the candidate have infinite elements or such that are no numbers, and the
    reference's have not."""
    names: list[str] = []
    ranks: set[int] = set()
    for name in evidence.differing_gradients:
        expected = evidence.expected(name)
        wrong = [part.rank for part in evidence.recorded_parts(name) if not bool(part.value.isfinite().all())]
        if wrong and expected is not None and bool(expected.isfinite().all()):
            names.append(name)
            ranks.update(wrong)
    if not names:
        return None
    return Verdict(
        "not_finite",
        f"the gradients of {list_names(names)} have elements on {list_ranks(ranks)} that are infinite or not a number;"
        " the reference's have none: an overflow (fp16 without loss scaling, a softmax of rows that are all masked), or"
        " a mean over no targets",
    )


def low_precision(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if all gradients that differ carry only the digits of bf16 or fp16, perhaps divided by a number
    of ranks, while the reference's carry more, and differ by no more than such roundings. If they carry more, there is
    one that is only seen, for errors without a direction of the size of one rounding."""
    names = evidence.differing_gradients
    pairs = [(evidence.recorded(name), evidence.expected(name)) for name in names]
    known = [(value, right) for value, right in pairs if value is not None and right is not None]
    if not names or len(known) < len(pairs) or any(value.shape != right.shape for value, right in known):
        return None
    errors = [_relative_error(value, right) for value, right in known]
    for dtype in _TYPES:
        eps = torch.finfo(dtype).eps
        if max(errors) > _MOST_ROUNDINGS * eps:
            continue
        for divisor in _divisors(evidence):
            plain = [
                tuple(evidence.reference.plain(name, value) for value in pair)
                for name, pair in zip(names, known, strict=True)
            ]
            if all(_carries(value * divisor, dtype) for value, _ in plain) and not any(
                _carries(right, dtype) for _, right in plain if right.numel() > 1
            ):
                short = str(dtype).removeprefix("torch.")
                divided = f", divided by {number(divisor)}" if divisor != 1 else ""
                return Verdict(
                    "low_precision",
                    f"the gradients of {list_names(names)} have only values of {short}{divided}, the reference's carry"
                    f" more digits; they differ by at most {max(errors):.2g} of a row's largest value, and one rounding"
                    f" to {short} makes {eps / 2:.2g}: they are cast before they are reduced or stored",
                )
    return _seen(evidence, names, known, errors)


def _seen(
    evidence: Evidence, names: tuple[str, ...], known: list[tuple[Tensor, Tensor]], errors: list[float]
) -> Verdict | None:
    eps = torch.finfo(torch.bfloat16).eps
    common = evidence.common_factor(names)
    if common is None or not eps / 64 <= max(errors) <= 2 * eps or abs(common[0] - 1) > eps / 4:
        return None
    if "bfloat16" in evidence.reference.dtypes or sum(value.numel() for value, _ in known) < 64:
        return None
    differ = [float(((value - right).abs() > 0).double().mean()) for value, right in known]
    spread = sorted(errors)[len(errors) // 2] / max(errors)
    if min(differ) < 0.5 or spread < 0.1 or evidence.equal_gradients:
        return None
    return Verdict(
        "low_precision",
        f"all gradients differ by up to {max(errors):.2g} of their row's largest value, without a common factor"
        f" ({number(common[0])}): as much as roundings to bf16 ({eps / 2:.2g} each) make. So something is computed or"
        " reduced in a shorter type than in the reference",
        _ONLY_SEEN,
    )


def _divisors(evidence: Evidence) -> list[float]:
    counts = [count.value for count in counts_of(evidence)]
    return list(dict.fromkeys([1.0, *(value for value in counts if value == int(value) and value <= 4096)]))


def _carries(value: Tensor, dtype: torch.dtype) -> bool:
    """Whether all elements are values of a type, up to one rounding of fp32."""
    rounded = value.to(torch.float32).to(dtype).to(torch.float64)
    return bool(((rounded - value).abs() <= _ONE_ROUNDING_MORE * value.abs()).all())


def _relative_error(value: Tensor, right: Tensor) -> float:
    """The largest error relative to the largest value of its row."""
    if not value.numel():
        return 0.0
    errors, values = ((value - right).abs(), right.abs())
    if value.dim() < 2:
        return float(errors.max()) / (float(values.max()) or 1.0)
    rows = values.reshape(len(values), -1).amax(1)
    shares = errors.reshape(len(errors), -1).amax(1) / rows.clamp(min=float(rows.max()) * 1e-6 or 1.0)
    return float(shares.max())
