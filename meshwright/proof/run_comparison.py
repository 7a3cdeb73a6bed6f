"""Compares two recorded runs, `meshwright prove --against A B`: run A is taken as right, and B is compared with it.

Each run used its own precision, so rounding may change more than in a proof. The tolerance is that of equations (1) to
(4) of `compare/tolerance.py`. If products or gradients of a run were rounded to a type shorter than fp32, a term is
added for one independent rounding per layer and direction, each by eps of that type:

        + λ · √(2 · depth) · eps                                                              → `RunTolerance`
"""

import math
import os
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from meshwright.data.mapped import make_partition
from meshwright.dtypes import ROUNDING_DTYPES
from meshwright.errors import InputError
from meshwright.job import Job, load_plan
from meshwright.plan import Plan
from meshwright.proof.causes.diagnose import diagnose
from meshwright.proof.causes.evidence import Evidence, ExpectedStep
from meshwright.proof.compare.errors import SMALLEST_SCALE, layer_scales, weight_drift
from meshwright.proof.compare.step_comparator import StepComparator, clip_factor, global_norm
from meshwright.proof.compare.tolerance import LAMBDA, PerturbedTraining, SumTolerance, count_reductions
from meshwright.proof.proof import Proof
from meshwright.proof.reference.experiments import Experiments
from meshwright.proof.reference.groups import choose_grouping
from meshwright.proof.reference.reference import PlainTraining, Reference, preserve_generators
from meshwright.proof.reference.reference_setup import build_setup
from meshwright.proof.request import ProofRequest
from meshwright.train.output.folder import RunFolder, job_differences
from meshwright.train.output.origin import open_run, read_run_file
from meshwright.train.output.record_file import RecordedStep
from meshwright.train.output.recording import count_recorded_steps, read_start, read_step

_CPU = torch.device("cpu")


@dataclass(frozen=True)
class RecordedRun:
    """A run whose first `steps` steps were recorded."""

    folder: RunFolder
    job: Job
    plan: Plan
    steps: int

    @property
    def record(self) -> Path:
        return self.folder.record

    @property
    def rounding_dtypes(self) -> list[torch.dtype]:
        """The types shorter than fp32 that products or gradients were rounded to; empty if there are none."""
        precisions = (self.plan.numerics.precision, self.plan.gradients.precision)
        return [ROUNDING_DTYPES[precision] for precision in precisions if precision in ROUNDING_DTYPES]


@dataclass(frozen=True)
class RunTolerance:
    """The tolerance of fp32 sums, plus that of roundings to `rounding_dtype`, the shortest type of both runs.
    `rounding_dtype` is None if both runs were in fp32."""

    sums: SumTolerance
    rounding_dtype: torch.dtype | None

    def with_drift(self, drift: float) -> float:
        """The tolerance of a step that starts from weights with this relative difference."""
        return self.sums.with_drift(drift) + self._rounding

    @property
    def _rounding(self) -> float:
        if self.rounding_dtype is None:
            return 0.0
        return LAMBDA * math.sqrt(2 * self.sums.depth) * torch.finfo(self.rounding_dtype).eps

    def __str__(self) -> str:
        if self.rounding_dtype is None:
            return str(self.sums)
        eps = torch.finfo(self.rounding_dtype).eps
        return f"{self.sums} + {LAMBDA:g} × √(2 × {self.sums.depth} layers) × {eps:.2g}"


def compare_runs(reference_path: Path, compared_path: Path, job: Job | None = None, trust: bool = False) -> Proof:
    """Compares the recorded steps of the run in `compared_path` with those of the run in `reference_path`. If they
    differ, the proof says where and why.

    `job` is the job of both runs. If it is None, the runs' own job.yaml files are used; as the comparison executes what
    they import, this user must have written both runs, or `trust` them. Of the runs, only data is read otherwise."""
    reference, compared = (_read_run(path, job, trust) for path in (reference_path, compared_path))
    _check_same_job(reference, compared)
    with preserve_generators(_CPU):
        return _RunComparison(reference, compared).run()


