"""Records the first steps of a run: each step's loss, full gradients and weights, and what every rank observed. `prove`
compares them with the same steps on one device or of another run. All ranks take part, and rank 0 writes the files:

folder/
  step-0000.pt    the weights that the ranks started with
  step-0001.pt    the first step, and so on
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.batch import Batch
from meshwright.files.storage import replacing, writing
from meshwright.messages.exchange import all_gather_values
from meshwright.train.output.observation import (
    RankObservation,
    digest_samples,
    digests,
    drew_random_numbers,
    gather_tied_copies,
    local_gradient_norm,
    record_output_bits,
)
from meshwright.train.output.record_file import RecordedStep, Tensors, read_record
from meshwright.train.session import Session
from meshwright.train.step_runner import StepRunner


class StepRecorder:
    """Records the steps of a session. Call `write_start` first; then, for each step, `note_batch` before it,
    `note_backward` and `note_gradients` when the gradients are complete, and `write_step` after it. `close` removes the
    recorder's hooks from the session's model."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self._folder = folder
        self._output_bits: dict[str, int] = {}
        self._observed: dict[str, Any] = {}  # fields of this step's observation
        self._gradients: Tensors = {}
        self._remove_hooks = record_output_bits(session.module, self._output_bits)
        self._always_seeded = session.generators.always_seeds
        session.generators.always_seeds = True  # `drew_random_numbers` compares with a seeded generator

    def close(self) -> None:
        self._remove_hooks()
        self._session.generators.always_seeds = self._always_seeded

    def write_start(self) -> None:
        """Writes the weights before the first step."""
        self._write(0, state=self._state())

    def note_batch(self, batch: Batch) -> None:
        """Notes the batch of the step that comes next."""
        self._output_bits.clear()
        self._observed = {
            "sample_digests": digest_samples(batch),
            "counted_samples": tuple(microbatch.samples for microbatch in batch.microbatches),
        }

    def note_backward(self) -> None:
        """Notes the seed, and whether the forward and backward passes drew random numbers."""
        self._observed["seed"] = torch.default_generator.initial_seed()
        self._observed["drew_random_numbers"] = drew_random_numbers(self._session.world.device)

    def note_gradients(self) -> None:
        """Notes the full gradients, averaged over ranks and before clipping."""
        session = self._session
        gradients = {name: value for name, value in session.full_gradients().items() if value is not None}
        gradients |= gather_tied_copies(session.parallel, lambda parameter: parameter.grad, gradients)
        self._gradients = gradients
        self._observed["gradient_norm"] = local_gradient_norm(session.module)

    def write_step(self, loss: Tensor) -> None:
        """Writes the step, after the optimizer's update."""
        session = self._session
        norm = session.gradient_norm
        self._observed["clipped_norm"] = local_gradient_norm(session.module)
        self._observed["output_bits"] = dict(self._output_bits)
        self._observed["loss"] = float(loss)
        self._write(
            session.steps,
            state=self._state(),
            gradients=self._gradients,
            loss=loss.detach().cpu(),
            norm=None if norm is None else torch.as_tensor(norm).cpu(),
        )
        self._gradients, self._observed = {}, {}

    def _state(self) -> Tensors:
        """The full weights and buffers, with this rank's copies of tied weights."""
        session = self._session
        full = session.state_dict()
        state = {name: value.detach().cpu() for name, value in full.items() if isinstance(value, Tensor)}
        return state | gather_tied_copies(session.parallel, lambda parameter: parameter, state)

    def _write(self, step: int, *, state: Tensors, gradients: Tensors | None = None, **more: Any) -> None:
        """Collects the observations of all ranks, and writes the file on rank 0."""
        gradients = gradients or {}
        observations = self._gather_observations(self._observe(state, gradients))
        differing = self._gather_differing(observations, state, gradients)
        if self._session.world.rank:
            return
        contents = {
            **more,
            "gradients": gradients,
            "state": state,
            "seen": [observation.to_stored() for observation in observations],
            "gradients_of": {rank: gradients for rank, (gradients, _) in differing.items() if gradients},
            "state_of": {rank: state for rank, (_, state) in differing.items() if state},
        }
        needed = sum(tensor.nbytes for tensor in (*state.values(), *gradients.values()))
        with writing(self._folder, needed):
            self._folder.mkdir(exist_ok=True)
        with replacing(_file(self._folder, step), needed) as draft:
            torch.save(contents, draft)

    def _observe(self, state: Tensors, gradients: Tensors) -> RankObservation:
        """This rank's observation of the step."""
        parallel = self._session.parallel
        names = {id(parameter): name for name, parameter in parallel.parameters().items()}
        groups = self._session.optimizer.param_groups
        optimizer_parameters = tuple(names.get(id(p), "?") for group in groups for p in group["params"])
        axes = () if parallel.mesh is None else parallel.mesh.mesh_dim_names or ()
        return RankObservation(
            rank=self._session.world.rank,
            coordinates={axis: parallel.mesh.get_local_rank(axis) for axis in axes} if parallel.mesh else {},
            data_rank=parallel.position.data_rank,
            device=self._session.world.device.type,
            gradients=digests(gradients),
            state=digests(state),
            split_axes={name: layout.axis for name, layout in parallel.layouts.items()},
            split_dims={name: layout.dim for name, layout in parallel.layouts.items()},
            tied_stages={tie.name: tuple(tie.holders) for tie in parallel.tied},
            optimizer_parameters=optimizer_parameters,
            local_parameters=tuple(parallel.parameters()),
            expert_rows=parallel.expert_loads.take_rows() if parallel.expert_loads else None,
            **self._observed,
        )

    def _gather_observations(self, local: RankObservation) -> list[RankObservation]:
        """The observations of all ranks, on every rank."""
        if self._session.world.size == 1:
            return [local]
        return [RankObservation(**fields) for fields in all_gather_values(asdict(local))]

    def _gather_differing(
        self, observations: list[RankObservation], state: Tensors, gradients: Tensors
    ) -> dict[int, tuple[Tensors, Tensors]]:
        """Returns, on rank 0 and by rank, the gradients and the state tensors of each other rank that differ from those
        of rank 0. Returns an empty dict on other ranks, and if no rank differs."""
        first = observations[0]
        if all(other.state == first.state and other.gradients == first.gradients for other in observations):
            return {}
        local = observations[self._session.world.rank]
        differing = (
            {name: value for name, value in gradients.items() if local.gradients[name] != first.gradients.get(name)},
            {name: value for name, value in state.items() if local.state[name] != first.state.get(name)},
        )
        return _gather_on_first_rank(differing, local.rank)


