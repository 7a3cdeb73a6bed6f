"""The cause `different_start`: weights or buffers differed before the first step."""

from meshwright.proof.causes.evidence import Evidence, Verdict


def different_start(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if the first difference was found before the first step. All later differences may follow from
    it."""
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
