"""Dropout or other randomness."""

import math

from meshwright.proof.causes.evidence import Evidence, Tensors, Verdict

_OTHER_DRAWS = 3
_ALIKE = 10.0  # a difference within this factor of what other random numbers make is what they make


def randomness(evidence: Evidence) -> Verdict | None:
    """Somebody drew random numbers in the step, and: one device that draws what each data rank draws has the ranks'
    gradients; or only the ranks drew, or from other seeds; or other random numbers change one device's gradients by
    about as much as the ranks' are off. Likewise where one device does not get the same twice."""
    if not evidence.gradients_are_wrong:
        return None
    lab = evidence.lab
    usual, off = lab.usual, _distance(evidence.gradients, evidence.expected.gradients)
    residual = evidence.misfit(evidence.expected.gradients)
    again = _distance(usual.gradients, lab.run().gradients)
    if again and _alike(off, again):
        return Verdict("randomness", "one device gets other gradients each time it takes this step", residual)
    drawing = [witness for witness in evidence.seen if witness.drew]
    if not drawing and not usual.drew:
        return None
    for dropout in (False, True):
        drawn = lab.run("local", dropout=dropout)
        misfit = evidence.misfit(drawn.gradients)
        if drawn.drew and evidence.fits(misfit):
            left = "dropout was left on: " if dropout and not evidence.lab.question.dropout else ""
            return Verdict(
                "randomness",
                f"{left}one device that draws each data rank's random numbers for its samples has the same gradients",
                misfit,
            )
    if drawing and not usual.drew:
        ranks = ", ".join(str(witness.rank) for witness in drawing)
        return Verdict(
            "randomness", f"rank {ranks} drew random numbers in step {evidence.step}, one device none", residual
        )
    spread = [_distance(usual.gradients, lab.run(elsewhere=number).gradients) for number in range(1, 1 + _OTHER_DRAWS)]
    typical = sorted(spread)[len(spread) // 2]
    if not typical or not _alike(off, typical):
        return None
    return Verdict(
        "randomness",
        f"the model draws random numbers: other ones change one device's gradients by {typical:.2e}, the ranks' are"
        f" {off:.2e} off (root of the sum of squares)",
        residual,
    )


def _distance(one: Tensors, other: Tensors) -> float:
    zero = {name: value.new_zeros(()) for name, value in {**one, **other}.items()}
    both = [(one.get(name, zero[name]), other.get(name, zero[name])) for name in zero]
    return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in both))


def _alike(off: float, typical: float) -> bool:
    return typical / _ALIKE <= off <= typical * _ALIKE
