"""`ReferenceComparison`: the common part of the exact and the rounded comparison with the one-device reference.

Recorded steps are read one at a time, and the reference takes each step when it is read. Therefore only one step is in
memory.
"""

from typing import Generic, TypeVar

from torch import Tensor

from meshwright.proof.compare.step_comparator import StepComparator
from meshwright.proof.notes import comparison_notes
from meshwright.proof.proof import Proof
from meshwright.proof.reference.reference import Reference
from meshwright.proof.reference.reference_setup import ReferenceSetup
from meshwright.proof.request import ProofRequest

Tensors = dict[str, Tensor]
ReferenceType = TypeVar("ReferenceType", bound=Reference)


class ReferenceComparison(Generic[ReferenceType]):
    """Base class of both comparisons. It holds the one-device reference, a `StepComparator` with the result so far, and
    notes for the reader of the proof."""

    def __init__(
        self, request: ProofRequest, setup: ReferenceSetup, reference: ReferenceType, grouping_note: str | None
    ) -> None:
        self.request = request
        self.reference = reference
        self.comparator = StepComparator(reference.model)
        self.notes = list(comparison_notes(request, setup, grouping_note))
        if setup.make_schedule and reference.schedule is None:
            self.notes.append("the schedule needs a metric and is not stepped: nothing is evaluated in a proof")

    @property
    def differs(self) -> bool:
        """Whether a difference was found. Callers stop then, because later steps would only show its consequences."""
        return self.comparator.comparison.first_difference is not None

    def reference_state(self) -> Tensors:
        """Copies of the reference's weights and buffers, on the CPU."""
        state = self.reference.model.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}

    def make_proof(self, dtype: str, tolerance_is: str) -> Proof:
        """Returns the proof of what was compared so far, without a cause."""
        return Proof(
            plan=self.request.plan,
            ranks=self.request.plan.world_size,
            device=self.reference.device.type,
            steps=self.request.steps,
            dtype=dtype,
            comparison=self.comparator.comparison,
            tolerance_is=tolerance_is,
            notes=tuple(self.notes),
            values=tuple(self.comparator.values),
            start=self.request.start,
        )
