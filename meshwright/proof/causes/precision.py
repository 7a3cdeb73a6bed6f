"""The cause `low_precision`: a layer, the combination of gradients, or the weights have a lower precision than the
comparison."""

from collections.abc import Sequence

from meshwright.proof.causes.evidence import Evidence, Tensors, Verdict, join_names
from meshwright.proof.compare.errors import layer_scales, scaled_error
from meshwright.train.output.observation import MANTISSA_BITS, mantissa_bits

_MOST_ROUNDINGS = 1000  # a difference larger than so many roundings has another cause
_LARGEST_RESIDUAL = 0.5  # a larger error is no rounding: even in the shortest types, most of a gradient is right


def low_precision(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if numbers carry fewer mantissa bits than on one device: a layer's output on some rank, the
    combined gradients, or the weights after an update with right gradients. There is also one if the model itself casts
    to a shorter type on one device, because then no two plans round alike. In each case, the error must be no larger
    than roundings to that number of bits may cause."""
    first = evidence.difference
    if first.step and first.what in ("weight", "buffer"):
        state = {**evidence.recorded.state, **evidence.recorded.differing_states.get(first.rank, {})}
        name, after = first.parameter or "", evidence.expected.after
        error = scaled_error(state.get(name), after.get(name), layer_scales(after).get(name, 0.0))
        return _in_tensors(evidence, [name], state, after, error, "values")
    if not evidence.gradients_differ:
        return None
    expected = evidence.expected.gradients
    residual = evidence.largest_layer_error
    return (
        _in_layer(evidence, residual)
        or _in_tensors(evidence, evidence.differing_names, evidence.gradients, expected, residual, "gradients")
        or _in_model_code(evidence, residual)
    )


def _in_layer(evidence: Evidence, residual: float) -> Verdict | None:
    """Returns a verdict if a layer's output on some rank has fewer bits than on one device."""
    for layer, bits in evidence.experiments.reference_step.bits.items():
        for observation in evidence.observations:
            rank_bits = (observation.output_bits or {}).get(layer, 0)
            if 0 < rank_bits < min(bits, MANTISSA_BITS[evidence.dtype]) and _explains(rank_bits, residual):
                return Verdict(
                    "low_precision",
                    f"what {layer or 'the model'} computed on rank {observation.rank} has {_bits_text(rank_bits)}, on"
                    f" one device {bits}",
                    residual,
                )
    return None


def _in_tensors(
    evidence: Evidence, names: Sequence[str], tensors: Tensors, expected: Tensors, residual: float, values: str
) -> Verdict | None:
    """Returns a verdict if each of the named tensors has fewer bits than the expected one."""
    full_bits = MANTISSA_BITS[evidence.dtype]
    bits_by_name = {name: mantissa_bits(tensors[name]) for name in names if name in tensors and name in expected}
    short = {
        name: bits for name, bits in bits_by_name.items() if 0 < bits < min(mantissa_bits(expected[name]), full_bits)
    }
    if not short or len(short) < len(names) or not _explains(max(short.values()), residual):
        return None
    return Verdict(
        "low_precision",
        f"{values} of {join_names(short)} have {_bits_text(max(short.values()))}, on one device {full_bits}: they were"
        " rounded on their way",
        residual,
    )


def _in_model_code(evidence: Evidence, residual: float) -> Verdict | None:
    """Returns a verdict if the model's own code casts to a shorter type, which it does on one device, too."""
    bits = evidence.experiments.fewest_cast_bits
    if bits >= MANTISSA_BITS[evidence.dtype] or not _explains(bits, residual):
        return None
    return Verdict(
        "low_precision",
        f"the model's own code computes with {_bits_text(bits)}, on one device, too: the error is {residual:.2e}, no"
        " more than that rounds",
        residual,
    )


def _explains(bits: int, residual: float) -> bool:
    """Whether roundings to this number of bits may add up to the residual."""
    return residual <= min(_MOST_ROUNDINGS * 2.0**-bits, _LARGEST_RESIDUAL)


def _bits_text(bits: int) -> str:
    dtype = next(str(dtype).removeprefix("torch.") for dtype, carried in MANTISSA_BITS.items() if carried == bits)
    return f"{bits} bits ({dtype})"
