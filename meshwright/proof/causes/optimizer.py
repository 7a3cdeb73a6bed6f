"""The cause `not_optimized`: a parameter is missing in a rank's optimizer."""

from meshwright.proof.causes.evidence import Evidence, Verdict, join_names


def not_optimized(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the gradients are right, but a weight differs that is missing in the optimizer of a rank
    that holds it or a part of it, although one device's optimizer has it."""
    if evidence.difference.what != "weight":
        return None
    optimized = evidence.experiments.optimized_names
    missing_by_rank = {
        observation.rank: [
            name
            for name in observation.local_parameters
            if name in optimized and name not in observation.optimizer_parameters
        ]
        for observation in evidence.observations
    }
    missing = {rank: names for rank, names in missing_by_rank.items() if evidence.parameter in names}
    if not missing:
        return None
    on_no_rank = len(missing) == len(evidence.observations)
    ranks = "no rank has it" if on_no_rank else f"rank {join_names(map(str, missing))} does not have it"
    count = len(next(iter(missing.values())))
    more = f"; {count} weights in all are missing there" if count > 1 else ""
    return Verdict(
        "not_optimized",
        f"{evidence.parameter} has the right gradient, but {ranks} in its optimizer{more}",
    )
