"""Branches that do not need each other are found, and so are tied weights; all of it can be written down."""

import torch
import yaml
from torch import Tensor, nn

from meshwright.profile.structure.structure import structure
from tests.profile.models import make, tiny_decoder, tokens
from tests.profile.structure.structured import MultiTask, TwoTowers, UNet

PAIR = (torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long), torch.zeros(4))


def test_towers_read_inputs_of_their_own_and_meet_in_a_module() -> None:
    (found,) = structure(TwoTowers(head=True), PAIR).branches
    assert (found.kind, found.join) == ("towers", "head")
    assert [(branch.modules, branch.inputs) for branch in found.branches] == [
        (("user",), ("users",)),
        (("item",), ("items",)),
    ]


def test_towers_may_meet_in_the_models_own_forward_pass() -> None:
    (found,) = structure(TwoTowers(head=False), PAIR).branches
    assert (found.kind, found.join) == ("towers", "")
    assert [branch.modules for branch in found.branches] == [("user",), ("item",)]


def test_towers_of_equal_blocks_are_named_as_a_whole() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))
            self.right = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.left(a) - self.right(b)
            return out

    (found,) = structure(Deep(), (torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4))).branches
    assert [branch.modules for branch in found.branches] == [("left",), ("right",)]


def test_heads_share_a_trunk() -> None:
    (found,) = structure(MultiTask(), torch.zeros(4, 6)).branches
    assert (found.kind, found.join) == ("heads", "trunk.2")
    assert [(branch.modules, branch.consumes) for branch in found.branches] == [
        (("age",), ("trunk.2",)),
        (("name",), ("trunk.2",)),
    ]


def test_a_chain_has_no_branches() -> None:
    for name in ("gpt", "llama", "encoder", "resnet18", "mnist"):
        model, batch, _ = make(name)
        assert structure(model, batch).branches == (), name
    assert structure(UNet(), torch.zeros(4, 1, 8, 8)).branches == ()


def test_tied_weights_are_named_with_the_modules_that_hold_them() -> None:
    (tie,) = structure(tiny_decoder(), tokens(4)).ties
    assert tie.parameters == ("embedding.weight", "head.weight")
    assert tie.modules == ("embedding", "head")
    assert structure(tiny_decoder(tied=False), tokens(4)).ties == ()


def test_a_structure_can_be_written_down_and_leaves_the_model_alone() -> None:
    model, batch, _ = make("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = structure(model, batch)
    assert yaml.safe_load(yaml.safe_dump(found.to_dict())) == found.to_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
