"""Predictions of compiled models: chains of elementwise operators become one kernel, products stay, and values that
only fused kernels use are not in memory. CUDA graphs remove launches, a fused optimizer goes over its tensors once."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.profile.optimizer import OptimizerCost, measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.compiled_profile import FUSED, compiled_profile
from meshwright.simulator.compute.host_work import GAP_S, host_launches
from meshwright.simulator.pipeline.stages import stage_profiles
from meshwright.simulator.predict import Prediction, predict_plan

WIDTH, BATCH = 1024, 8192
H100 = find_cluster("H100")
ADAMW = measure_optimizer_cost(torch.optim.AdamW, multi_tensor=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(self.norm(x))
        return x + torch.sigmoid(y) * torch.tanh(y) * 0.5


class Images(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(8, 16, 3), nn.BatchNorm2d(16)

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(self.norm(self.convolution(x))).mean((2, 3))


def squares(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


@cache
def blocks() -> ModelProfile:
    with torch.device("meta"):
        model = nn.Sequential(*(Block() for _ in range(6)))
        batch = torch.empty(2, WIDTH), torch.empty(2, WIDTH)
    return trace_profile(model, batch, squares, precision="bf16")


@cache
def images() -> ModelProfile:
    with torch.device("meta"):
        return trace_profile(Images(), (torch.empty(2, 8, 32, 32), torch.empty(2, 16)), squares, precision="bf16")


@cache
def scores() -> ModelProfile:
    """A head whose number of classes is no multiple of 16 bytes, and a loss over its scores."""
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 50257))
        batch = torch.empty(2, WIDTH), torch.empty(2, dtype=torch.long)
    return trace_profile(model, batch, nn.functional.cross_entropy, precision="bf16")


def plan(ranks: int = 1, **compute: Any) -> Plan:
    return Plan.model_validate({"axes": {"replicate": ranks}, "numerics": {"precision": "bf16"}, "compute": compute})


def predicted(profile: ModelProfile, batch: int = BATCH, cluster: Any = H100, **compute: Any) -> Prediction:
    return predict_plan(cluster, profile, plan(cluster.device_count, **compute), batch, ADAMW)


def names(profile: ModelProfile, phase: str) -> list[str]:
    return [o.name for segment in profile.segments if segment.phase == phase for o in segment.operators]


def test_operators_know_which_values_they_read_and_write() -> None:
    forward = next(segment for segment in images().segments if segment.phase == "forward")
    by_name = {operator.name: operator for operator in forward.operators}
    convolution, norm, relu = by_name["convolution"], by_name["native_batch_norm"], by_name["relu"]
    assert convolution.writes[0].value in {use.value for use in norm.reads}
    assert norm.writes[0].value in {use.value for use in relu.reads}
    assert relu.writes[0].bytes.at(4) == 4 * 16 * 30 * 30 * 2
    backward = [operator for segment in images().segments[1:] for operator in segment.operators]
    gradients = [use for operator in backward for use in operator.writes if use.is_gradient]
    assert sum(use.bytes.at(1) for use in gradients) == sum(p.bytes for p in images().parameters)


def test_a_chain_of_elementwise_operators_is_one_kernel_that_moves_its_inputs_and_outputs_once() -> None:
    compiled = compiled_profile(blocks(), plan(compile="model"), BATCH)
    middle = next(s for s in compiled.segments if s.phase == "forward" and s.block_count > 1)
    kernels = [operator for operator in middle.operators if operator.name == FUSED and operator.bytes.linear]
    # Read: the result of the product and the residual; written: the new residual and the input of the next product.
    assert sum(kernel.bytes.linear for kernel in kernels) == WIDTH * (2 + 4 + 4 + 2)
    assert [operator.name for operator in middle.operators if operator.name != FUSED] == ["addmm"]


def test_compiled_models_are_faster_and_blocks_alone_gain_less() -> None:
    eager, by_block, whole = (predicted(blocks(), compile=what) for what in ("none", "blocks", "model"))
    assert whole.step_s < by_block.step_s < eager.step_s
    assert whole.step_s < 0.7 * eager.step_s
    assert len(names(compiled_profile(blocks(), plan(compile="blocks"), 8), "forward")) > len(
        names(compiled_profile(blocks(), plan(compile="model"), 8), "forward")
    ), "the loss outside of all blocks is not compiled"


def test_compiled_models_need_less_memory() -> None:
    eager, compiled = predicted(blocks()), predicted(blocks(), compile="model")
    saved = compiled_profile(blocks(), plan(compile="model"), BATCH).saved_bytes(BATCH)
    # A block saves the result of its product in place of sigmoid and tanh. The loss computes the difference again.
    assert blocks().saved_bytes(BATCH) - saved == pytest.approx(BATCH * WIDTH * (6 * (2 + 2 - 2) + 4), rel=0.01)
    assert compiled.memory_bytes < eager.memory_bytes
    assert compiled.memory.breakdown["weights"] == eager.memory.breakdown["weights"]


def test_the_scores_of_a_compiled_loss_are_kept_in_half_precision_and_its_products_are_padded() -> None:
    eager, compiled = predicted(scores()), predicted(scores(), compile="model")
    # Eager: fp32 logarithms; compiled: bf16 scores, from which the backward pass computes them again.
    saved = compiled_profile(scores(), plan(compile="model"), BATCH).saved_bytes(BATCH)
    assert scores().saved_bytes(BATCH) - saved == pytest.approx(2 * BATCH * 50257, rel=0.1)
    products = [
        operator
        for segment in compiled_profile(scores(), plan(compile="model"), BATCH).segments
        for operator in segment.operators
        if operator.kind == "matmul"
    ]
    assert {size.constant for o in products for size in o.shape[1:]} & {50257.0, 50264.0} == {50264.0}
    assert compiled.step_s < 0.6 * eager.step_s


def test_the_statistics_of_a_batch_norm_are_a_kernel_and_the_bias_of_a_convolution_is_none() -> None:
    compiled = compiled_profile(images(), plan(compile="model"), 8)
    growing = [o for o in compiled.segments[0].operators if o.bytes.linear]
    result = 16 * 30 * 30 * 2
    reducing = [o for o in growing if o.name == FUSED and o.kind == "reduction"]
    statistics, applied = sorted(o.bytes.linear for o in reducing if o.bytes.linear >= result)
    assert statistics == result, "the result of the convolution is read once for the statistics"
    assert result < applied < 1.1 * result, "and once to apply them: ReLU and mean are in the same kernel"
    (eager,) = (o for o in images().segments[0].operators if o.kind == "convolution")
    (convolution,) = (o for o in growing if o.kind == "convolution")
    assert eager.bytes.at(8) - convolution.bytes.at(8) == 16 * 2


def test_a_cuda_graph_removes_the_launches_of_a_single_rank() -> None:
    eager, graph, both = (
        predicted(blocks(), 8, **compute)
        for compute in ({}, {"cuda_graphs": True}, {"cuda_graphs": True, "compile": "model"})
    )
    assert eager.breakdown["launch"] > 0.5 * eager.step_s, "the host limits the eager step"
    assert graph.breakdown["launch"] < 0.2 * eager.breakdown["launch"]
    operators = sum(s.block_count * sum(o.runs for o in s.operators) for s in blocks().segments)
    assert graph.breakdown["compute"] == pytest.approx(eager.breakdown["compute"] - operators * GAP_S)
    assert both.step_s < graph.step_s < 0.5 * eager.step_s
    inputs, workspace = (graph.memory.breakdown[name] for name in ("inputs", "workspace"))
    assert graph.memory_bytes - eager.memory_bytes == inputs + workspace


def test_with_several_ranks_only_compiled_functions_are_graphs() -> None:
    two = find_cluster("2xH100")
    eager, graph, compiled, both = (
        predicted(blocks(), 16, two, **compute).breakdown["launch"]
        for compute in ({}, {"cuda_graphs": True}, {"compile": "model"}, {"compile": "model", "cuda_graphs": True})
    )
    assert graph == eager, "the executor captures whole steps on a single rank only"
    assert both < compiled < eager


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.up(self.norm(x))
        return x + self.down(torch.sigmoid(y) * torch.tanh(y) * 0.5)


@cache
def mlps() -> ModelProfile:
    with torch.device("meta"):
        model = nn.Sequential(*(Mlp() for _ in range(6)))
        batch = torch.empty(2, WIDTH), torch.empty(2, WIDTH)
    return trace_profile(model, batch, squares, precision="bf16", with_structure=True)


def predicted_along(axes: dict[str, int], compiled: str, **groups: Any) -> Prediction:
    numerics = {"precision": "bf16"}
    divided = Plan.model_validate({"axes": axes, "numerics": numerics, "compute": {"compile": compiled}, **groups})
    return predict_plan(find_cluster("4xH100"), mlps(), divided, BATCH, ADAMW)


def test_split_blocks_are_compiled_between_their_collectives() -> None:
    eager, compiled = (predicted_along({"tensor": 4}, what) for what in ("none", "blocks"))
    assert compiled.breakdown["compute"] < 0.9 * eager.breakdown["compute"]
    assert compiled.breakdown["tensor"] == eager.breakdown["tensor"]
    assert compiled.memory_bytes < eager.memory_bytes
    assert predicted_along({"tensor": 4}, "model") == compiled, "the blocks are compiled in either case"
    whole, half = (predicted_along({"tensor": ranks}, "blocks").memory.breakdown["activations"] for ranks in (1, 2))
    assert half < 0.75 * whole, "what is divided uncompiled is divided compiled"


def test_what_is_not_compiled_is_predicted_uncompiled() -> None:
    selective = {"tensor": 2}, {"memory": {"recompute": "selective"}}
    split = Plan.model_validate({"axes": selective[0], **selective[1], "compute": {"compile": "model"}})
    assert compiled_profile(mlps(), split, BATCH) is mlps()
    assert compiled_profile(mlps(), plan(), BATCH) is mlps()


def test_the_stages_of_a_pipeline_are_compiled() -> None:
    groups = {"pipeline": {"cuts": ["2"], "microbatches": 4}}
    eager, by_block, whole = (predicted_along({"pipeline": 2}, what, **groups) for what in ("none", "blocks", "model"))
    assert whole.breakdown["compute"] < by_block.breakdown["compute"] < eager.breakdown["compute"]
    assert whole.memory_bytes < eager.memory_bytes


def test_a_stage_calls_the_compiled_functions_of_its_own_blocks_only() -> None:
    compiled = plan(compile="blocks")
    stages = stage_profiles(mlps(), ("2",))
    calls = [host_launches(stage.profile, "forward", compiled, on_gpu=True) for stage in stages]
    assert sum(calls) < 1.5 * host_launches(mlps(), "forward", compiled, on_gpu=True)


def test_a_fused_optimizer_goes_over_its_tensors_once_and_has_no_temporaries() -> None:
    eager, fused = predicted(blocks(), 8), predicted(blocks(), 8, fused_optimizer=True)
    assert fused.breakdown["optimizer"] < 0.6 * eager.breakdown["optimizer"]
    assert ADAMW.fused().temporary_ratio == 0 < ADAMW.temporary_ratio
    momentum = OptimizerCost(1.0, 0.0, True, has_fused=True)
    without = OptimizerCost(1.0, 0.0, True)
    times = [
        predict_plan(H100, blocks(), plan(fused_optimizer=True), 8, cost).breakdown["optimizer"]
        for cost in (momentum, without)
    ]
    assert times[0] < times[1], "an optimizer without a fused implementation runs as before"
    assert measure_optimizer_cost(torch.optim.Adadelta, multi_tensor=True).has_fused is False
