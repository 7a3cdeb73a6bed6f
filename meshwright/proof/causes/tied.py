"""Tied copies that drifted apart on the stages that hold them."""

from meshwright.proof.causes.evidence import Evidence, Verdict


def tied_drift(evidence: Evidence) -> Verdict | None:
    """The first difference is in a copy of a tied weight, or in its gradient, and stages that hold it have different
    ones."""
    name = evidence.parameter
    if name not in evidence.tied or evidence.first.what not in ("gradient", "weight"):
        return None
    line = [w for w in evidence.line("pipeline", evidence.first.rank) if name in w.tied]
    kept = "gradients" if evidence.first.what == "gradient" else "state"
    if len({getattr(witness, kept)[name] for witness in line}) == 1:
        return None
    stages = " and ".join(str(stage) for stage in evidence.tied[name])
    what = "gradients" if evidence.first.what == "gradient" else "values"
    return Verdict(
        "tied_drift",
        f"the copies of {name} on stages {stages} have different {what} after step {evidence.step}: one is"
        f" {evidence.first.error:.2e} off",
    )
