"""Weights or buffers that differed before the first step."""

from meshwright.proof.causes.evidence import Evidence, Verdict


def different_start(evidence: Evidence) -> Verdict | None:
    """The first difference lies before the first step, so whatever follows may follow from it."""
    first = evidence.difference
    if first.step > 0:
        return None
    kind = "buffer" if first.what == "buffer" else "weight"
    model = f"rank {first.rank}" if first.rank else "the plan's model"  # rank 0's state is gathered from all ranks
    return Verdict(
        "different_start",
        f"{model} started with another {kind} {first.parameter} than one device, by {first.error:.2e} of its"
        " layer's largest value",
    )
