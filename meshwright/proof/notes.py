"""The notes of a proof: sentences that tell its reader how the comparison was made."""

from meshwright.proof.reference.reference_setup import ReferenceSetup
from meshwright.proof.request import COMPARED_GRADIENT_OPTIONS, ProofRequest


def comparison_notes(request: ProofRequest, setup: ReferenceSetup, grouping_note: str | None) -> tuple[str, ...]:
    """Returns the notes that are known before the comparison. `grouping_note` is what `describe_grouping` returned, or
    None."""
    notes = []
    plan = request.plan
    if plan.world_size == 1:
        notes.append("one rank: nothing that ranks do together was compared")
    if request.start == "random":
        notes.append("both sides started from weights that were drawn for the comparison, not from those of the job")
    if plan.numerics.precision != "fp32" and not request.in_plan_precision:
        notes.append(f"compared in {request.dtype}: the plan's {plan.numerics.precision} is left out")
    changed = [name for name, value in COMPARED_GRADIENT_OPTIONS.items() if getattr(plan.gradients, name) != value]
    notes += [f"compared without gradients.{name}, which trains differently from one device" for name in changed]
    if plan.shares.adaptive and plan.data_ranks > 1:
        notes.append("shares are adaptive: in the proof, samples move from one rank to the next in every step")
    if setup.disabled_dropouts:
        places = "place" if setup.disabled_dropouts == 1 else "places"
        notes.append(f"dropout is off for the comparison (in {setup.disabled_dropouts} {places})")
    elif request.dropout:
        notes.append("dropout is on: plans that divide activations draw other masks than one device, and differ")
    if setup.uses_eager_experts:
        notes.append(
            "the experts' grouped product has no fp64: their eager form is compared; --dtype fp32 compares the product"
        )
    if grouping_note:
        notes.append(grouping_note)
    return tuple(notes)
