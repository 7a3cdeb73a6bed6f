"""Independent branches and tied weights are found, and a structure can be written as YAML."""

import torch
import yaml
from torch import Tensor, nn

from meshwright.profile.structure.structure import find_structure
from tests.profile.models import small_model, tiny_decoder, token_batch
from tests.profile.structure.structured_models import MultiTask, TwoTowers, UNet

PAIR = (torch.zeros(4, dtype=torch.long), torch.zeros(4, dtype=torch.long), torch.zeros(4))


def test_towers_read_inputs_of_their_own_and_meet_in_a_module() -> None:
    (branches,) = find_structure(TwoTowers(head=True), PAIR).branches
    assert (branches.kind, branches.join) == ("towers", "head")
    assert [(branch.modules, branch.inputs) for branch in branches.branches] == [
        (("user",), ("users",)),
        (("item",), ("items",)),
    ]


def test_towers_may_meet_in_the_models_own_forward_function() -> None:
    (branches,) = find_structure(TwoTowers(head=False), PAIR).branches
    assert (branches.kind, branches.join) == ("towers", "")
    assert [branch.modules for branch in branches.branches] == [("user",), ("item",)]


def test_towers_of_equal_blocks_are_named_as_a_whole() -> None:
    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.left = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))
            self.right = nn.Sequential(*(nn.Linear(8, 8) for _ in range(7)))

        def forward(self, a: Tensor, b: Tensor) -> Tensor:
            out: Tensor = self.left(a) - self.right(b)
            return out

    (branches,) = find_structure(Deep(), (torch.zeros(4, 8), torch.zeros(4, 8), torch.zeros(4))).branches
    assert [branch.modules for branch in branches.branches] == [("left",), ("right",)]


def test_heads_share_a_trunk() -> None:
    (branches,) = find_structure(MultiTask(), torch.zeros(4, 6)).branches
    assert (branches.kind, branches.join) == ("heads", "trunk.2")
    assert [(branch.modules, branch.consumes) for branch in branches.branches] == [
        (("age",), ("trunk.2",)),
        (("name",), ("trunk.2",)),
    ]


def test_a_chain_has_no_branches() -> None:
    for name in ("gpt", "mnist"):
        model, batch, _ = small_model(name)
        assert find_structure(model, batch).branches == (), name
    assert find_structure(UNet(), torch.zeros(4, 1, 8, 8)).branches == ()


def test_tied_weights_are_named_with_the_modules_that_hold_them() -> None:
    (tie,) = find_structure(tiny_decoder(), token_batch(4)).ties
    assert tie.parameters == ("embedding.weight", "head.weight")
    assert tie.modules == ("embedding", "head")
    assert find_structure(tiny_decoder(tied=False), token_batch(4)).ties == ()


def test_a_structure_can_be_written_as_yaml_and_finding_it_does_not_change_the_model() -> None:
    model, batch, _ = small_model("llama")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    structure = find_structure(model, batch)
    assert yaml.safe_load(yaml.safe_dump(structure.to_dict())) == structure.to_dict()
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
