"""The comparison in fp64 or fp32. The one-device reference computes each recorded step again, and both must agree
within the tolerance for sums that are added in another order (`compare/tolerance.py`)."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.proof.causes.diagnose import diagnose
from meshwright.proof.causes.evidence import Evidence, ExpectedStep
from meshwright.proof.compare.errors import layer_scales, weight_drift
from meshwright.proof.compare.measured_rounding import MeasuredRounding
from meshwright.proof.compare.operators import first_different_operator
from meshwright.proof.compare.row_scales import (
    RoundingErrors,
    buffer_scales,
    gradient_scales,
    largest_changes,
    weight_scales,
)
from meshwright.proof.compare.step_comparator import Scales, clip_factor
from meshwright.proof.compare.tolerance import PerturbedTraining, SumTolerance, count_reductions
from meshwright.proof.proof import Proof
from meshwright.proof.record.operators import OperatorRecorder, read_calls
from meshwright.proof.reference.experiments import Experiments
from meshwright.proof.reference.groups import choose_grouping, describe_grouping, uses_batch_statistics
from meshwright.proof.reference.reference import Reference, preserve_generators
from meshwright.proof.reference.reference_setup import build_setup
from meshwright.proof.reference_comparison import ReferenceComparison
from meshwright.proof.request import ProofRequest
from meshwright.train.output.record_file import RecordedStep
from meshwright.train.output.recording import read_start, read_step

Tensors = dict[str, Tensor]
# A shift of a weight below this share of the allowed error is not adopted, because such shifts cannot add up to the
# allowed error within a few steps.
_SMALLEST_SHIFT = 0.01


def compare_exactly(request: ProofRequest, folder: Path, device: torch.device) -> Proof:
    """Returns the proof for the steps that `record` wrote to the folder. If something differs, the proof names the
    cause."""
    proof, evidence = compare_with_evidence(request, folder, device)
    if evidence is None:
        return proof
    first = replace(diagnose(evidence), operator=_first_operator(request, evidence, folder))
    return replace(proof, comparison=replace(proof.comparison, first_difference=first))


def compare_with_evidence(request: ProofRequest, folder: Path, device: torch.device) -> tuple[Proof, Evidence | None]:
    """Returns the proof without a cause, and the evidence on the step that differs, or None if no step differs."""
    with preserve_generators(device):
        comparison = _ExactComparison(request, device)
        return comparison.run(folder), comparison.evidence


def _first_operator(request: ProofRequest, evidence: Evidence, folder: Path) -> str | None:
    """Returns the first operator whose values differ, if the ranks have recorded those of the step that differs."""
    files = sorted(folder.glob("operators.*.pt"))
    if evidence.step != request.operators_of_step or not files:
        return None
    whole = OperatorRecorder()
    with preserve_generators(evidence.experiments.device):
        evidence.experiments.run(within=whole)
    groups = 1 if evidence.experiments.grouping == "whole" else request.plan.batch_parts
    compared = files if groups == 1 else files[:1]  # the first group has the samples of rank 0
    return first_different_operator(whole.calls, [read_calls(file) for file in compared], groups)


class _ExactComparison(ReferenceComparison[Reference]):
    """Compares recorded steps with those of the one-device reference, up to the first step that differs. `evidence` is
    then what is known of that step; it is None as long as nothing differs."""

    def __init__(self, request: ProofRequest, device: torch.device) -> None:
        setup = build_setup(request)
        setup.model.train()
        grouping = choose_grouping(setup.model, request.plan, request.dropout, setup.compares_samples)
        batch_statistics = any(uses_batch_statistics(module) for module in setup.model.modules())
        reference = Reference(setup, request, grouping, device)
        super().__init__(request, setup, reference, describe_grouping(grouping, request.plan, batch_statistics))
        self.perturbed = PerturbedTraining(build_setup(request), device)
        self.rounding = MeasuredRounding(request, grouping, device)
        self.sum_tolerance: SumTolerance | None = None
        self.drift = 0.0
        self.adopted_elements = 0
        self.changes: dict[str, float] = {}  # the sum over steps of each weight's largest change
        self.before: Tensors = {}  # the state that the step starts from
        self.evidence: Evidence | None = None

    def run(self, folder: Path) -> Proof:
        for step in range(1, self.request.steps + 1):
            self._step(step, read_step(folder, step), read_start(folder) if step == 1 else None)
            if self.differs:
                break
        if self.reference.lifted_casts:
            self.notes.append("the model converts values to fp32 itself; for the comparison it converts them to fp64")
        if self.rounding.failure:
            self.notes.append(
                "rounding was not measured, because the model does not run in a second precision"
                f" ({self.rounding.failure}): errors are relative to the largest value of a layer, not of a row"
            )
        if self.adopted_elements:
            self.notes.append(
                f"{self.adopted_elements:,} times a weight that rounding alone decides was taken over from the plan"
            )
        first = self.comparator.comparison.first_difference
        if first and first.step < self.request.steps:
            self.notes.append(f"nothing was compared after step {first.step}, where the first difference is")
        return self.make_proof(self.request.dtype, self._tolerance_text())

    def _step(self, step: int, recorded: RecordedStep, start: RecordedStep | None) -> None:
        """Computes the reference's step and compares it with the recorded one. `start` is the recorded state before
        step 1, which is compared first; it is None for later steps."""
        reference, comparator = self.reference, self.comparator
        before = self.before = self.before or self.reference_state()
        batch = reference.next_batch()
        with count_reductions(reference.model) as counter:
            loss = reference.compute(batch)
        if self.sum_tolerance is None:
            self.sum_tolerance = counter.tolerance(len(batch.groups), reference.setup.dtype)
        tolerance = self.sum_tolerance.with_drift(self.drift)
        comparator.raise_tolerance(tolerance)
        if start:
            comparator.compare_states(0, start, before, {}, self._state_scales(0, before, before, None))
        if not math.isfinite(float(loss)):
            self.notes.append(f"the loss of step {step} is {float(loss)} on one device, too")
        comparator.compare_loss(step, recorded, loss)
        gradients = reference.gradients()
        computed_buffers, _ = comparator.divide_state(self.reference_state())
        errors = self.rounding.measure(batch, before, gradients, computed_buffers)
        scales = gradient_scales(gradients, errors, self.sum_tolerance, self.drift)
        comparator.compare_gradients(step, recorded, gradients, scales)
        norm = reference.clip()
        comparator.compare_norm(step, recorded, norm)
        factor = clip_factor(norm, reference.setup.clip_norm)
        self.perturbed.take_perturbed_gradients(
            reference.model, {name: tolerance * factor * scale for name, scale in scales.items()}
        )
        reference.update(batch.last_of_epoch)
        self.perturbed.update(batch.last_of_epoch)
        after = self.reference_state()
        weight_bounds = self.perturbed.weight_bounds(reference.model)
        state_scales = self._state_scales(step, before, after, errors)
        comparator.compare_states(step, recorded, after, weight_bounds, state_scales)
        if self.differs:
            expected = ExpectedStep(loss.cpu(), norm.cpu(), gradients, before, after, scales)
            self.evidence = self._collect_evidence(step, recorded, expected)
            return
        self._adopt_rounded_weights(recorded.state, after, weight_bounds)
        self.before = after = self.reference_state()
        weights = {name: value for name, value in after.items() if name in comparator.weights}
        self.drift = weight_drift(recorded.state, weights)

    def _state_scales(self, step: int, before: Tensors, after: Tensors, errors: RoundingErrors | None) -> Scales:
        """Returns what the errors of buffers and weights after a step are divided by. Step 0 stands for those before
        the first step."""
        assert self.sum_tolerance is not None
        buffers, weights = self.comparator.divide_state(after)
        for name, change in largest_changes(before, weights).items():
            self.changes[name] = self.changes.get(name, 0.0) + change
        tolerance, eps = self.comparator.comparison.tolerance, torch.finfo(self.sum_tolerance.dtype).eps
        return {
            **buffer_scales(buffers, errors, self.sum_tolerance, self.drift),
            **weight_scales(before, weights, self.changes, step, tolerance, eps),
        }

    def _collect_evidence(self, step: int, recorded: RecordedStep, expected: ExpectedStep) -> Evidence:
        comparison, setup = self.comparator.comparison, self.reference.setup
        assert comparison.first_difference is not None
        return Evidence(
            plan=self.request.plan,
            difference=comparison.first_difference,
            step=step,
            tolerance=comparison.tolerance,
            clip_norm=setup.clip_norm,
            recorded=recorded,
            expected=expected,
            experiments=Experiments(self.request, self.reference.device, step, expected.before),
            dtype=setup.dtype,
        )

    def _adopt_rounded_weights(self, recorded: Tensors, after: Tensors, weight_bounds: Tensors) -> None:
        """Where rounding alone decides the value of a weight (equation 5 of `compare/tolerance.py`), moves the
        reference's weight to the plan's value."""
        shifts: Tensors = {}
        scales = layer_scales({name: after[name] for name in self.comparator.parameters if name in after})
        for name, scale in scales.items():
            allowed = self.comparator.comparison.tolerance * scale
            shift = recorded[name].to(after[name]) - after[name]
            is_adopted = (weight_bounds[name] > allowed) & (shift.abs() > _SMALLEST_SHIFT * allowed)
            shifts[name] = torch.where(is_adopted, shift, 0.0)
            self.adopted_elements += int((shifts[name] != 0).sum())
        self.perturbed.shift_weights(self.reference.model, shifts)

    def _tolerance_text(self) -> str:
        assert self.sum_tolerance is not None
        has_grown = self.comparator.comparison.tolerance > 1.01 * self.sum_tolerance.first_step
        drift = f" + 2 × {self.sum_tolerance.depth} layers × what the weights had drifted before" if has_grown else ""
        return f"{self.sum_tolerance}{drift}"
