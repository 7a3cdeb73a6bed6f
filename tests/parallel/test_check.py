"""An error about a plan that cannot run on a model names what can run instead."""

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.errors import InputError
from meshwright.parallel.check import check_embeddings, check_plan
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules


class FeedForward(nn.Module):
    """One piece whose layers are split together with a layer of the piece before it."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.Linear(16, 8)

    def forward(self, features: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.relu(features))
        return result * 2


def plan_with_cut(after: str, **splits: dict[str, str]) -> Plan:
    return Plan.model_validate(
        {
            "axes": {"tensor": 2, "pipeline": 2},
            "pipeline": {"cuts": [after], "microbatches": 2},
            "modules": {"splits": splits},
        }
    )


def test_a_cut_between_layers_that_are_split_together_is_refused_with_cuts_that_are_accepted() -> None:
    model = nn.Sequential()
    for name, module in {
        "first": nn.Linear(8, 8),
        "norm": nn.LayerNorm(8),
        "up": nn.Linear(8, 16),
        "feed_forward": FeedForward(),
        "last": nn.LayerNorm(8),
    }.items():
        model.add_module(name, module)
    sample = torch.zeros(2, 8)
    with pytest.raises(InputError) as refusal:
        check_plan(plan_with_cut("up"), model, sample)
    message = str(refusal.value)
    assert "the cut after up separates up and feed_forward.down" in message
    assert "cut after norm or feed_forward instead, or add plan.modules.splits: {up: {kind: none}}" in message
    for accepted in (
        plan_with_cut("norm"),
        plan_with_cut("feed_forward"),
        plan_with_cut("up", up={"kind": "none"}),
    ):
        check_plan(accepted, model, sample)


def test_a_tensor_axis_without_a_layer_to_split_is_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    plan = Plan.model_validate({"axes": {"tensor": 2}})
    with pytest.raises(InputError, match=r"tensor is 2, but there is no layer to split, .* set axes\.tensor to 1"):
        check_plan(plan, model, torch.zeros(2, 8))
    named = Plan.model_validate({"axes": {"tensor": 2}, "modules": {"splits": {"0": {"kind": "column"}}}})
    check_plan(named, model, torch.zeros(2, 8))


class Derivative(nn.Module):
    """Returns the derivative of its output by its input."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.requires_grad_()
        (derivative,) = torch.autograd.grad(self.layers(x).sum(), x, create_graph=True)
        return derivative


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"memory": {"recompute": "selective"}}, "set memory.recompute to none or full"),
        ({"compute": {"compile": "blocks"}}, "set compute.compile to none"),
    ],
)
def test_models_that_take_derivatives_refuse_what_torch_cannot_differentiate_twice(
    plan: dict[str, dict[str, str]], words: str
) -> None:
    with pytest.raises(InputError, match=f"takes derivatives in its forward pass .*: {words}"):
        check_plan(Plan.model_validate(plan), Derivative(), torch.zeros(2, 8))
    check_plan(Plan.model_validate(plan), nn.Sequential(nn.Linear(8, 8)), torch.zeros(2, 8))
    check_plan(Plan.model_validate({"memory": {"recompute": "full"}}), Derivative(), torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"layout": "channels_last"}, "compute.layout is channels_last: set it to contiguous"),
        ({"compile": "model"}, "compute.compile is model: set it to none"),
    ],
)
def test_nnpack_is_refused_with_what_would_not_use_it(other: dict[str, str], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_rules(Plan.model_validate({"compute": {"convolutions": "nnpack", **other}}))


class Mixture(nn.Module):
    """Experts as a list of modules."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(8, 6)
        self.experts = nn.ModuleList(nn.Linear(8, 8) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = self.router(x).argmax(-1)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == number)
            mixed = mixed.index_add(0, rows, expert(x[rows]))
        return mixed


@pytest.mark.parametrize(
    ("plan", "words"),
    [
        ({"axes": {"replicate": 4, "expert": 4}}, "the model has 6 experts: choose 1, 2, 3, 6"),
        ({"axes": {"replicate": 2, "shard": 3, "expert": 2}}, "axes.expert has to divide axes.shard"),
        ({"axes": {"shard": 4, "expert": 2}}, "a list of modules, .* set it to 2, or axes.expert to 1"),
        ({"axes": {"shard": 2, "context": 2, "expert": 2}}, "axes.context 2 and a shard axis: set it to 1"),
        (
            {
                "axes": {"replicate": 2, "expert": 2, "pipeline": 2},
                "pipeline": {"schedule": "zbv", "cuts": ["a", "b", "c"], "microbatches": 2},
            },
            "pipeline.schedule is zbv, .* choose gpipe, 1f1b or interleaved_1f1b",
        ),
    ],
)
def test_an_expert_axis_that_cannot_run_is_refused_with_what_can(plan: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=words):
        check_plan(Plan.model_validate(plan), Mixture(), torch.zeros(2, 8))


def test_an_expert_axis_needs_experts() -> None:
    plan = Plan.model_validate({"axes": {"replicate": 2, "expert": 2}})
    with pytest.raises(InputError, match=r"axes\.expert is 2, but the model has no experts"):
        check_plan(plan, nn.Linear(8, 8), torch.zeros(2, 8))
    check_plan(plan, Mixture(), torch.zeros(2, 8))


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"axes": {"context": 2, "tensor": 2}, "modules": {"branches": {"a": 1}}}, "plan.modules.branches places"),
        ({"axes": {"context": 2}, "numerics": {"precision": "fp8"}}, "plan.numerics.precision is fp8"),
        ({"axes": {"context": 2}, "compute": {"loss_chunks": 2}}, "sequences that are divided"),
    ],
)
def test_what_cannot_be_executed_is_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        check_rules(Plan.model_validate(plan))


DIVIDED = [{"axes": {"replicate": 2}}, {"axes": {"shard": 2}}, {"axes": {"replicate": 2, "expert": 2}}]
MICROBATCHES = [
    {"memory": {"accumulation": 2}},
    {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["0"], "microbatches": 2}},
]
WHOLE = [{}, {"axes": {"tensor": 2}}, {"axes": {"context": 2}}]


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_embeddings_that_depend_on_all_tokens_of_a_batch_are_refused_where_it_is_divided(kind: type[nn.Module]) -> None:
    scaled = nn.Sequential(kind(6, 4, scale_grad_by_freq=True), nn.Linear(4, 6))
    written = nn.Sequential(kind(6, 4, max_norm=1.0), nn.Linear(4, 6))
    for groups in DIVIDED + MICROBATCHES:
        with pytest.raises(InputError, match=r"^0 has scale_grad_by_freq=True.*build it with scale_grad_by_freq=False"):
            check_embeddings(Plan.model_validate(groups), scaled)
    for groups in DIVIDED:
        with pytest.raises(InputError, match=r"^0 has max_norm=1.0.*build it with max_norm=None"):
            check_embeddings(Plan.model_validate(groups), written)
    for groups in WHOLE:
        check_embeddings(Plan.model_validate(groups), scaled)
        check_embeddings(Plan.model_validate(groups), written)


def test_rows_are_written_once_in_microbatches_unless_another_layer_uses_them() -> None:
    model = nn.Sequential(nn.Embedding(6, 4, max_norm=1.0), nn.Linear(4, 6))
    for groups in MICROBATCHES:
        check_embeddings(Plan.model_validate(groups), model)
    model[1].weight = model[0].weight
    for groups in MICROBATCHES:
        with pytest.raises(InputError, match=r"max_norm"):
            check_embeddings(Plan.model_validate(groups), model)


def test_ranks_that_do_not_train_what_one_device_trains_may_scale_by_their_own_tokens() -> None:
    model = nn.Embedding(6, 4, scale_grad_by_freq=True)
    two_ranks = Plan.model_validate({"axes": {"replicate": 2}})
    with pytest.raises(InputError, match="scale_grad_by_freq"):
        check_embeddings(two_ranks, model)
    check_embeddings(Plan.model_validate({"axes": {"replicate": 2}, "gradients": {"local_steps": 2}}), model)
    model.weight.requires_grad_(False)
    check_embeddings(two_ranks, model)
