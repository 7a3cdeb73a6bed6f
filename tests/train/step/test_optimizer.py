"""Parameter groups by name, and an optimizer that is rebuilt from a template for another model."""

from typing import Any

import pytest
import torch
from torch import nn

import meshwright
from meshwright.errors import InputError
from meshwright.train.step.optimizer import build_optimizer, can_fuse_on_gpus, matches, rebuild_optimizer
from meshwright.user.job_sections import Optimizer


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
        self.head = nn.Linear(3, 2)
        self.header = nn.Linear(2, 2)


def grouped(groups: Any, **options: Any) -> dict[str, dict[str, Any]]:
    """Each parameter's group."""
    model = Net()
    spec = Optimizer.model_validate(
        {"call": "torch.optim:AdamW", "lr": 0.1, "weight_decay": 0.5, "groups": groups, **options}
    )
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    optimizer = build_optimizer(spec, model)
    groups = {names[id(parameter)]: group for group in optimizer.param_groups for parameter in group["params"]}
    assert groups.keys() == dict(model.named_parameters()).keys()
    return groups


def test_without_groups_all_parameters_are_one_group() -> None:
    assert all(group["weight_decay"] == 0.5 and group["lr"] == 0.1 for group in grouped([]).values())


@pytest.mark.parametrize("groups", ["no_decay", ["no_decay"]])
def test_one_word_spares_norms_and_biases(groups: Any) -> None:
    decays = {name: group["weight_decay"] for name, group in grouped(groups).items()}
    assert {name for name, decay in decays.items() if decay} == {"body.0.weight", "head.weight", "header.weight"}
    assert {decay for decay in decays.values() if decay} == {0.5}


def test_a_match_has_its_own_options_and_the_word_holds_inside_it() -> None:
    groups = grouped([{"match": "head.*", "lr": 1.0, "weight_decay": 0.25}, "no_decay"])
    assert {name for name, group in groups.items() if group["lr"] == 1.0} == {"head.weight", "head.bias"}
    assert groups["head.weight"]["weight_decay"] == 0.25
    assert groups["head.bias"]["weight_decay"] == 0.0
    assert groups["body.0.weight"]["weight_decay"] == 0.5
    assert groups["body.1.weight"]["weight_decay"] == 0.0


def test_the_first_match_wins() -> None:
    groups = grouped([{"match": "head.bias", "lr": 1.0}, {"match": "head", "lr": 2.0}])
    assert (groups["head.bias"]["lr"], groups["head.weight"]["lr"], groups["header.weight"]["lr"]) == (1.0, 2.0, 0.1)
    with pytest.raises(InputError, match=r"'head\.bias' matches no trainable parameter"):
        grouped([{"match": "head", "lr": 2.0}, {"match": "head.bias", "lr": 1.0}])


def test_a_module_names_all_below_it_and_nothing_beside() -> None:
    assert matches("head.weight", "head")
    assert matches("head.weight", "head.*")
    assert matches("head.weight", "*.weight")
    assert not matches("header.weight", "head")


def test_frozen_parameters_stay_out() -> None:
    model = Net()
    model.body.requires_grad_(False)
    optimizer = build_optimizer(Optimizer.model_validate({"call": "torch.optim:SGD", "lr": 1}), model)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == 4


@pytest.mark.parametrize(
    ("groups", "words"),
    [
        ([{"match": "hed", "lr": 1}], "'hed' matches no trainable parameter"),
        ([{"lr": 1}], "has no 'match'"),
        ([{"match": "head", "wieght_decay": 1}], "has no option 'wieght_decay': did you mean 'weight_decay'?"),
    ],
)
def test_a_group_that_does_nothing_is_refused(groups: Any, words: str) -> None:
    with pytest.raises(InputError) as refusal:
        grouped(groups)
    assert words in str(refusal.value)


def test_a_call_that_makes_no_optimizer_is_refused() -> None:
    spec = Optimizer.model_validate({"call": "builtins:list"})
    with pytest.raises(InputError, match="optimizer: builtins:list makes a list, not a torch optimizer"):
        build_optimizer(spec, Net())


def test_a_template_is_made_again_by_name() -> None:
    model, other = Net(), Net()
    groups: list[dict[str, Any]] = [
        {"params": model.head.parameters(), "lr": 1.0},
        {"params": model.body.parameters(), "betas": (0.5, 0.6)},
    ]
    template = torch.optim.AdamW(groups, lr=0.25, weight_decay=0.125)
    optimizer = rebuild_optimizer(
        template, {id(p): name for name, p in model.named_parameters()}, dict(other.named_parameters())
    )
    assert type(optimizer) is torch.optim.AdamW
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == [id(p) for p in other.head.parameters()]
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(p) for p in other.body.parameters()]
    assert [group["lr"] for group in optimizer.param_groups] == [1.0, 0.25]
    assert optimizer.param_groups[1]["betas"] == (0.5, 0.6)
    assert {group["weight_decay"] for group in optimizer.param_groups} == {0.125}


