"""Tests `mw.parallelize`: it refuses an unequal plan before the first step, checks each model once, and changes nothing
of what it is given."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import meshwright as mw
from meshwright.errors import UnequalPlan
from meshwright.proof.before_training import check
from meshwright.proof.torch_private import process_groups
from tests.proof.before_training import helper
from tests.proof.before_training.models import Blocks, FollowsBatch, scale_gradients_of_divided_models, training
from tests.ranks import RankPool

TENSOR = {"axes": {"tensor": 2}}


class CountedChecks:
    """Counts the proofs that are made within the context, in a cache folder of its own."""

    def __init__(self, patch: pytest.MonkeyPatch, folder: str) -> None:
        patch.setenv("XDG_CACHE_HOME", folder)
        self.number = 0
        prove = check.prove_in_running_ranks

        def counted(*args: Any) -> Any:
            self.number += 1
            return prove(*args)

        patch.setattr(check, "prove_in_running_ranks", counted)


def own_activation(x: Tensor) -> Tensor:
    return x.tanh().tanh()


def session_of(model: nn.Module, **options: Any) -> mw.Session:
    subject = training(model)
    return mw.parallelize(
        model, subject.optimizer, loss=subject.loss, sample_batch=subject.sample_batch, device="cpu", **options
    )


def checks_once(rank: int, size: int, folder: str) -> list[int]:
    numbers = []
    with pytest.MonkeyPatch.context() as patch:
        checks = CountedChecks(patch, folder)
        session_of(Blocks(), plan=TENSOR)
        numbers.append(checks.number)
        session_of(Blocks(), plan=TENSOR | {"gradients": {"bucket_bytes": 2**20}})  # other weights, the same code
        numbers.append(checks.number)
        session_of(Blocks(), plan=TENSOR | {"modules": {"sequence": False, "loss": False}})
        numbers.append(checks.number)
        session_of(Blocks(), plan=TENSOR | {"memory": {"recompute": "full"}})  # another kind of plan
        numbers.append(checks.number)
        session_of(Blocks(), plan={"axes": {"replicate": 2}})  # nothing is divided
        session_of(Blocks(7), plan=TENSOR, check=False)
        numbers.append(checks.number)
        patch.setattr(helper, "activate", own_activation)
        session_of(Blocks(), plan=TENSOR)
        numbers.append(checks.number)
    return numbers


def test_a_model_is_checked_once_and_again_when_its_code_changes(two: RankPool, tmp_path: Path) -> None:
    assert two.run(checks_once, str(tmp_path)) == [[1, 1, 1, 2, 2, 3]] * 2


def refuses(rank: int, size: int, folder: str) -> list[Any]:
    model = Blocks()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.MonkeyPatch.context() as patch:
        CountedChecks(patch, folder)
        scale_gradients_of_divided_models(patch)
        with pytest.raises(UnequalPlan) as caught:
            session_of(model, plan=TENSOR)
        unchanged = all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
        session = session_of(model, plan=TENSOR, check=False)
        again = not list(Path(folder).rglob("*.json"))  # a difference is not kept
    return [str(caught.value), unchanged, session.steps, again]


def test_an_unequal_plan_is_refused_before_the_first_step(two: RankPool, tmp_path: Path) -> None:
    first, second = two.run(refuses, str(tmp_path))
    assert first == second
    message, *rest = first
    assert rest == [True, 0, True]
    assert "the plan (tensor 2 · fp32) does not train the same model as one device" in message
    assert "scaled" in message
    assert "blocks." in message or "head." in message  # the first parameter that differs
    assert "replicate 2" in message
    assert "check=False" in message


def refuses_state(rank: int, size: int) -> list[str]:
    messages = []
    for kind in ("buffer", "neither"):
        try:
            session_of(FollowsBatch(kind), plan={"axes": {"replicate": 2}})
            messages.append("trained")
        except UnequalPlan as error:
            messages.append(str(error))
    session_of(FollowsBatch("buffer"), plan={"axes": {"replicate": 2}}, check=False)
    return messages


def test_state_that_follows_the_batch_is_refused_on_several_ranks(two: RankPool) -> None:
    for refused, trained in two.run(refuses_state):
        assert "the forward pass changes center" in refused
        assert trained == "trained"


class OwnLoss(nn.Module):
    """Returns no loss, as models of loops that compute it themselves do."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = Blocks(2)

    def forward(self, x: Tensor, scale: Tensor) -> dict[str, Tensor]:
        return {"scores": self.blocks(x) * scale[:, None]}


def loops_of_their_own(rank: int, size: int, folder: str) -> list[Any]:
    batch, outcomes = (torch.randn(4, 8), torch.rand(4)), list[Any]()
    for is_broken in (False, True):
        model = OwnLoss()
        with pytest.MonkeyPatch.context() as patch:
            checks = CountedChecks(patch, f"{folder}/{is_broken}")
            if is_broken:
                scale_gradients_of_divided_models(patch)
            try:
                optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
                mw.parallelize(model, optimizer, plan=TENSOR, sample_batch=batch, device="cpu")
                outcomes.append(checks.number)
            except UnequalPlan:
                outcomes.append("refused")
    return outcomes


def test_models_that_return_no_loss_are_checked_with_a_stand_in(two: RankPool, tmp_path: Path) -> None:
    assert two.run(loops_of_their_own, str(tmp_path)) == [[1, "refused"]] * 2


def undisturbed(rank: int, size: int, folder: str) -> list[bool]:
    model = Blocks().eval()
    model.head.weight.grad = torch.ones_like(model.head.weight)
    subject = training(model)
    batch = tuple(tensor.clone() for tensor in subject.sample_batch)
    groups, states = len(process_groups()), _generator_states()
    with pytest.MonkeyPatch.context() as patch:
        checks = CountedChecks(patch, folder)
        outcome = check.check_in_running_ranks(subject, mw.Plan.model_validate(TENSOR), _world(rank, size))
    after = _generator_states()
    return [
        checks.number == 1 and outcome.difference is None,
        len(process_groups()) == groups,
        all(map(np.array_equal, states, after)),
        not model.training,
        torch.equal(model.head.weight.grad, torch.ones_like(model.head.weight)),
        torch.get_default_dtype() == torch.float32,
        next(model.parameters()).dtype == torch.float32,
        all(map(torch.equal, batch, subject.sample_batch)),
        not subject.optimizer.state,
    ]


def _generator_states() -> list[Any]:
    _, keys, *_ = np.random.get_state(legacy=True)
    return [torch.get_rng_state().numpy(), np.asarray(random.getstate()[1]), np.asarray(keys)]


def _world(rank: int, size: int) -> Any:
    from meshwright.processes.world import World

    assert dist.is_initialized()
    return World(rank, rank, size, size, 0, torch.device("cpu"), None)


def test_a_check_changes_nothing(two: RankPool, tmp_path: Path) -> None:
    assert two.run(undisturbed, str(tmp_path)) == [[True] * 9] * 2
