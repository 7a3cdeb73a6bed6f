"""The head that is joined with the loss is found in the model, or the plan is refused with one line."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.errors import InputError
from meshwright.parallel.check import check_plan
from meshwright.parallel.chunked_loss.head import head_to_join
from meshwright.profile.structure.model_structure import ModelStructure
from meshwright.train.session import Session
from tests.parallel.chunked_loss.chunked_models import MODELS, batch, mean_loss, plan_of
from tests.train.one_process import world


def head_of(model: nn.Module, sample: Any, target: str | None = None, **groups: dict[str, Any]) -> str:
    structure = ModelStructure(model, sample, target)
    return head_to_join(plan_of(2, **groups), model, structure.head)


@pytest.mark.parametrize(
    ("model", "head"), [("plain", "head"), ("tied", "head"), ("gpt2", "lm_head"), ("llama", "lm_head")]
)
def test_the_layer_that_computes_the_scores_is_the_head(model: str, head: str) -> None:
    is_from_transformers = head == "lm_head"
    sample = batch(0, "model" if is_from_transformers else "words")
    assert head_of(MODELS[model](), sample, "*" if is_from_transformers else None) == head


class Capped(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.head(self.head(x))
        return result


@pytest.mark.parametrize("model", [Capped(4, 9), Twice(), nn.Sequential(nn.Linear(4, 9), nn.ReLU())])
def test_a_model_without_a_head_is_refused(model: nn.Module) -> None:
    sample = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    with pytest.raises(InputError, match=r"returns no scores of an nn\.Linear that it calls once: set"):
        check_plan(plan_of(2), model, sample)


def test_a_head_in_a_block_is_refused_where_the_plan_changes_blocks() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 9)))
    sample = (torch.zeros(2, 4), torch.zeros(2, dtype=torch.long))
    assert head_of(model, sample) == "1.1"
    with pytest.raises(InputError, match=r"the head 1\.1 lies in the block 1, which the plan .* recomputes"):
        head_of(model, sample, memory={"recompute": "full"})


def test_a_plan_needs_a_batch_to_find_the_head() -> None:
    with pytest.raises(InputError, match=r"joins its head with the loss, .* parallelize\(…, sample_batch=batch\)"):
        Session(MODELS["plain"](), lambda _: torch.optim.SGD([]), loss=mean_loss, plan=plan_of(2), world=world())
