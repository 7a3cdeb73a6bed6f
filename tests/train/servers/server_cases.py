"""The plans and the trainings with which the tests of parameter servers run."""

from typing import Any

import torch
from torch import nn

from meshwright.plan import Plan
from meshwright.train.servers.training_spec import TrainingSpec
from tests.train.runs.test_equal_to_one_process import BATCH, CASES, Points, Tied, make
from tests.train.servers.in_threads import Case

STEPS = 10  # two epochs of Points


def server_plan(workers: int, servers: int, **fields: Any) -> Plan:
    gradients = {"servers": servers, **fields.pop("gradients", {})}
    return Plan.model_validate({"axes": {"replicate": workers}, "gradients": gradients, **fields})


def server_case(name: str, plan: Plan, **options: Any) -> Case:
    """Returns the run that trains one of the cases with AdamW, and with these fields of `Case`."""
    case = CASES[name]

    def make_model_and_optimizer() -> tuple[nn.Module, Any]:
        model, _ = make(case)
        # As one group: a server may have nothing of it, where there are more servers than rows.
        return model, lambda parameters: torch.optim.AdamW(
            [{"params": list(parameters.values())}], lr=0.01, weight_decay=0.1
        )

    return Case(make_model_and_optimizer, Points(case[1]), case[2], BATCH, plan, options.pop("steps", STEPS), **options)


class Fp32Points(Points):
    """The points in fp32, for models that do not train in fp64."""

    def __init__(self) -> None:
        super().__init__("tuple")
        self.x = self.x.float()


def tied_spec() -> TrainingSpec:
    """Returns the training of a model with a tied weight, a frozen weight, and a buffer."""
    torch.manual_seed(0)
    model = Tied()
    model.register_buffer("seen", torch.zeros(3))
    model.encode.weight.requires_grad_(False)

    def optimizer(parameters: Any) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for p in parameters.values() if p.requires_grad], lr=0.01)

    return TrainingSpec(model, optimizer, None, "step", None, 7)