class _RunComparison:
    """Compares two recorded runs, up to the first step that differs. An optimizer takes the reference run's steps again
    with the recorded gradients, and a second optimizer takes them with gradients that are changed as much as rounding
    may change them. The distance between the weights of both optimizers determines how far the compared run's weights
    may differ."""

    def __init__(self, reference: RecordedRun, compared: RecordedRun) -> None:
        self.reference, self.compared = reference, compared
        # Dropout stays on, because runs train with it. Experiments divide a batch as the compared run did.
        steps = min(reference.steps, compared.steps)
        self.request = ProofRequest(reference.job, compared.plan, steps, "fp32", dropout=True)
        self.replayed = PlainTraining(build_setup(self.request), _CPU)
        self.perturbed = PerturbedTraining(build_setup(self.request), _CPU)
        self.setup = self.replayed.setup
        rounding_dtypes = [*reference.rounding_dtypes, *compared.rounding_dtypes]
        self.tolerance = RunTolerance(self._measure_sums(), _shortest(rounding_dtypes))
        self.comparator = StepComparator(self.replayed.model)
        self.drift = 0.0

    def run(self) -> Proof:
        before, start = read_start(self.reference.record), read_start(self.compared.record)
        self._check_shapes(before)
        self.comparator.raise_tolerance(self.tolerance.with_drift(0.0))
        self.comparator.compare_states(0, start, before.state, {})
        for training in (self.replayed, self.perturbed):
            training.model.load_state_dict(before.state, strict=False)
        evidence = None
        for step in range(1, self.request.steps + 1):
            evidence, before = self._step(step, before)
            if evidence:
                break
        comparison = self.comparator.comparison
        if evidence:
            comparison = replace(comparison, first_difference=diagnose(evidence))
        first = comparison.first_difference
        return Proof(
            plan=self.compared.plan,
            ranks=self.compared.plan.world_size,
            device=start.observations[0].device,
            steps=self.request.steps,
            dtype=self.compared.plan.numerics.precision,
            comparison=comparison,
            tolerance_is=str(self.tolerance),
            notes=_notes(self.reference, self.compared, self.request.steps, first.step if first else None),
            against=str(self.reference.folder.path),
            values=tuple(self.comparator.values),
        )

    def _check_shapes(self, start: RecordedStep) -> None:
        """Raises InputError if the reference run's record is not one of the job's model. The shapes in the other record
        have been compared with it."""
        for name, value in self.replayed.model.state_dict().items():
            if not isinstance(value, Tensor) or (name not in start.state and name not in self.comparator.parameters):
                continue
            recorded_shape = tuple(start.state[name].shape) if name in start.state else None
            if recorded_shape != tuple(value.shape):
                raise InputError(
                    f"--against {self.reference.folder.path}: its record has {name} of shape {recorded_shape}, but the"
                    f" job's model has {tuple(value.shape)}: record it again"
                )

    def _step(self, step: int, before: RecordedStep) -> tuple[Evidence | None, RecordedStep]:
        """Compares one step, which the reference run started from `before`. Returns the evidence if the step differs,
        otherwise None; and the reference run's recorded step."""
        expected = read_step(self.reference.record, step, keep=True)
        recorded = read_step(self.compared.record, step, keep=True)
        comparator = self.comparator
        tolerance = self.tolerance.with_drift(self.drift)
        comparator.raise_tolerance(tolerance)
        comparator.compare_loss(step, recorded, expected.loss)
        scales = layer_scales(expected.gradients, SMALLEST_SCALE)
        comparator.compare_gradients(step, recorded, expected.gradients, scales)
        norm = global_norm(expected.gradients.values()) if expected.norm is None else expected.norm
        comparator.compare_norm(step, recorded, norm)
        perturbations = {name: tolerance * scale for name, scale in scales.items()}
        weight_bounds = self._replay_update(step, expected, norm, perturbations)
        comparator.compare_states(step, recorded, expected.state, weight_bounds)
        if comparator.comparison.first_difference:
            return self._collect_evidence(step, before, expected, recorded, norm), expected
        weights = {name: value for name, value in expected.state.items() if name in comparator.weights}
        self.drift = weight_drift(recorded.state, weights)
        return None, expected

    def _replay_update(
        self, step: int, expected: RecordedStep, norm: Tensor, perturbations: dict[str, float]
    ) -> dict[str, Tensor]:
        """Takes the reference run's optimizer step again, with and without perturbations. Returns, by name, how far
        each element of the weights may differ afterwards; an empty dict for a step that fp16 skipped."""
        if not expected.gradients:
            return {}
        factor = clip_factor(norm, self.setup.clip_norm)
        for name, parameter in self.replayed.model.named_parameters():
            gradient = expected.gradients.get(name)
            parameter.grad = None if gradient is None else gradient.to(parameter) * factor
        clipped_perturbations = {name: factor * size for name, size in perturbations.items()}
        self.perturbed.take_perturbed_gradients(self.replayed.model, clipped_perturbations)
        last_of_epoch = self._is_last_of_epoch(step)
        self.replayed.update(last_of_epoch)
        self.perturbed.update(last_of_epoch)
        return self.perturbed.weight_bounds(self.replayed.model)

    def _collect_evidence(
        self, step: int, before: RecordedStep, expected: RecordedStep, recorded: RecordedStep, norm: Tensor
    ) -> Evidence | None:
        comparison = self.comparator.comparison
        assert comparison.first_difference is not None
        return Evidence(
            plan=self.compared.plan,
            difference=comparison.first_difference,
            step=step,
            tolerance=comparison.tolerance,
            clip_norm=self.setup.clip_norm,
            recorded=recorded,
            expected=ExpectedStep(expected.loss, norm, expected.gradients, before.state, expected.state),
            experiments=Experiments(self.request, _CPU, step, before.state),
            dtype=self.tolerance.rounding_dtype or self.setup.dtype,
            reference_plan=self.reference.plan,
            reference_observations=expected.observations,
        )

    def _is_last_of_epoch(self, step: int) -> bool:
        setup, ranks = self.setup, self.request.plan.data_ranks
        if not hasattr(setup.data, "__len__"):
            return False
        samples = len(setup.data)
        partition = make_partition(samples, setup.global_batch, ranks, setup.loading, drop_last=setup.drop_last)
        return step % partition.batches == 0

    def _measure_sums(self) -> SumTolerance:
        """Returns the tolerance of fp32 sums. The terms of sums are counted while one device computes the first
        batch."""
        setup = build_setup(self.request)
        grouping = choose_grouping(setup.model.train(), self.request.plan, self.request.dropout, setup.compares_samples)
        reference = Reference(setup, self.request, grouping, _CPU)
        batch = reference.next_batch()
        with count_reductions(reference.model) as counter:
            reference.compute(batch)
        return counter.tolerance(len(batch.groups), setup.dtype)


