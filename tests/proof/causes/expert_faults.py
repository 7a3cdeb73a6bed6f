"""Faults of ranks that divide experts among them."""

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.parallel.expert.divide import divided_layers, divided_parameters
from meshwright.parallel.weights.layout import local_tensor
from meshwright.train.session import Session
from tests.proof.injected_fault import InjectedFault


@dataclass(frozen=True)
class RowsOnTheWay(InjectedFault):
    """On rank 0, the experts of the first mixture do not get the last row that was sent to them, or get it twice."""

    what: str

    def before(self, session: Session) -> None:
        layers = divided_layers(session.parallel.module)
        if session.world.rank or not layers:
            return
        experts: Any = vars(layers[0])["forward"]
        compute = experts._compute

        def compute_other_rows(rows: Tensor, numbers: Tensor, weights: Tensor) -> Tensor:
            if self.what == "lost":
                computed = compute(rows[:-1], numbers[:-1], weights[:-1])
                return torch.cat([computed, computed.new_zeros(1, computed.shape[1])])
            double = [torch.cat([value, value[-1:]]) for value in (rows, numbers, weights)]
            computed = compute(*double)
            return torch.cat([computed[:-2], computed[-2:].sum(0, keepdim=True)])

        experts._compute = compute_other_rows


@dataclass(frozen=True)
class ExpertsAveragedOverAll(InjectedFault):
    """The gradients of experts are averaged over the ranks of the expert axis, which hold different experts."""

    def on_gradients(self, session: Session, step: int) -> None:
        mesh = session.parallel.mesh
        assert mesh is not None
        for gradient in expert_gradients(session):
            dist.all_reduce(gradient, group=mesh.get_group("expert"))
            gradient.div_(session.parallel.plan.axes.expert)


@dataclass(frozen=True)
class CopiesOfExpertsAlone(InjectedFault):
    """Copies of an expert have different gradients, whose mean is right."""

    def on_gradients(self, session: Session, step: int) -> None:
        mesh = session.parallel.mesh
        assert mesh is not None
        for gradient in expert_gradients(session):
            gradient.mul_(1.5 if mesh.get_local_rank("replicate") else 0.5)


def expert_gradients(session: Session) -> list[Tensor]:
    """This rank's gradients of experts that are divided over ranks."""
    gradients = [parameter.grad for parameter in divided_parameters(session.parallel.module)]
    return [local_tensor(gradient) for gradient in gradients if gradient is not None]
