"""`Recipe`: what servers and workers both make for themselves, from a job or for a proof."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn

from meshwright.call import build
from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.plan import Axes, Gradients, Plan
from meshwright.train.build import build_model, schedule_unit
from meshwright.train.servers.assignment import Piece, divide, works_by_number
from meshwright.train.session import MakeOptimizer, MakeSchedule
from meshwright.train.step.optimizer import optimizer_groups, optimizer_on


@dataclass(frozen=True)
class Recipe:
    model: nn.Module
    make_optimizer: MakeOptimizer
    make_schedule: MakeSchedule | None
    schedule_per: Literal["step", "epoch"]
    clip_norm: float | None
    seed: int


def of_job(job: Job) -> Recipe:
    model = build_model(job)
    return Recipe(
        model=model,
        make_optimizer=partial(optimizer_on, job.optimizer, optimizer_groups(job.optimizer, model)),
        make_schedule=partial(build, job.schedule, role="schedule") if job.schedule else None,
        schedule_per=schedule_unit(job),
        clip_norm=job.train.clip_norm,
        seed=job.train.seed,
    )


def workers_plan(plan: Plan) -> Plan:
    """What one worker runs by itself."""
    return plan.model_copy(update={"axes": Axes(), "gradients": Gradients()})


@dataclass(frozen=True)
class Parts:
    """A model's tensors by what becomes of them: servers hold the `trained` ones in `pieces`; `fixed` ones (frozen, and
    the same everywhere) are handed to a worker once, and `buffers` with every reply."""

    trained: Mapping[str, nn.Parameter]
    fixed: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    pieces: list[list[Piece]]


def parts_of(model: nn.Module, make_optimizer: MakeOptimizer, servers: int) -> Parts:
    named = dict(model.named_parameters())
    trained = {name: p for name, p in named.items() if p.requires_grad}
    kept = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in kept}
    other = [name for name, value in kept.items() if not isinstance(value, Tensor)]
    if other:
        raise InputError(
            f"the model keeps {other[0]}, which is no tensor and which parameter servers cannot hold: leave out"
            " gradients.servers"
        )
    cut = works_by_number(make_optimizer(trained))
    return Parts(
        trained,
        {name: p for name, p in named.items() if not p.requires_grad},
        buffers,
        divide(trained, servers, cut),
    )
