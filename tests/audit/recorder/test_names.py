"""Names of parameters do not have the names of what wraps a model."""

import torch
from torch import nn

from meshwright.audit.recorder.layouts import hold_model
from meshwright.audit.recorder.model.module_names import module_prefixes, named_parameters


class _Wrapper(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.module = inner


def _names(model: nn.Module) -> list[str]:
    return [entry.name for entry in named_parameters(module_prefixes(model))]


def test_wrappers_are_no_part_of_a_name() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Sequential(nn.Linear(2, 2, bias=False)))
    plain = _names(model)
    assert plain == ["0.weight", "0.bias", "1.0.weight"]
    assert _names(_Wrapper(_Wrapper(model))) == plain
    assert _names(torch.compile(model)) == plain  # type: ignore[arg-type]


def test_a_module_called_module_beside_others_is_part_of_a_name() -> None:
    model = _Wrapper(nn.Linear(2, 2, bias=False))
    model.head = nn.Linear(2, 2, bias=False)
    assert _names(model) == ["module.weight", "head.weight"]


def test_a_tied_parameter_names_its_first_name() -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    model["head"].weight = model["table"].weight
    parameters, _ = hold_model([model])
    assert parameters["head.weight"].same_as == "table.weight"
    assert parameters["table.weight"].same_as is None


def test_several_models_are_told_apart_by_their_class() -> None:
    parameters, _ = hold_model([nn.Linear(2, 2, bias=False), nn.Embedding(3, 2)])
    assert list(parameters) == ["Linear.weight", "Embedding.weight"]
    parameters, _ = hold_model([nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)])
    assert list(parameters) == ["Linear0.weight", "Linear1.weight"]
