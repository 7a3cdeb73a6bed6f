"""Every way of combining gradients trains: those that are exact as one process does, the others nearly so."""

from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.train.session import Session
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.alone import world

EXACT = ("native", "ring", "tree", "halving_doubling", "two_level", "shared_memory", "auto")


class Points(torch.utils.data.Dataset[Any]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(3)
        self.x = torch.randn(96, 12, generator=generator, dtype=torch.float64)
        self.y = self.x[:, :4].argmax(1)

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.x[index], self.y[index]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(12, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 4)).double()


def trained(rank: int, size: int, gradients: dict[str, Any], steps: int, resumed: bool = False) -> dict[str, Any]:
    plan = Plan.model_validate({"axes": {"replicate": size}, "gradients": {"bucket_bytes": 9000, **gradients}})

    def session() -> Session:
        return Session(
            model(),
            lambda held: torch.optim.SGD(held.values(), lr=0.1, momentum=0.9),
            loss=nn.CrossEntropyLoss(),
            plan=plan,
            world=world(rank, size),
        )

    own = session()
    losses = []
    for number, batch in enumerate(own.batches(Points(), None, 24)):
        if number == steps:
            break
        losses.append(float(own.step(batch)))
    apart = {name: value.clone() for name, value in own.module.state_dict().items()}
    whole = {name: value.clone() for name, value in own.state_dict().items()}
    return {"losses": losses, "apart": apart, "whole": whole}


@pytest.fixture(scope="module")
def alone() -> dict[int, dict[str, Any]]:
    return {steps: trained(0, 1, {}, steps) for steps in (6, 40)}


@pytest.mark.parametrize("algorithm", EXACT)
def test_algorithms_train_as_one_process_does(three: RankPool, alone: Any, algorithm: str) -> None:
    for found in three.run(trained, {"algorithm": algorithm}, 6):
        assert found["losses"] == pytest.approx(alone[6]["losses"], rel=1e-12)
        for name, value in alone[6]["whole"].items():
            torch.testing.assert_close(found["whole"][name], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("precision", all_but(["bf16"], ["bf16", "fp16"]))
@pytest.mark.parametrize("algorithm", ["native", "ring", "shared_memory"])
def test_rounded_gradients_train_nearly_so(three: RankPool, alone: Any, algorithm: str, precision: str) -> None:
    found = three.run(trained, {"algorithm": algorithm, "precision": precision}, 6)[1]
    assert found["losses"] != alone[6]["losses"]
    assert found["losses"] == pytest.approx(alone[6]["losses"], rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch's PowerSGD waits for a GPU wherever there is one")
def test_powersgd_trains_another_way_to_nearly_the_same_loss(two: RankPool, alone: Any) -> None:
    first, second = two.run(trained, {"powersgd_rank": 2}, 40)
    assert first["losses"] == second["losses"]
    assert first["losses"][:2] == pytest.approx(alone[40]["losses"][:2], rel=1e-12)  # it starts after two steps
    assert first["losses"][10] != pytest.approx(alone[40]["losses"][10], rel=1e-6)
    assert first["losses"][-1] < 0.5 * first["losses"][0]
    for name, value in first["apart"].items():
        assert torch.equal(second["apart"][name], value)


def test_powersgd_of_cpu_ranks_is_refused_where_pytorch_would_wait_for_a_gpu(two: RankPool) -> None:
    assert two.run(_said_beside_a_gpu) == [True, True]


def _said_beside_a_gpu(rank: int, world_size: int) -> bool:
    with mock.patch("torch.cuda.is_available", return_value=True):
        try:
            trained(rank, world_size, {"powersgd_rank": 2}, 1)
        except InputError as error:
            return "CUDA_VISIBLE_DEVICES= " in str(error)
    return False


def test_local_steps_let_ranks_go_apart_and_come_together(two: RankPool, alone: Any) -> None:
    for steps, together in ((2, True), (4, False), (6, True)):
        first, second = two.run(trained, {"local_steps": 4, "local_after": 2}, steps)
        assert first["losses"] == second["losses"]
        weights = [torch.equal(value, second["apart"][name]) for name, value in first["apart"].items()]
        assert all(weights) if together else not any(weights)
        for name, value in first["whole"].items():  # whoever looks at the weights finds the same on all ranks
            assert torch.equal(second["whole"][name], value)
            mean = (first["apart"][name] + second["apart"][name]) / 2
            torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-14)
    first, _ = two.run(trained, {"local_steps": 4, "local_after": 2}, 40)
    assert first["losses"][:3] == pytest.approx(alone[40]["losses"][:3], rel=1e-12)
    assert first["losses"][-1] < 0.5 * first["losses"][0]


def beside_tensor(rank: int, size: int, algorithm: str) -> list[float]:
    splits = {"0": {"kind": "column"}, "2": {"kind": "row"}}
    plan = Plan.model_validate(
        {
            "axes": {"replicate": 2, "tensor": 2},
            "modules": {"splits": splits},
            "gradients": {"algorithm": algorithm, "bucket_bytes": 900},
        }
    )
    own = Session(
        model(),
        lambda held: torch.optim.SGD(held.values(), lr=0.1, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        plan=plan,
        world=world(rank, size),
        sample=(torch.randn(2, 12, dtype=torch.float64), torch.zeros(2, dtype=torch.long)),
    )
    return [float(own.step(batch)) for _, batch in zip(range(6), own.batches(Points(), None, 24), strict=False)]


@pytest.mark.parametrize("algorithm", all_but(["shared_memory"], ["ring", "tree", "shared_memory"]))
def test_beside_a_tensor_axis_too(four: RankPool, alone: Any, algorithm: str) -> None:
    for losses in four.run(beside_tensor, algorithm):
        assert losses == pytest.approx(alone[6]["losses"], rel=1e-12)