def _read_run(path: Path, job: Job | None, trust: bool) -> RecordedRun:
    """Returns the recorded run of a folder. `job` and `trust` are those of `compare_runs`."""
    folder = RunFolder(path)
    for file in (folder.job, folder.plan):
        if not os.path.exists(file):
            raise InputError(f"--against {path}: this is no run folder, it has no {file.name}")
    steps = count_recorded_steps(folder.record)
    if not steps:
        raise InputError(f"--against {path}: no steps of this run were recorded, train it with --record 3")
    if job is None:
        job, plan = open_run(path, trust)
        return RecordedRun(folder, job, plan, steps)
    changes = job_differences(job, folder)
    if changes:
        raise InputError(f"--against {path}: this run trains something else than the JOB: {changes[0]}")
    return RecordedRun(folder, job, load_plan(folder.plan, text=read_run_file(folder.plan)), steps)


def _check_same_job(reference: RecordedRun, compared: RecordedRun) -> None:
    """Raises InputError if the two runs differ in anything but their plans, or in the shapes of their models'
    tensors, or if a record has not the observations of all ranks."""
    paths = reference.folder.path, compared.folder.path
    changes = job_differences(compared.job, reference.folder)
    if changes:
        raise InputError(
            f"--against {paths[0]} {paths[1]}: the second trains something else: {changes[0]} (there: the first, here:"
            " the second)"
        )
    starts = [read_start(run.record) for run in (reference, compared)]
    for run, start in zip((reference, compared), starts, strict=True):
        if len(start.observations) != run.plan.world_size:
            raise InputError(
                f"--against {run.folder.path}: its record has the observations of {len(start.observations)} ranks, but"
                f" its plan.yaml is for {run.plan.world_size}: record it again"
            )
    states = [start.state for start in starts]
    for name in (*states[0], *states[1]):
        shapes = [tuple(state[name].shape) if name in state else None for state in states]
        if shapes[0] != shapes[1]:
            raise InputError(f"the models differ: {name} is {shapes[0]} in {paths[0]} and {shapes[1]} in {paths[1]}")


def _shortest(dtypes: list[torch.dtype]) -> torch.dtype | None:
    """Returns the type with the largest eps; None if the list is empty."""
    return max(dtypes, key=lambda dtype: torch.finfo(dtype).eps, default=None)


def _notes(reference: RecordedRun, compared: RecordedRun, steps: int, difference_step: int | None) -> tuple[str, ...]:
    notes = [
        f"{reference.folder.path} ran {reference.plan.summary()}, {compared.folder.path} {compared.plan.summary()}"
    ]
    if reference.steps != compared.steps:
        notes.append(f"{reference.steps} and {compared.steps} steps were recorded: the first {steps} are compared")
    if difference_step is not None and difference_step < steps:
        notes.append(f"nothing was compared after step {difference_step}, where the first difference is")
    return tuple(notes)
