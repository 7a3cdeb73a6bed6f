"""A rank's part: trains the steps under the plan and writes down what the reference is to be compared with."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.launch.place import Place
from meshwright.launch.world import World
from meshwright.plan import Plan
from meshwright.proof.question import Question
from meshwright.proof.setting import Setting, computing_in, in_dtype, set_up
from meshwright.train.session import Session


@dataclass(frozen=True)
class Recorded:
    """One step under the plan, whole and on the CPU. `norm` is null where the session had no reason to compute it."""

    loss: Tensor
    norm: Tensor | None
    gradients: dict[str, Tensor]
    state: dict[str, Tensor]


def record(question: Question, world: World, folder: Path, place: Place | None = None) -> None:
    """All ranks of the world call it; the first one writes a file for each step, and one of the start."""
    setting = set_up(question)
    place = place or Place.nowhere()
    session = make_session(setting, question, world, place)
    gradients: dict[str, Tensor] = {}

    def look() -> None:
        if question.plant:
            question.plant.spoil(session.module, world.rank, session.steps + 1)
        found = session.full_gradients()
        gradients.update({name: value for name, value in found.items() if value is not None})

    session.on_gradients = look
    first = world.rank == 0
    state = session.state_dict()
    if first:
        torch.save(_owned(state), _file(folder, 0))
    batches = session.batches(setting.data, None, setting.global_batch, setting.loading, setting.drop_last)
    with computing_in(setting.dtype):
        for step in range(1, question.steps + 1):
            gradients.clear()
            place.at(step, "data")
            loss = session.step(in_dtype(next(batches), setting.dtype))
            place.finish_step()
            state = session.state_dict()
            if first:
                norm = session.gradient_norm
                torch.save(
                    {
                        "loss": loss.detach().cpu(),
                        "norm": None if norm is None else torch.as_tensor(norm).cpu(),
                        "gradients": dict(gradients),
                        "state": _owned(state),
                    },
                    _file(folder, step),
                )
    if world.size > 1:
        dist.barrier()  # nobody leaves while another still gathers


def make_session(setting: Setting, question: Question, world: World, place: Place) -> Session:
    return Session(
        setting.model,
        setting.make_optimizer,
        loss=setting.loss,
        plan=_in_full_precision(question.plan),
        world=world,
        make_schedule=setting.make_schedule,
        schedule_per=setting.schedule_per,
        clip_norm=setting.clip_norm,
        seed=setting.seed,
        target=setting.target,
        frozen=setting.frozen,
        report=lambda doing: place.at(place.step, doing),
        sample=setting.sample(),
    )


def _in_full_precision(plan: Plan) -> Plan:
    """The model runs in the types it has, which are those of the comparison."""
    return plan.model_copy(update={"numerics": plan.numerics.model_copy(update={"precision": "fp32"})})


def read_start(folder: Path) -> dict[str, Tensor]:
    loaded: dict[str, Tensor] = torch.load(_file(folder, 0), weights_only=True)
    return loaded


def read(folder: Path, step: int) -> Recorded:
    """Reads a step, and frees its place on the disk."""
    file = _file(folder, step)
    loaded = torch.load(file, weights_only=True)
    file.unlink()
    return Recorded(loaded["loss"], loaded["norm"], loaded["gradients"], loaded["state"])


def _owned(state: dict[str, Tensor]) -> dict[str, Tensor]:
    """On the CPU, without what a state dict may hold besides tensors."""
    return {name: value.detach().cpu() for name, value in state.items() if isinstance(value, Tensor)}


def _file(folder: Path, step: int) -> Path:
    return folder / f"step-{step:04d}.pt"
