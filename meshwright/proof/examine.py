"""Trains the reference, and holds each step that the ranks recorded against it as it goes: one step is in memory."""

import math
from pathlib import Path

import torch
from torch import Tensor

from meshwright.proof.compare import CANCELLED, Comparison, What, drift_of, error_of, layer_scales
from meshwright.proof.groups import describe, grouping, looks_at_the_batch
from meshwright.proof.proof import Proof
from meshwright.proof.question import Question
from meshwright.proof.record import Recorded, read, read_start
from meshwright.proof.reference import Reference, generators_kept
from meshwright.proof.setting import Setting, set_up
from meshwright.proof.tolerance import Shadow, Sizes, counted

Tensors = dict[str, Tensor]
_NOTICED = 0.01  # of the tolerance: what is less could not add up to it within a few steps


def examine(question: Question, folder: Path, device: torch.device) -> Proof:
    """The proof, from what `record` left in the folder."""
    with generators_kept(device):
        return _Examination(question, device).run(folder)


class _Examination:
    """Holds the reference, and what has been seen so far."""

    def __init__(self, question: Question, device: torch.device) -> None:
        setting = set_up(question)
        setting.model.train()
        kind = grouping(setting.model, question.plan, question.dropout)
        batch_statistics = any(looks_at_the_batch(module) for module in setting.model.modules())
        self.question = question
        self.reference = Reference(setting, question, kind, device)
        self.shadow = Shadow(set_up(question), device)
        self.parameters = [name for name, _ in self.reference.model.named_parameters()]
        self.weights = {name for name, _ in self.reference.model.named_parameters(remove_duplicate=False)}
        self.notes = _notes(question, setting, describe(kind, question.plan, batch_statistics))
        self.sizes: Sizes | None = None
        self.seen = Comparison()
        self.drift = 0.0
        self.adopted = 0
        self.largest_loss = 0.0

    def run(self, folder: Path) -> Proof:
        question = self.question
        for step in range(1, question.steps + 1):
            self._step(step, read(folder, step), read_start(folder) if step == 1 else None)
            if self.seen.first:  # everything that follows would follow from it
                break
        notes = self.notes
        if self.adopted:
            notes = (
                *notes,
                f"{self.adopted:,} times a weight that rounding alone decides was taken over from the plan",
            )
        if self.seen.first and self.seen.first.step < question.steps:
            notes = (*notes, f"nothing was compared after step {self.seen.first.step}, where the first difference is")
        return Proof(
            plan=question.plan,
            ranks=question.plan.world_size,
            device=self.reference.device.type,
            steps=question.steps,
            dtype=question.dtype,
            comparison=self.seen,
            derived=self._derived(),
            notes=notes,
        )

    def _step(self, step: int, found: Recorded, start: Tensors | None) -> None:
        reference = self.reference
        before = self._state() if start else {}
        batch = reference.next_batch()
        with counted(reference.model) as count:
            loss = reference.compute(batch)
        if self.sizes is None:
            self.sizes = count.sizes(len(batch.groups), reference.setting.dtype)
        tolerance = self.sizes.after(self.drift)
        self.seen = self.seen.within(tolerance)
        if start:
            self._compare_state(0, start, before, {})
        self._compare_loss(step, found.loss, loss)
        scales = self._compare_gradients(step, found.gradients, reference.gradients())
        norm = reference.clip()
        self._compare_norm(step, found, norm)
        kept = _kept_by_clipping(norm, reference.setting.clip_norm)
        self.shadow.follow(reference.model, {name: tolerance * kept * scale for name, scale in scales.items()})
        reference.update(batch.last)
        self.shadow.update(batch.last)
        after = self._state()
        carried = self.shadow.carried(reference.model)
        self._compare_state(step, found.state, after, carried)
        if not self.seen.first:
            self._adopt(found.state, after, carried)
            after = self._state()
            self.drift = drift_of(found.state, {name: value for name, value in after.items() if name in self.weights})

    def _adopt(self, found: Tensors, after: Tensors, carried: Tensors) -> None:
        """Takes over the weights that rounding alone decides."""
        shifts: Tensors = {}
        scales = layer_scales({name: after[name] for name in self.parameters if name in after})
        for name, scale in scales.items():
            allowed = self.seen.tolerance * scale
            shift = found[name].to(after[name]) - after[name]
            decided = (carried[name] > allowed) & (shift.abs() > _NOTICED * allowed)
            shifts[name] = torch.where(decided, shift, 0.0)
            self.adopted += int((shifts[name] != 0).sum())
        self.shadow.adopt(self.reference.model, shifts)

    # ---- what is compared, in the order in which it comes about

    def _compare_loss(self, step: int, found: Tensor, expected: Tensor) -> None:
        if not math.isfinite(float(expected)):
            self.notes = (*self.notes, f"the loss of step {step} is {float(expected)} on one device, too")
        self.largest_loss = max(self.largest_loss, float(expected.abs()))
        self._see(step, "loss", None, error_of(found, expected.cpu(), self.largest_loss))

    def _compare_gradients(self, step: int, found: Tensors, expected: Tensors) -> dict[str, float]:
        """From the last layer to the first, as backward reaches them: where an error begins is told. Returns the
        scales they were measured against."""
        scales = layer_scales(expected, CANCELLED)
        smallest = min(scales.values(), default=0.0)
        for name in reversed(self.parameters):
            unit = scales.get(name, smallest)  # a layer that the reference did not reach
            self._see(step, "gradient", name, error_of(found.get(name), expected.get(name), unit))
        return scales

    def _compare_norm(self, step: int, found: Recorded, expected: Tensor) -> None:
        norm = found.norm
        if norm is None:
            squares = sum(float(gradient.double().square().sum()) for gradient in found.gradients.values())
            norm = torch.tensor(math.sqrt(squares), dtype=torch.float64)
        self._see(step, "gradient norm", None, error_of(norm, expected.cpu(), float(expected)))

    def _compare_state(self, step: int, found: Tensors, expected: Tensors, carried: Tensors) -> None:
        """Buffers first: they were there before the optimizer's step."""
        buffers = {name: value for name, value in expected.items() if name not in self.weights}
        weights = {name: value for name, value in expected.items() if name in self.weights}
        for name, scale in layer_scales(buffers).items():
            self._see(step, "buffer", name, _error(found, name, buffers[name], scale))
        for name, scale in layer_scales(weights).items():
            unit: float | Tensor = scale
            if name in carried:
                unit = (carried[name].double() / self.seen.tolerance).clamp(min=scale)
            self._see(step, "weight" if step else "initial weight", name, _error(found, name, weights[name], unit))

    def _see(self, step: int, what: What, parameter: str | None, error: float) -> None:
        self.seen = self.seen.seen(step, what, parameter, error)

    def _state(self) -> Tensors:
        state = self.reference.model.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}

    def _derived(self) -> str:
        assert self.sizes is not None
        grown = self.seen.tolerance > 1.01 * self.sizes.tolerance
        drift = f" + 2 × {self.sizes.depth} layers × what the weights had drifted before" if grown else ""
        return f"{self.sizes}{drift}"


def _error(found: Tensors, name: str, expected: Tensor, unit: float | Tensor) -> float:
    """A weight or buffer that the plan's model does not have is as wrong as it can be."""
    return error_of(found[name], expected, unit) if name in found else math.inf


def _kept_by_clipping(norm: Tensor, limit: float | None) -> float:
    """By which factor clipping shortened the gradients."""
    return 1.0 if limit is None or not float(norm) else min(1.0, limit / float(norm))


def _notes(question: Question, setting: Setting, groups: str | None) -> tuple[str, ...]:
    notes = []
    plan = question.plan
    if plan.world_size == 1:
        notes.append("one rank: nothing that ranks do together was compared")
    if plan.numerics.precision != "fp32":
        notes.append(f"compared in {question.dtype}: the plan's {plan.numerics.precision} is left out")
    if setting.dropped:
        places = "place" if setting.dropped == 1 else "places"
        notes.append(f"dropout is off for the comparison (in {setting.dropped} {places})")
    elif question.dropout:
        notes.append("dropout is on: plans that divide activations draw other masks than one device, and differ")
    if groups:
        notes.append(groups)
    return tuple(notes)
