"""The cause `tied_drift`: copies of a tied parameter drifted apart on the pipeline stages that hold them."""

from meshwright.proof.causes.evidence import Evidence, Verdict


def tied_drift(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the first difference is in a tied parameter or its gradient, and the pipeline stages that
    hold a copy have different values."""
    first, name = evidence.difference, evidence.parameter
    if name not in evidence.tied_stages or first.what not in ("gradient", "weight"):
        return None
    stages_of_rank = evidence.ranks_along("pipeline", first.rank)
    holders = [observation for observation in stages_of_rank if name in observation.tied_stages]
    in_gradient = first.what == "gradient"
    digests = {(holder.gradients if in_gradient else holder.state)[name] for holder in holders}
    if len(digests) == 1:
        return None
    stages = " and ".join(str(stage) for stage in evidence.tied_stages[name])
    values = "gradients" if in_gradient else "values"
    return Verdict(
        "tied_drift",
        f"the copies of {name} on stages {stages} have different {values} after step {evidence.step}: one is"
        f" {first.error:.2e} off",
    )
