"""Every way of combining gradients trains the model: exact ones as one process does, the others nearly so."""

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
from tests.train.one_process import world

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


def train(rank: int, size: int, gradients: dict[str, Any], steps: int) -> dict[str, Any]:
    plan = Plan.model_validate({"axes": {"replicate": size}, "gradients": {"bucket_bytes": 9000, **gradients}})

    def make_session() -> Session:
        return Session(
            model(),
            lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9),
            loss=nn.CrossEntropyLoss(),
            plan=plan,
            world=world(rank, size),
        )

    session = make_session()
    losses = []
    for number, batch in enumerate(session.batches(Points(), None, 24)):
        if number == steps:
            break
        losses.append(float(session.step(batch)))
    local = {name: value.clone() for name, value in session.module.state_dict().items()}
    full = {name: value.clone() for name, value in session.state_dict().items()}
    return {"losses": losses, "local": local, "full": full}


@pytest.fixture(scope="module")
def one_process() -> dict[int, dict[str, Any]]:
    return {steps: train(0, 1, {}, steps) for steps in (6, 40)}


@pytest.mark.parametrize("algorithm", EXACT)
def test_algorithms_train_as_one_process_does(three: RankPool, one_process: Any, algorithm: str) -> None:
    for result in three.run(train, {"algorithm": algorithm}, 6):
        assert result["losses"] == pytest.approx(one_process[6]["losses"], rel=1e-12)
        for name, value in one_process[6]["full"].items():
            torch.testing.assert_close(result["full"][name], value, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("precision", all_but(["bf16"], ["bf16", "fp16"]))
@pytest.mark.parametrize("algorithm", ["native", "ring", "shared_memory"])
def test_rounded_gradients_train_nearly_as_one_process(
    three: RankPool, one_process: Any, algorithm: str, precision: str
) -> None:
    result = three.run(train, {"algorithm": algorithm, "precision": precision}, 6)[1]
    assert result["losses"] != one_process[6]["losses"]
    assert result["losses"] == pytest.approx(one_process[6]["losses"], rel=0.01)


@pytest.mark.skipif(torch.cuda.is_available(), reason="PyTorch's PowerSGD waits for a GPU wherever there is one")
def test_powersgd_reaches_nearly_the_same_loss(two: RankPool, one_process: Any) -> None:
    first, second = two.run(train, {"powersgd_rank": 2}, 40)
    assert first["losses"] == second["losses"]
    assert first["losses"][:2] == pytest.approx(one_process[40]["losses"][:2], rel=1e-12)  # it starts after two steps
    assert first["losses"][10] != pytest.approx(one_process[40]["losses"][10], rel=1e-6)
    assert first["losses"][-1] < 0.5 * first["losses"][0]
    for name, value in first["local"].items():
        assert torch.equal(second["local"][name], value)


def test_powersgd_of_cpu_ranks_is_refused_where_pytorch_would_wait_for_a_gpu(two: RankPool) -> None:
    assert two.run(_error_next_to_a_gpu) == [True, True]


def _error_next_to_a_gpu(rank: int, world_size: int) -> bool:
    with mock.patch("torch.cuda.is_available", return_value=True):
        try:
            train(rank, world_size, {"powersgd_rank": 2}, 1)
        except InputError as error:
            return "CUDA_VISIBLE_DEVICES= " in str(error)
    return False


def test_local_steps_let_weights_differ_until_they_are_averaged(two: RankPool, one_process: Any) -> None:
    for steps, together in ((2, True), (4, False), (6, True)):
        first, second = two.run(train, {"local_steps": 4, "local_after": 2}, steps)
        assert first["losses"] == second["losses"]
        weights = [torch.equal(value, second["local"][name]) for name, value in first["local"].items()]
        assert all(weights) if together else not any(weights)
        for name, value in first["full"].items():  # whoever looks at the weights finds the same on all ranks
            assert torch.equal(second["full"][name], value)
            mean = (first["local"][name] + second["local"][name]) / 2
            torch.testing.assert_close(value, mean, rtol=1e-12, atol=1e-14)
    first, _ = two.run(train, {"local_steps": 4, "local_after": 2}, 40)
    assert first["losses"][:3] == pytest.approx(one_process[40]["losses"][:3], rel=1e-12)
    assert first["losses"][-1] < 0.5 * first["losses"][0]


def losses_with_tensor_axis(rank: int, size: int, algorithm: str) -> list[float]:
    splits = {"0": {"kind": "column"}, "2": {"kind": "row"}}
    plan = Plan.model_validate(
        {
            "axes": {"replicate": 2, "tensor": 2},
            "modules": {"splits": splits},
            "gradients": {"algorithm": algorithm, "bucket_bytes": 900},
        }
    )
    session = Session(
        model(),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9),
        loss=nn.CrossEntropyLoss(),
        plan=plan,
        world=world(rank, size),
        sample=(torch.randn(2, 12, dtype=torch.float64), torch.zeros(2, dtype=torch.long)),
    )
    return [float(session.step(batch)) for _, batch in zip(range(6), session.batches(Points(), None, 24), strict=False)]


@pytest.mark.parametrize("algorithm", all_but(["shared_memory"], ["ring", "tree", "shared_memory"]))
def test_algorithms_work_with_a_tensor_axis(four: RankPool, one_process: Any, algorithm: str) -> None:
    for losses in four.run(losses_with_tensor_axis, algorithm):
        assert losses == pytest.approx(one_process[6]["losses"], rel=1e-12)