def test_a_template_may_hold_named_parameters() -> None:
    model = Net()
    template = torch.optim.SGD(model.named_parameters(), lr=0.5, momentum=0.75)
    optimizer = rebuild_optimizer(
        template, {id(p): name for name, p in model.named_parameters()}, dict(model.named_parameters())
    )
    assert optimizer.param_groups[0]["momentum"] == 0.75


def test_parallelize_steps_its_own_optimizer_and_marks_the_template_used() -> None:
    model = nn.Linear(3, 2)
    before = model.weight.detach().clone()
    template = torch.optim.SGD(model.parameters(), lr=0.5)
    session = meshwright.parallelize(model, template, loss=nn.CrossEntropyLoss(), device="cpu")
    assert session.optimizer is not template
    session.step((torch.randn(4, 3), torch.tensor([0, 1, 0, 1])))
    assert not torch.equal(model.weight, before)
    with pytest.raises(RuntimeError, match=r"was a template for parallelize\(\): call session\.step"):
        template.step()


def test_a_template_of_another_model_is_refused() -> None:
    template = torch.optim.SGD(nn.Linear(5, 7).parameters(), lr=0.5)
    with pytest.raises(
        InputError, match=r"the optimizer holds a parameter of shape \(7, 5\) that the model does not have"
    ):
        meshwright.parallelize(nn.Linear(3, 2), template, loss=nn.CrossEntropyLoss(), device="cpu")


@pytest.mark.parametrize(
    ("optimizer", "words"),
    [
        (torch.optim.AdamW, "optimizer is the class AdamW, not a torch optimizer"),
        (build_optimizer, "optimizer is the function build_optimizer, not a torch optimizer"),
        ("SGD", "optimizer is a str, not a torch optimizer"),
    ],
)
@pytest.mark.parametrize("function", ["parallelize", "prove", "predict", "best_plan"])
def test_a_class_or_function_instead_of_an_optimizer_is_refused(function: str, optimizer: Any, words: str) -> None:
    batch = (torch.ones(2, 3), torch.ones(2, 2))
    arguments: dict[str, dict[str, Any]] = {
        "parallelize": {"device": "cpu"},
        "prove": {"sample_batch": batch, "plan": meshwright.Plan(), "global_batch": 2},
        "predict": {"sample_batch": batch, "cluster": "1xH100", "global_batch": 2},
        "best_plan": {"sample_batch": batch, "cluster": "1xH100", "global_batch": 2},
    }
    with pytest.raises(InputError, match=words) as refusal:
        getattr(meshwright, function)(nn.Linear(3, 2), optimizer=optimizer, loss=nn.MSELoss(), **arguments[function])
    assert "construct one and pass it, for example optimizer=torch.optim.SGD(model.parameters(), lr=0.1)" in str(
        refusal.value
    )


@pytest.mark.parametrize(
    ("optimizer", "options", "can_fuse"),
    [
        (torch.optim.SGD, {}, True),
        (torch.optim.AdamW, {}, True),
        (torch.optim.AdamW, {"foreach": False}, False),
        (torch.optim.AdamW, {"fused": False}, False),
        (torch.optim.Adam, {"differentiable": True}, False),
        (torch.optim.Adagrad, {}, False),
        (torch.optim.RMSprop, {}, False),
    ],
)
def test_an_optimizer_is_fused_on_gpus_if_it_can_be_and_its_options_leave_it_open(
    optimizer: type[torch.optim.Optimizer], options: dict[str, Any], can_fuse: bool
) -> None:
    model = nn.Linear(2, 2)
    assert can_fuse_on_gpus(optimizer(model.parameters(), lr=0.1, **options)) is can_fuse  # type: ignore[call-arg]


def test_an_optimizer_with_other_required_arguments_is_refused_with_what_to_do() -> None:
    class OfModel(torch.optim.SGD):
        def __init__(self, parameters: Any, model: nn.Module) -> None:
            super().__init__(parameters, lr=0.1)

    model = Net()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    with pytest.raises(InputError, match=r"OfModel cannot be made again .* 'model'\. Keep its other arguments"):
        rebuild_optimizer(OfModel(model.parameters(), model), names, dict(model.named_parameters()))