def _gather_on_first_rank(local: tuple[Tensors, Tensors], rank: int) -> dict[int, tuple[Tensors, Tensors]]:
    """Returns, on rank 0, the tensors of each other rank by rank. Returns an empty dict on other ranks."""
    shapes = all_gather_values([{name: (value.shape, value.dtype) for name, value in part.items()} for part in local])
    if rank:
        for value in (value for part in local for value in part.values()):
            dist.send(value.contiguous(), dst=0)
        return {}
    return {
        sender: (_receive_tensors(gradients, sender), _receive_tensors(state, sender))
        for sender, (gradients, state) in enumerate(shapes)
        if sender
    }


def _receive_tensors(shapes: Mapping[str, tuple[torch.Size, torch.dtype]], sender: int) -> Tensors:
    tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    for tensor in tensors.values():
        dist.recv(tensor, src=sender)
    return tensors


@contextmanager
def record_steps(session: StepRunner, folder: Path, steps: int) -> Iterator[Callable[[Batch], Tensor]]:
    """Yields a function to call in place of `session.step`. It also records the steps up to number `steps`."""
    if not steps:
        yield session.step
        return
    assert isinstance(session, Session), "run.py refuses --record with parameter servers"
    recorder = StepRecorder(session, folder)

    def note_gradients() -> None:
        recorder.note_backward()
        recorder.note_gradients()

    def step(batch: Batch) -> Tensor:
        if session.steps >= steps:
            return session.step(batch)
        recorder.note_batch(batch)
        session.on_gradients = note_gradients
        loss = session.step(batch)
        recorder.write_step(loss)
        if session.steps == steps:
            recorder.close()
        session.on_gradients = None
        return loss

    try:
        recorder.write_start()
        yield step
    finally:
        recorder.close()


def read_start(folder: Path) -> RecordedStep:
    """Reads the weights before the first step. `gradients` is empty and `loss` is 0."""
    return read_record(_file(folder, 0))


def read_step(folder: Path, step: int, *, keep: bool = False) -> RecordedStep:
    """Reads a recorded step, and deletes its file unless `keep`."""
    file = _file(folder, step)
    recorded = read_record(file)
    if not keep:
        file.unlink()
    return recorded


def count_recorded_steps(folder: Path) -> int:
    """Number of recorded steps, counted from the first one without a gap."""
    step = 0
    while _file(folder, step + 1).exists():
        step += 1
    return step


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:04d}.pt"
