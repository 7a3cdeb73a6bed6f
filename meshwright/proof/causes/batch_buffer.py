"""The cause `batch_buffer`: a buffer that the model computes from the batch in its forward pass."""

from meshwright.proof.causes.batch_norm import largest_buffer_error
from meshwright.proof.causes.evidence import Evidence, Verdict
from meshwright.proof.compare.errors import layer_name


def batch_buffer(evidence: Evidence) -> Verdict | None:
    """Returns a verdict if a buffer differs that does not belong to BatchNorm, and one device gets its value when only
    the samples of data rank 0 change buffers."""
    first = evidence.difference
    if first.what != "buffer" or not first.step or evidence.plan.batch_parts == 1:
        return None
    if layer_name(first.parameter or "") in evidence.experiments.batch_statistics_layers:
        return None
    misfit = largest_buffer_error(evidence, evidence.experiments.run("local", statistics_rank=0))
    if not evidence.fits(misfit):
        return None
    return Verdict(
        "batch_buffer",
        f"the forward pass changes the buffer {first.parameter} by the batch that it sees: under this plan it follows"
        " the samples of data rank 0, on one device the whole batch",
        misfit,
    )
