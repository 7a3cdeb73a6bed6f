"""Details of plans for a small model, one of whose modules has a hostile name."""

from collections import OrderedDict
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.planner.explanation.report import predict_given_plan, report_search
from meshwright.planner.inputs import PlanningInputs
from meshwright.planner.profiles import Profiles
from meshwright.planner.search import search
from meshwright.profile.optimizer import OptimizerCost
from meshwright.report.plans.details import plan_details
from tests.report.made_up_run import HOSTILE

BLOCKS = 6
PIPELINE: dict[str, Any] = {
    "axes": {"replicate": 2, "pipeline": 2},
    "pipeline": {"microbatches": 4, "cuts": [f"{HOSTILE}.2"]},
}
_ADAMW = OptimizerCost(state_ratio=2.0, temporary_ratio=1.0, multi_tensor=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return values + self.down(torch.relu(self.up(values)))


@cache
def small_profiles() -> Profiles:
    blocks = nn.Sequential(*(Block() for _ in range(BLOCKS)))
    model = nn.Sequential(OrderedDict([("first", nn.Linear(16, 32)), (HOSTILE, blocks), ("head", nn.Linear(32, 10))]))
    return Profiles(model, (torch.zeros(4, 16), torch.zeros(4, dtype=torch.long)), F.cross_entropy)


def planning_inputs(cluster: str) -> PlanningInputs:
    return PlanningInputs(find_cluster(cluster), 16, _ADAMW, top=3)


@cache
def details_of_search() -> dict[str, Any]:
    inputs, profiles = planning_inputs("2x2xH100"), small_profiles()
    result = search(inputs, profiles)
    report = report_search(result, inputs, profiles)
    return plan_details(report, result, inputs, profiles, title=HOSTILE, seconds=1.0)


def details_of_plan(cluster: str = "2x2xH100", **groups: Any) -> dict[str, Any]:
    inputs, profiles = planning_inputs(cluster), small_profiles()
    report = predict_given_plan(Plan.model_validate(groups), inputs, profiles)
    return plan_details(report, None, inputs, profiles, title="small", seconds=1.0)
