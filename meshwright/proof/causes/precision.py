"""A precision below that of the comparison: in a layer, on the way of the gradients, or in the weights themselves."""

from meshwright.proof.causes.evidence import Evidence, Tensors, Verdict, listed
from meshwright.train.output.witness import BITS, bits_of

_ROUNDINGS = 1000  # how many of them a difference may be made of; more is no rounding
_MOST = 0.5  # in the shortest types, too, most of a gradient is left


def low_precision(evidence: Evidence) -> Verdict | None:
    """Numbers carry fewer bits than one device's: a layer's output on some rank, the combined gradients, or what the
    optimizer made of right ones. Or one device casts to a shorter type itself, in which no two plans round alike. What
    is off is not more than roundings to so many bits make."""
    if evidence.first.step and evidence.first.what in ("weight", "buffer"):
        state = {**evidence.found.state, **evidence.found.state_of.get(evidence.first.rank, {})}
        names = [evidence.first.parameter or ""]
        return _shorter(evidence, names, state, evidence.expected.after, evidence.first.error, "values")
    if not evidence.gradients_are_wrong:
        return None
    residual = evidence.misfit(evidence.expected.gradients)
    right = evidence.expected.gradients
    return (
        _layers(evidence, residual)
        or _shorter(evidence, evidence.wrong, evidence.gradients, right, residual, "gradients")
        or _one_devices_own(evidence, residual)
    )


def _layers(evidence: Evidence, residual: float) -> Verdict | None:
    for layer, bits in evidence.lab.usual.bits.items():
        for witness in evidence.seen:
            there = (witness.bits or {}).get(layer, 0)
            if 0 < there < min(bits, BITS[evidence.dtype]) and _explains(there, residual):
                told = f"what {layer or 'the model'} computed on rank {witness.rank} has {_bits(there)}, on one device"
                return Verdict("low_precision", f"{told} {bits}", residual)
    return None


def _shorter(
    evidence: Evidence, names: "list[str] | tuple[str, ...]", found: Tensors, right: Tensors, residual: float, what: str
) -> Verdict | None:
    """Whether all of the tensors have fewer bits than the right ones."""
    full = BITS[evidence.dtype]
    there = [name for name in names if name in found and name in right]
    carried = {name: bits_of(found[name]) for name in there}
    short = {name: bits for name, bits in carried.items() if 0 < bits < min(bits_of(right[name]), full)}
    if not short or len(short) < len(names) or not _explains(max(short.values()), residual):
        return None
    told = f"{what} of {listed(short)} have {_bits(max(short.values()))}, on one device {full}"
    return Verdict("low_precision", f"{told}: they were rounded on their way", residual)


def _one_devices_own(evidence: Evidence, residual: float) -> Verdict | None:
    bits = evidence.lab.narrowest
    if bits >= BITS[evidence.dtype] or not _explains(bits, residual):
        return None
    return Verdict(
        "low_precision",
        f"the model's own code computes with {_bits(bits)}, on one device, too: what is off is {residual:.2e}, not more"
        " than that rounds",
        residual,
    )


def _explains(bits: int, residual: float) -> bool:
    return residual <= min(_ROUNDINGS * 2.0**-bits, _MOST)


def _bits(bits: int) -> str:
    kind = next(str(dtype).removeprefix("torch.") for dtype, carried in BITS.items() if carried == bits)
    return f"{bits} bits ({kind})"
