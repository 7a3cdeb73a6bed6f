"""Which precisions and devices a search considers."""

import pytest

from meshwright.cluster.detect import find_cluster
from meshwright.plan_fields.effects import Numerics
from meshwright.planner.inputs import PlanningInputs
from tests.planner.cases import MOMENTUM


@pytest.mark.parametrize(("allow", "precision"), [("same", "fp32"), ("rounding", "fp32"), ("changes", "bf16")])
def test_another_precision_is_tried_only_if_plans_may_change_the_arithmetic(allow: Numerics, precision: str) -> None:
    assert PlanningInputs(find_cluster("2xH100"), 8, MOMENTUM, allow=allow).precisions_to_try() == (precision,)
