"""The comparison in a plan's own precision, step by step from the same weights.

Gradients are compared as far as roundings allow (`rounding`). What follows from them does not round any more: the
reference's optimizer takes the step with the plan's gradients, and its weights must be the plan's, as fp32 sums allow.
The next step begins with the plan's weights and buffers: two roundings would carry each other's apart.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.errors import InputError
from meshwright.proof.compare.errors import Comparison, What, error_of, layer_scales
from meshwright.proof.compare.rounding import (
    LAMBDA,
    PASSES,
    SPACING,
    Allowed,
    Off,
    Roundings,
    Summed,
    allowed,
    off,
    on_the_way,
    rounding,
    roundings_of,
    summed_layers,
    units,
)
from meshwright.proof.compare.tolerance import LAMBDA as SUMS
from meshwright.proof.compare.tolerance import Count, counted
from meshwright.proof.notes import notes
from meshwright.proof.proof import Proof
from meshwright.proof.question import Question
from meshwright.proof.reference.groups import GlobalBatch, describe, grouping, looks_at_the_batch
from meshwright.proof.reference.reference import generators_kept
from meshwright.proof.reference.rounded_reference import RoundedReference
from meshwright.proof.reference.setting import set_up
from meshwright.train.output.recording import Recorded, read, read_start, recorded_steps

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Noise:
    """What is planted: into layers by their fan-in, those that ranks sum from parts among them, and into gradients."""

    layers: Callable[[int], Roundings]
    gradients: Roundings
    summed: Summed


def examine_rounded(question: Question, folder: Path, device: torch.device) -> Proof:
    """The proof without a cause."""
    with generators_kept(device):
        return _Examination(question, device).run(folder)


class _Examination:
    """Holds the reference, and what has been seen so far."""

    def __init__(self, question: Question, device: torch.device) -> None:
        setting = set_up(question)
        setting.model.train()
        plan = question.plan
        kind = grouping(setting.model, plan, question.dropout, setting.loss)
        if kind == "whole" and plan.shares > 1 and not hasattr(setting.loss, "joined"):
            kind = "local"  # the same microbatches round alike
        self.question = question
        self.reference = RoundedReference(setting, question, kind, device)
        self.parameters = [name for name, _ in setting.model.named_parameters()]
        self.seen = Comparison()
        self.left_out = 0
        statistics = any(looks_at_the_batch(module) for module in setting.model.modules())
        told = describe(kind, plan, statistics) if statistics or question.dropout else None
        self.notes = list(notes(question, setting, told))

    def run(self, folder: Path) -> Proof:
        question = self.question
        self._start(read_start(folder))
        steps = recorded_steps(folder)
        for step in range(1, steps + 1):
            if self.seen.first:
                break
            self._step(step, read(folder, step))
        if self.left_out == steps:
            raise InputError(f"fp16 overflowed in all of {steps} steps, so there is nothing to compare: choose bf16")
        if self.left_out:
            self.notes.append(f"besides, {self.left_out} steps were left out by ranks and device: fp16 overflowed")
        spacing = SPACING[question.plan.numerics.precision]
        return Proof(
            plan=question.plan,
            ranks=question.plan.world_size,
            device=self.reference.device.type,
            steps=question.steps,
            dtype=question.plan.numerics.precision,
            comparison=self.seen,
            derived=f"{LAMBDA:g} × what {PASSES} more roundings ({spacing:.2g}) of all layers do to a gradient's size",
            notes=tuple(self.notes),
        )

    def _start(self, found: Recorded) -> None:
        """Weights are a function of the seed: equal to the last bit."""
        own = self._state()
        for name in own:
            self._see(0, "initial weight", name, error_of(found.state.get(name), own[name], 1.0))
            for rank, theirs in found.state_of.items():
                if name in theirs:
                    self._see(0, "initial weight", name, error_of(theirs[name], own[name], 1.0), rank)

    def _step(self, step: int, found: Recorded) -> None:
        reference = self.reference
        batch = reference.next_batch()
        before = self._state()
        with counted(reference.model) as count:
            loss = reference.compute(batch)
        fitted = bool(found.gradients)
        if reference.fits != fitted:
            # At the edge of what fp16 holds rounding decides. A factor of two away from it, it does not.
            self._load(before)
            reference.nearer = 0.5 if fitted else 2.0
            loss = reference.compute(batch)
        if reference.fits != fitted:
            self.notes.append(f"step {step} overflowed on {'one device' if fitted else 'the ranks'} alone")
            self._see(step, "gradient norm", None, math.inf)
            return
        if not fitted:
            self._left_out(found, batch)
            return
        gradients, buffers = reference.gradients(), self._buffers()
        noise = self._noise(count, summed_layers(reference.model, found.seen[0].dims or {}), len(batch.groups))
        allowances = self._allowed(batch, loss, {**gradients, **buffers}, before, noise)
        self.seen = self.seen.within(allowances.usual)
        self._number(step, "loss", found.loss, loss, allowances.numbers["loss"])
        for witness in found.seen:
            if witness.loss != float(found.loss):
                theirs = torch.tensor(witness.loss, dtype=torch.float64)
                self._number(step, "loss", theirs, loss, allowances.numbers["loss"], witness.rank)
        self._gradients(step, found, gradients, allowances)
        self._tensors(step, "buffer", found.state, buffers, allowances)
        for rank, own in found.state_of.items():
            self._tensors(step, "buffer", own, {k: v for k, v in buffers.items() if k in own}, allowances, rank)
        self._counters(step, found)
        if self.seen.first:
            return
        self._optimize(step, found, batch)
        reference.settle(True)

    def _left_out(self, found: Recorded, batch: GlobalBatch) -> None:
        """By all ranks and one device together."""
        self.left_out += 1
        self._load(found.state)
        self.reference.settle(False)
        self.reference.leave_out(batch.last)

    def _noise(self, count: Count, summed: Summed, passes: int) -> Noise:
        plan, kind = self.question.plan, self.reference.device.type
        terms = count.sizes(passes, torch.float32).terms
        return Noise(lambda fan_in: roundings_of(plan, fan_in, kind), roundings_of(plan, terms, kind), summed)

    def _allowed(self, batch: GlobalBatch, loss: Tensor, expected: Tensors, before: Tensors, noise: Noise) -> Allowed:
        reference, after = self.reference, self._state()
        kept = {name: p.grad for name, p in reference.model.named_parameters()}
        scales, parts = units(expected), reference.parts
        passes: list[dict[str, Off]] = []
        numbers: list[dict[str, float]] = []
        for number in range(PASSES):
            self._load(before)
            seed = 1000 * reference.steps + number
            with rounding(reference.model, noise.layers, noise.summed, seed):
                other = reference.compute(batch)
            chance = torch.Generator().manual_seed(seed)
            found = {name: noise.gradients.disturbed(value, chance) for name, value in reference.gradients().items()}
            found |= self._buffers()
            passes.append({name: off(found.get(name), expected[name], scales[name]) for name in expected})
            numbers.append({"loss": _relative(other, loss)})
        self._load(after)
        for name, parameter in reference.model.named_parameters():
            parameter.grad = kept[name]
        more = on_the_way(self.question.plan)
        sizes = {name: parts.get(name, 0.0) / scale if scale else 0.0 for name, scale in scales.items()}
        least = {name: math.hypot(noise.gradients.size, more * size) for name, size in sizes.items()}
        return allowed(passes, numbers, expected, least)

    def _gradients(self, step: int, found: Recorded, expected: Tensors, allowances: Allowed) -> None:
        self._tensors(step, "gradient", found.gradients, expected, allowances)
        for rank, own in found.gradients_of.items():
            self._tensors(step, "gradient", own, {k: v for k, v in expected.items() if k in own}, allowances, rank)
        for name in found.gradients.keys() - expected.keys():
            self._see(step, "gradient", name, off(found.gradients[name], None, 1.0).spread)

    def _tensors(
        self, step: int, what: What, found: Tensors, expected: Tensors, allowances: Allowed, rank: int = 0
    ) -> None:
        scales = units(expected)
        for name in reversed(expected):
            share = allowances.share(name, off(found.get(name), expected[name], scales[name]))
            self._see(step, what, name, share * self.seen.tolerance, rank)

    def _counters(self, step: int, found: Recorded) -> None:
        for name, value in self._state().items():
            if not value.is_floating_point():
                self._see(step, "buffer", name, error_of(found.state.get(name), value, 1.0))
                for rank, own in found.state_of.items():
                    if name in own:
                        self._see(step, "buffer", name, error_of(own[name], value, 1.0), rank)

    def _number(self, step: int, what: What, found: Tensor, expected: Tensor, most: float, rank: int = 0) -> None:
        error = _relative(found, expected)
        share = error / most if most else (math.inf if error else 0.0)
        self._see(step, what, None, share * self.seen.tolerance if error else 0.0, rank)

    def _optimize(self, step: int, found: Recorded, batch: GlobalBatch) -> None:
        """The step that the plan's gradients make."""
        reference, eps = self.reference, SPACING["fp32"]
        for name, parameter in reference.model.named_parameters():
            given = found.gradients.get(name)
            parameter.grad = None if given is None else given.to(parameter)
        elements = sum(p.numel() for p in reference.model.parameters())
        norm = reference.clip()
        if found.norm is not None:
            self._number(step, "gradient norm", found.norm, norm, SUMS * math.sqrt(elements) * eps)
        before = self._state()
        reference.update(batch.last)
        after = self._state()
        for name, scale in layer_scales({name: after[name] for name in self.parameters}).items():
            moved = float((after[name] - before[name]).abs().max())
            # Where an optimizer divides small numbers by each other, the norm's rounding stays one of the update's.
            most = SUMS * eps * (scale + math.sqrt(elements) * moved)
            theirs = {0: found.state, **{rank: own for rank, own in found.state_of.items() if name in own}}
            for rank, own in theirs.items():
                error = error_of(own.get(name), after[name], 1.0)
                self._see(step, "weight", name, error / most * self.seen.tolerance if error else 0.0, rank)
        self._load(found.state)

    def _load(self, state: Tensors) -> None:
        self.reference.model.load_state_dict(state, strict=False)

    def _state(self) -> Tensors:
        state = self.reference.model.state_dict()
        return {name: value.detach().cpu().clone() for name, value in state.items() if isinstance(value, Tensor)}

    def _buffers(self) -> Tensors:
        named = self.reference.model.named_buffers()
        kept = self.reference.model.state_dict().keys()
        return {n: b.detach().cpu().clone() for n, b in named if n in kept and b.is_floating_point()}

    def _see(self, step: int, what: What, parameter: str | None, error: float, rank: int = 0) -> None:
        self.seen = self.seen.seen(step, what, parameter, error, rank)


def _relative(found: Tensor, expected: Tensor) -> float:
    size = abs(float(expected))
    difference = abs(float(found) - float(expected))
    return difference / size if size else (math.inf if difference else 0.0)


def explained(proof: Proof, exact: Proof) -> Proof:
    """With the cause that the same comparison in fp64 has found; where that finds nothing, it is the precision."""
    first, cause = proof.first_difference, exact.first_difference
    assert first is not None
    if cause is None:
        told = f"in {exact.dtype} the plan trains as one device does: what differs is what {proof.dtype} makes of it"
        found = replace(first, cause="low_precision", explanation=told)
    else:
        told = f"in {exact.dtype}: {cause.explanation}"
        found = replace(first, cause=cause.cause, explanation=told, ruled_out=cause.ruled_out)
    return replace(proof, comparison=replace(proof.comparison, first=found))
