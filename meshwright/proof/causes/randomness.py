"""The cause `randomness`: dropout, or other random numbers that the ranks and one device drew differently."""

import math

from meshwright.proof.causes.evidence import Evidence, Tensors, Verdict

_OTHER_DRAWS = 3
_SIMILAR_FACTOR = 10.0  # within this factor, two differences of gradients count as similar


def randomness(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if one device does not get the same gradients twice, or if random numbers were drawn in the
    step and one of these holds, otherwise None:

    - one device that draws the random numbers of each data rank gets the ranks' gradients;
    - only the ranks drew random numbers;
    - other random numbers change one device's gradients by about as much as the ranks' gradients differ.
    """
    if not evidence.gradients_differ:
        return None
    experiments = evidence.experiments
    reference = experiments.reference_step
    difference = _distance(evidence.gradients, evidence.expected.gradients)
    residual = evidence.misfit(evidence.expected.gradients)
    repeated = _distance(reference.gradients, experiments.run().gradients)
    if repeated and _are_similar(difference, repeated):
        return Verdict("randomness", "one device gets other gradients each time it takes this step", residual)
    drawing_ranks = [rank.rank for rank in evidence.observations if rank.drew_random_numbers]
    if not drawing_ranks and not reference.drew_random_numbers:
        return None
    same_draws = _with_draws_of_ranks(evidence)
    if same_draws:
        return same_draws
    if drawing_ranks and not reference.drew_random_numbers:
        ranks = ", ".join(map(str, drawing_ranks))
        return Verdict(
            "randomness", f"rank {ranks} drew random numbers in step {evidence.step}, one device none", residual
        )
    other_draws = [experiments.run(random_draw=number).gradients for number in range(1, 1 + _OTHER_DRAWS)]
    distances = sorted(_distance(reference.gradients, gradients) for gradients in other_draws)
    typical = distances[len(distances) // 2]
    if not typical or not _are_similar(difference, typical):
        return None
    return Verdict(
        "randomness",
        f"the model draws random numbers: other ones change one device's gradients by {typical:.2e}, the ranks' are"
        f" {difference:.2e} off (root of the sum of squares)",
        residual,
    )


def _with_draws_of_ranks(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if one device gets the ranks' gradients when it draws each data rank's random numbers. This is
    tried with dropout off and on."""
    for dropout in (False, True):
        result = evidence.experiments.run("local", dropout=dropout)
        misfit = evidence.misfit(result.gradients)
        if result.drew_random_numbers and evidence.fits(misfit):
            left_on = "dropout was left on: " if dropout and not evidence.experiments.request.dropout else ""
            return Verdict(
                "randomness",
                f"{left_on}one device that draws each data rank's random numbers for its samples has the same"
                " gradients",
                misfit,
            )
    return None


def _distance(gradients: Tensors, others: Tensors) -> float:
    """Returns the root of the sum of squared differences. A gradient that is on one side only counts as zero on the
    other side."""
    zeros = {name: value.new_zeros(()) for name, value in {**gradients, **others}.items()}
    pairs = [(gradients.get(name, zero), others.get(name, zero)) for name, zero in zeros.items()]
    return math.sqrt(sum(float((a.double() - b.double()).square().sum()) for a, b in pairs))


def _are_similar(distance: float, other: float) -> bool:
    return other / _SIMILAR_FACTOR <= distance <= other * _SIMILAR_FACTOR
