"""Products of linear layers in 8 bits: faster products, casts of their operands, and nothing else."""

import pytest
import torch
from torch import nn

from meshwright.cluster.names import cluster_from_name
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.float8 import Float8Casts, float8_profile, linear_layers
from meshwright.simulator.compute.operator_time import device_speeds, operator_s
from meshwright.simulator.predict import predict_plan

SGD = OptimizerCost(1.0, 0.0, multi_tensor=True)
BATCH = 8192


def profile_of(width: int, precision: str) -> ModelProfile:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Linear(width, 7))
        batch = torch.zeros(2, width), torch.zeros(2, dtype=torch.long)
    return trace_profile(model, batch, nn.functional.cross_entropy, precision=precision)


def test_linear_layers_of_fitting_sizes_are_converted() -> None:
    profile = profile_of(64, "bf16")
    assert linear_layers(profile) == {"0", "2"}  # seven classes are no multiple of 16
    converted = float8_profile(profile, linear_layers(profile))
    operators = [operator for segment in converted.segments for operator in segment.operators]
    assert {o.layer for o in operators if o.dtype == "float8_e4m3fn"} == {"0", "2"}
    assert all(o.kind == "matmul" for o in operators if o.dtype == "float8_e4m3fn")
    # forward: inputs and weights; backward: gradients and weights (not of the first layer's input), and inputs again
    assert sum(o.name == "float8_cast" for o in operators) == 2 * 2 + 2 + 2
    without = float8_profile(profile, linear_layers(profile), Float8Casts(0.0, 4.0, weights=False, again=False))
    casts = [o for segment in without.segments for o in segment.operators if o.name.startswith("float8")]
    assert len(casts) == 2 + 1


def test_a_product_in_8_bits_takes_as_long_as_one_in_16_at_twice_the_rate() -> None:
    profile = profile_of(4096, "bf16")
    converted = float8_profile(profile, linear_layers(profile))
    h100 = device_speeds(cluster_from_name("H100").nodes[0].device, "bf16")
    half, eight = (
        sum(operator_s(o, BATCH, h100, False) for o in p.segments[0].operators if o.kind == "matmul" and o.layer == "0")
        for p in (profile, converted)
    )
    assert half / eight == pytest.approx(2, rel=0.1)
    a100 = device_speeds(cluster_from_name("A100").nodes[0].device, "bf16")  # has no fp8: bf16 products
    products = [o for o in converted.segments[0].operators if o.dtype == "float8_e4m3fn"]
    assert all(operator_s(o, BATCH, a100, False) > 0 for o in products)


def test_fp8_is_predicted_faster_for_wide_layers_and_slower_for_narrow_ones() -> None:
    """Casts cost as much for narrow layers as for wide ones, whose products are longer."""
    cluster = cluster_from_name("8xH100")

    def step_s(width: int, precision: str) -> float:
        plan = Plan.model_validate({"axes": {"replicate": 8}, "numerics": {"precision": precision}})
        profile = profile_of(width, precision)
        return predict_plan(cluster, profile, plan, 8 * BATCH, SGD).step_s

    assert step_s(8192, "fp8") < 0.85 * step_s(8192, "bf16")
    assert step_s(256, "fp8") > step_s(256, "bf16")
