"""A parameter that no optimizer holds."""

from meshwright.proof.causes.evidence import Evidence, Verdict, listed


def not_optimized(evidence: Evidence) -> Verdict | None:
    """Gradients are right and a weight is not; a rank that has (a part of) it does not have it in its optimizer, where
    one device does."""
    if evidence.first.what != "weight":
        return None
    names = evidence.lab.held
    left = {w.rank: [n for n in w.holds if n in names and n not in w.held] for w in evidence.seen}
    missing = {rank: found for rank, found in left.items() if evidence.parameter in found}
    if not missing:
        return None
    ranks = "no rank" if len(missing) == len(evidence.seen) else f"rank {listed(map(str, missing))}"
    has = "has it" if ranks == "no rank" else "does not have it"
    found = next(iter(missing.values()))
    more = f"; so it is with {len(found)} weights in all" if len(found) > 1 else ""
    return Verdict(
        "not_optimized",
        f"{evidence.parameter} has the right gradient, but {ranks} {has} in its optimizer{more}",
    )
