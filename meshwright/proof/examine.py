"""Trains the reference, and holds each step that the ranks recorded against it as it goes: one step is in memory."""

import math
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.proof.causes.diagnose import diagnose
from meshwright.proof.causes.evidence import Evidence, Expected
from meshwright.proof.compare.errors import Difference, drift_of, layer_scales
from meshwright.proof.compare.step_comparator import Comparing, kept_by_clipping
from meshwright.proof.compare.tolerance import Shadow, Sizes, counted
from meshwright.proof.notes import notes
from meshwright.proof.proof import Proof
from meshwright.proof.question import Question
from meshwright.proof.reference.experiments import Laboratory
from meshwright.proof.reference.groups import describe, grouping, looks_at_the_batch
from meshwright.proof.reference.reference import Reference, generators_kept
from meshwright.proof.reference.setting import set_up
from meshwright.train.output.recording import Recorded, read, read_start

Tensors = dict[str, Tensor]
_NOTICED = 0.01  # of the tolerance: what is less could not add up to it within a few steps


def examine(question: Question, folder: Path, device: torch.device) -> Proof:
    """The proof, from what `record` left in the folder; of a difference it names the cause."""
    proof, evidence = compared(question, folder, device)
    if evidence is None:
        return proof
    return replace(proof, comparison=replace(proof.comparison, first=diagnose(evidence)))


def compared(question: Question, folder: Path, device: torch.device) -> tuple[Proof, Evidence | None]:
    """The proof without a cause, and what is known of the step that differs."""
    with generators_kept(device):
        examination = _Examination(question, device)
        return examination.run(folder), examination.evidence


class _Examination:
    """Holds the reference, and what has been seen so far."""

    def __init__(self, question: Question, device: torch.device) -> None:
        setting = set_up(question)
        setting.model.train()
        kind = grouping(setting.model, question.plan, question.dropout, setting.loss)
        batch_statistics = any(looks_at_the_batch(module) for module in setting.model.modules())
        self.question = question
        self.reference = Reference(setting, question, kind, device)
        self.shadow = Shadow(set_up(question), device)
        self.comparing = Comparing(self.reference.model)
        self.notes = notes(question, setting, describe(kind, question.plan, batch_statistics))
        self.sizes: Sizes | None = None
        self.drift = 0.0
        self.adopted = 0
        self.before: Tensors = {}  # what the step starts from
        self.evidence: Evidence | None = None

    def run(self, folder: Path) -> Proof:
        question = self.question
        for step in range(1, question.steps + 1):
            self._step(step, read(folder, step), read_start(folder) if step == 1 else None)
            if self.comparing.seen.first:  # everything that follows would follow from it
                break
        told, seen = self.notes, self.comparing.seen
        if self.adopted:
            told = (
                *told,
                f"{self.adopted:,} times a weight that rounding alone decides was taken over from the plan",
            )
        if seen.first and seen.first.step < question.steps:
            told = (*told, f"nothing was compared after step {seen.first.step}, where the first difference is")
        return Proof(
            plan=question.plan,
            ranks=question.plan.world_size,
            device=self.reference.device.type,
            steps=question.steps,
            dtype=question.dtype,
            comparison=seen,
            derived=self._derived(),
            notes=told,
        )

    def _step(self, step: int, found: Recorded, start: Recorded | None) -> None:
        reference, compare = self.reference, self.comparing
        before = self.before = self.before or self._state()
        batch = reference.next_batch()
        with counted(reference.model) as count:
            loss = reference.compute(batch)
        if self.sizes is None:
            self.sizes = count.sizes(len(batch.groups), reference.setting.dtype)
        tolerance = self.sizes.after(self.drift)
        compare.within(tolerance)
        if start:
            compare.states(0, start, before, {})
        if not math.isfinite(float(loss)):
            self.notes = (*self.notes, f"the loss of step {step} is {float(loss)} on one device, too")
        compare.loss(step, found, loss)
        gradients = reference.gradients()
        scales = compare.gradients(step, found, gradients)
        norm = reference.clip()
        compare.norm(step, found, norm)
        kept = kept_by_clipping(norm, reference.setting.clip_norm)
        self.shadow.follow(reference.model, {name: tolerance * kept * scale for name, scale in scales.items()})
        reference.update(batch.last)
        self.shadow.update(batch.last)
        after = self._state()
        carried = self.shadow.carried(reference.model)
        compare.states(step, found, after, carried)
        if compare.seen.first:
            expected = Expected(loss.cpu(), norm.cpu(), gradients, before, after)
            self.evidence = self._what_is_known(compare.seen.first, step, found, expected)
            return
        self._adopt(found.state, after, carried)
        self.before = after = self._state()
        self.drift = drift_of(found.state, {name: value for name, value in after.items() if name in compare.weights})

    def _what_is_known(self, first: Difference, step: int, found: Recorded, expected: Expected) -> Evidence:
        setting = self.reference.setting
        return Evidence(
            plan=self.question.plan,
            first=first,
            step=step,
            tolerance=self.comparing.seen.tolerance,
            clip_norm=setting.clip_norm,
            found=found,
            expected=expected,
            lab=Laboratory(self.question, self.reference.device, step, expected.before),
            dtype=setting.dtype,
        )

    def _adopt(self, found: Tensors, after: Tensors, carried: Tensors) -> None:
        """Takes over the weights that rounding alone decides."""
        shifts: Tensors = {}
        scales = layer_scales({name: after[name] for name in self.comparing.parameters if name in after})
        for name, scale in scales.items():
            allowed = self.comparing.seen.tolerance * scale
            shift = found[name].to(after[name]) - after[name]
            decided = (carried[name] > allowed) & (shift.abs() > _NOTICED * allowed)
            shifts[name] = torch.where(decided, shift, 0.0)
            self.adopted += int((shifts[name] != 0).sum())
        self.shadow.adopt(self.reference.model, shifts)

    def _state(self) -> Tensors:
        state = self.reference.model.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}

    def _derived(self) -> str:
        assert self.sizes is not None
        grown = self.comparing.seen.tolerance > 1.01 * self.sizes.tolerance
        drift = f" + 2 × {self.sizes.depth} layers × what the weights had drifted before" if grown else ""
        return f"{self.sizes}{drift}"
