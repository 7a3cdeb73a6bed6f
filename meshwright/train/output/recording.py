"""The first steps of a run written down: each step's loss, whole gradients and weights, and what every rank saw of it.
`prove` holds them against one device or against another run's. All ranks take part; the first one writes.

folder/
  step-0000.pt    the weights that the ranks started with
  step-0001.pt    a step, and so on
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.data.batch import Batch
from meshwright.train.output.witness import Witness, digests, drew, local_norm, own_copies, samples_of, watch_bits
from meshwright.train.session import Session
from meshwright.train.stepping import Stepping

Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class Recorded:
    """One step under a plan, whole and on the CPU, as the first rank had it; `norm` is null where nothing clips. Of the
    other ranks only those tensors are kept that are not the first one's to the last bit."""

    loss: Tensor
    norm: Tensor | None
    gradients: Tensors
    state: Tensors
    seen: tuple[Witness, ...]
    gradients_of: Mapping[int, Tensors]
    state_of: Mapping[int, Tensors]


class Recorder:
    """Looks on while a session trains: `begin`, then for each step `batch`, `look` when its gradients are whole, and
    `finish`. It leaves nothing in the session when it is closed."""

    def __init__(self, session: Session, folder: Path) -> None:
        self._session = session
        self._folder = folder
        self._bits: dict[str, int] = {}
        self._seen: dict[str, Any] = {}
        self._gradients: Tensors = {}
        self._end = watch_bits(session.module, self._bits)

    def close(self) -> None:
        self._end()

    def begin(self) -> None:
        state = self._state()
        self._write(0, state=state)

    def batch(self, batch: Batch) -> None:
        """The step that comes next is computed on this."""
        self._bits.clear()
        self._seen = {"samples": samples_of(batch), "counted": tuple(part.samples for part in batch.parts)}

    def computed(self) -> None:
        """Behind the backward pass, before anybody has touched the gradients."""
        self._seen["seed"] = torch.default_generator.initial_seed()
        self._seen["drew"] = drew(self._session.world.device)

    def look(self) -> None:
        """At the gradients as they are combined."""
        session = self._session
        found = {name: value for name, value in session.full_gradients().items() if value is not None}
        found |= own_copies(session.parallel, lambda parameter: parameter.grad, found)
        self._gradients = found
        self._seen["norm"] = local_norm(session.module)

    def finish(self, loss: Tensor) -> None:
        """Behind the optimizer's step."""
        session = self._session
        norm = session.gradient_norm
        self._seen["clipped"] = local_norm(session.module)
        self._seen["bits"] = dict(self._bits)
        self._seen["loss"] = float(loss)
        self._write(
            session.steps,
            state=self._state(),
            gradients=self._gradients,
            loss=loss.detach().cpu(),
            norm=None if norm is None else torch.as_tensor(norm).cpu(),
        )
        self._gradients, self._seen = {}, {}

    def _state(self) -> Tensors:
        session = self._session
        whole = session.state_dict()
        state = {name: value.detach().cpu() for name, value in whole.items() if isinstance(value, Tensor)}
        return state | own_copies(session.parallel, lambda parameter: parameter, state)

    def _write(self, step: int, *, state: Tensors, gradients: Tensors | None = None, **more: Any) -> None:
        gradients = gradients or {}
        seen = self._everybodys(self._witness(state, gradients))
        differing = self._from_others(seen, state, gradients)
        if self._session.world.rank:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        told = {
            **more,
            "gradients": gradients,
            "state": state,
            "seen": [asdict(witness) for witness in seen],
            "gradients_of": {rank: found[0] for rank, found in differing.items() if found[0]},
            "state_of": {rank: found[1] for rank, found in differing.items() if found[1]},
        }
        aside = self._folder / ".step.new"
        torch.save(told, aside)
        aside.replace(_file(self._folder, step))

    def _witness(self, state: Tensors, gradients: Tensors) -> Witness:
        parallel = self._session.parallel
        names = {id(parameter): name for name, parameter in parallel.parameters().items()}
        held = [names.get(id(p), "?") for group in self._session.optimizer.param_groups for p in group["params"]]
        axes = () if parallel.mesh is None else parallel.mesh.mesh_dim_names or ()
        return Witness(
            rank=self._session.world.rank,
            place={axis: parallel.mesh.get_local_rank(axis) for axis in axes} if parallel.mesh else {},
            data_rank=parallel.place.data_rank,
            device=self._session.world.device.type,
            gradients=digests(gradients),
            state=digests(state),
            divided={name: layout.axis for name, layout in parallel.layouts.items()},
            dims={name: layout.dim for name, layout in parallel.layouts.items()},
            tied={tie.name: tuple(tie.holders) for tie in parallel.tied},
            held=tuple(held),
            holds=tuple(parallel.parameters()),
            **self._seen,
        )

    def _everybodys(self, mine: Witness) -> list[Witness]:
        if self._session.world.size == 1:
            return [mine]
        seen: list[Any] = [None] * self._session.world.size
        dist.all_gather_object(seen, mine)
        return seen

    def _from_others(
        self, seen: list[Witness], state: Tensors, gradients: Tensors
    ) -> dict[int, tuple[Tensors, Tensors]]:
        """What other ranks have otherwise than the first, where anybody does."""
        first = seen[0]
        if all(each.state == first.state and each.gradients == first.gradients for each in seen):
            return {}
        mine = seen[self._session.world.rank]
        sent = (
            {name: value for name, value in gradients.items() if mine.gradients[name] != first.gradients.get(name)},
            {name: value for name, value in state.items() if mine.state[name] != first.state.get(name)},
        )
        found: list[Any] | None = [None] * len(seen) if mine.rank == 0 else None
        dist.gather_object(sent, found, dst=0)
        return {rank: given for rank, given in enumerate(found or []) if rank}


@contextmanager
def recording(session: Stepping, folder: Path, steps: int) -> Iterator[Callable[[Batch], Tensor]]:
    """A session's `step`, which writes down what it does the first so many times."""
    if not steps:
        yield session.step
        return
    assert isinstance(session, Session), "servers are recorded by their proof"
    recorder = Recorder(session, folder)

    def look() -> None:
        recorder.computed()
        recorder.look()

    def step(batch: Batch) -> Tensor:
        if session.steps >= steps:
            return session.step(batch)
        recorder.batch(batch)
        session.on_gradients = look
        loss = session.step(batch)
        recorder.finish(loss)
        if session.steps == steps:
            recorder.close()
        session.on_gradients = None
        return loss

    try:
        recorder.begin()
        yield step
    finally:
        recorder.close()


def read_start(folder: Path) -> Recorded:
    """What the ranks had before the first step: no loss and no gradients."""
    return _read(_file(folder, 0))


def read(folder: Path, step: int, *, keep: bool = False) -> Recorded:
    """Reads a step; unless it shall be kept, its place on the disk is free then."""
    file = _file(folder, step)
    found = _read(file)
    if not keep:
        file.unlink()
    return found


def recorded_steps(folder: Path) -> int:
    """How many steps there are, from the first on."""
    step = 0
    while _file(folder, step + 1).exists():
        step += 1
    return step


def _read(file: Path) -> Recorded:
    loaded = torch.load(file, weights_only=True)
    return Recorded(
        loss=loaded.get("loss", torch.zeros(())),
        norm=loaded.get("norm"),
        gradients=loaded["gradients"],
        state=loaded["state"],
        seen=tuple(Witness(**witness) for witness in loaded["seen"]),
        gradients_of=loaded["gradients_of"],
        state_of=loaded["state_of"],
    )


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:04d}.pt"
