"""`TrainingSpec`: the model and optimizer that servers build, from a job or for a proof; and `ModelTensors`: which of
the model's tensors each server holds."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Literal

from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Gradients
from meshwright.profile.optimizer import is_elementwise
from meshwright.train.build import build_initialized_model, schedule_unit
from meshwright.train.servers.assignment import ParameterRows, assign_parameters
from meshwright.train.session import MakeOptimizer, MakeSchedule
from meshwright.train.step.optimizer import optimizer_for_parameters, optimizer_groups
from meshwright.train.step.schedule import build_schedule


@dataclass(frozen=True)
class TrainingSpec:
    """The model with its initial weights, and how to train it."""

    model: nn.Module
    make_optimizer: MakeOptimizer
    make_schedule: MakeSchedule | None
    schedule_per: Literal["step", "epoch"]
    clip_norm: float | None
    seed: int


def training_spec_of(job: Job) -> TrainingSpec:
    model = build_initialized_model(job)
    return TrainingSpec(
        model=model,
        make_optimizer=partial(optimizer_for_parameters, job.optimizer, optimizer_groups(job.optimizer, model)),
        make_schedule=partial(build_schedule, job) if job.schedule else None,
        schedule_per=schedule_unit(job),
        clip_norm=job.train.clip_norm,
        seed=job.train.seed,
    )


def worker_plan(plan: Plan) -> Plan:
    """The plan of one worker's session: a single rank without parameter servers."""
    return plan.model_copy(update={"axes": Axes(), "gradients": Gradients()})


@dataclass(frozen=True)
class ModelTensors:
    """The tensors of a model by name, and how servers divide them.

    `trained` parameters are divided among the servers: `rows` lists, for each server, the rows that it holds. `frozen`
    parameters never change, and the first server sends them to each worker once. `buffers` are sent with every reply of
    the first server.
    """

    trained: Mapping[str, nn.Parameter]
    frozen: Mapping[str, nn.Parameter]
    buffers: Mapping[str, Tensor]
    rows: list[list[ParameterRows]]


def model_tensors(model: nn.Module, make_optimizer: MakeOptimizer, servers: int) -> ModelTensors:
    """Sorts the model's tensors into trained, frozen and buffers, and assigns rows to `servers` servers. Raises an
    `InputError` if the model's state dict holds something other than tensors."""
    parameters = dict(model.named_parameters())
    trained = {name: p for name, p in parameters.items() if p.requires_grad}
    state = model.state_dict(keep_vars=True)
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in state}
    objects = [name for name, value in state.items() if not isinstance(value, Tensor)]
    if objects:
        raise InputError(
            f"the model's state dict holds {objects[0]}, which is no tensor, so parameter servers cannot hold it: set"
            " gradients.servers to 0"
        )
    cut = is_elementwise(make_optimizer(trained))
    return ModelTensors(
        trained,
        {name: p for name, p in parameters.items() if not p.requires_grad},
        buffers,
        assign_parameters(trained, servers, cut),
    )
