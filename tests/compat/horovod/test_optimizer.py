"""Training through `DistributedOptimizer` gives the weights of one device with the global batch."""

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import meshwright.compat.horovod as hvd
from meshwright.compat.horovod.engine.adasum import combine
from tests.compat.horovod.world import run_horovod
from tests.ranks import RankPool
from tests.soaked import some_in_core

STEPS, ROWS = 4, 12  # rows of the global batch, for 1, 2 and 3 ranks


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 2)).double()


def batches() -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(5)
    both = [torch.randn(ROWS, 7, generator=generator, dtype=torch.float64) for _ in range(STEPS)]
    return [(rows[:, :5], rows[:, 5:]) for rows in both]


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.05, weight_decay=0.01)


def train_alone(clip: float | None = None) -> list[Tensor]:
    model = network()
    optimizer = adam(model)
    for x, y in batches():
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


def train(options: dict[str, Any], passes: int = 1, clip: float | None = None) -> list[Tensor]:
    rank, size = hvd.rank(), hvd.size()
    model = network()
    if rank:
        for parameter in model.parameters():
            parameter.data.zero_()
    hvd.broadcast_parameters(model.state_dict(), root_rank=0)
    if options.get("groups") == "layers":
        options = {**options, "groups": [list(model[0].parameters()), list(model[2].parameters())]}
    optimizer = hvd.DistributedOptimizer(
        adam(model), model.named_parameters(), backward_passes_per_step=passes, **options
    )
    assert type(optimizer).__name__ == "Adam"
    for x, y in batches():
        optimizer.zero_grad()
        for part, target in zip(x[rank::size].chunk(passes), y[rank::size].chunk(passes), strict=True):
            (nn.functional.mse_loss(model(part), target) / passes).backward()
        if clip is not None:
            optimizer.synchronize()
            nn.utils.clip_grad_norm_(model.parameters(), clip)
            with optimizer.skip_synchronize():
                optimizer.step()
        else:
            optimizer.step()
    return [parameter.detach() for parameter in model.parameters()]


CASES: dict[str, tuple[dict[str, Any], int, float | None]] = {
    "plain": ({}, 1, None),
    "accumulation": ({}, 2, None),
    "groups": ({"groups": 2}, 1, None),
    "layers": ({"groups": "layers"}, 2, None),
    "predivided": ({"gradient_predivide_factor": 2.0}, 1, None),
    "clipped": ({}, 1, 0.05),
}


@pytest.mark.parametrize("case", some_in_core(CASES))
def test_weights_are_those_of_one_device(world: RankPool | None, case: str) -> None:
    options, passes, clip = CASES[case]
    expected = train_alone(clip)
    for weights in run_horovod(world, train, options, passes, clip):
        for ours, alone in zip(weights, expected, strict=True):
            torch.testing.assert_close(ours, alone, rtol=0, atol=1e-9)


def test_fp16_compression_sends_rounded_gradients(two: RankPool) -> None:
    one, other = run_horovod(two, train, {"compression": hvd.Compression.fp16})
    for ours, theirs, alone in zip(one, other, train_alone(), strict=True):
        assert torch.equal(ours, theirs)
        torch.testing.assert_close(ours, alone, rtol=0, atol=0.02)
        assert not torch.equal(ours, alone)


def _train_with_adasum() -> tuple[list[Tensor], list[Tensor]]:
    model = nn.Linear(3, 1).double()
    hvd.broadcast_parameters(model.state_dict(), 0)
    before = [parameter.detach().clone() for parameter in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters(), op=hvd.Adasum)
    torch.manual_seed(hvd.rank())
    x = torch.randn(4, 3, dtype=torch.float64)
    expected = nn.Linear(3, 1).double()
    expected.load_state_dict(model.state_dict())
    expected(x).square().sum().backward()
    changes = [-0.1 * parameter.grad for parameter in expected.parameters() if parameter.grad is not None]
    of_ranks = hvd.allgather_object(changes)
    model(x).square().sum().backward()
    with pytest.raises(AssertionError, match="race"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer.zero_grad()
    wanted = [start + combine(a, b) for start, a, b in zip(before, *of_ranks, strict=True)]
    return [parameter.detach() for parameter in model.parameters()], wanted


def test_adasum_combines_the_changes_of_two_ranks(two: RankPool) -> None:
    for weights, wanted in run_horovod(two, _train_with_adasum):
        for ours, theirs in zip(weights, wanted, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-12)


def test_adasum_is_the_sum_of_orthogonal_and_the_mean_of_equal_tensors() -> None:
    a, b = torch.tensor([3.0, 0.0]), torch.tensor([0.0, 4.0])
    assert combine(a, b).tolist() == [3.0, 4.0]
    assert combine(a, a).tolist() == [3.0, 0.0]
    assert combine(a, torch.zeros(2)).tolist() == [3.0, 0.0]


def _sparse_gradients(as_dense: bool) -> list[float]:
    embedding = nn.Embedding(6, 1, sparse=True)
    nn.init.zeros_(embedding.weight)
    optimizer = torch.optim.SGD(embedding.parameters(), lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, embedding.named_parameters(), sparse_as_dense=as_dense)
    embedding(torch.tensor([0, hvd.rank() + 1])).sum().backward()
    optimizer.step()
    weights: list[float] = embedding.weight.detach().flatten().tolist()
    return weights


@pytest.mark.parametrize("as_dense", [False, True])
def test_sparse_gradients_are_averaged(two: RankPool, as_dense: bool) -> None:
    assert run_horovod(two, _sparse_gradients, as_dense) == [[-1.0, -0.5, -0.5, 0.0, 0.0, 0.0]] * 2


def _misuse() -> None:
    model = nn.Linear(2, 1)
    parameters = list(model.named_parameters())

    def distributed(**options: Any) -> Any:
        return hvd.DistributedOptimizer(torch.optim.SGD(model.parameters(), lr=0.1), **options)

    with pytest.raises(ValueError, match="not named"):
        distributed(named_parameters=parameters[:1])
    with pytest.raises(ValueError, match="unique"):
        distributed(named_parameters=[("same", parameter) for _, parameter in parameters])
    with pytest.raises(ValueError, match="tuples"):
        distributed(named_parameters=model.parameters())
    with pytest.raises(ValueError, match="op != Average"):
        distributed(gradient_predivide_factor=2.0, op=hvd.Sum)
    with pytest.raises(ValueError, match="only appear once"):
        distributed(groups=[[model.weight], [model.weight]])
    with pytest.raises(ValueError, match="must be > 0"):
        distributed(backward_passes_per_step=0)
    with pytest.warns(DeprecationWarning, match="num_groups"):
        optimizer = distributed(num_groups=1)
    if hvd.size() == 1:
        return
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="race"):
        optimizer.zero_grad()
    optimizer.step()
    optimizer = distributed(named_parameters=parameters)
    model(torch.ones(1, 2)).sum().backward()
    with pytest.raises(AssertionError, match="more than backward_passes_per_step"):
        model(torch.ones(1, 2)).sum().backward()
    optimizer.synchronize()
    with pytest.warns(UserWarning, match="skip_synchronize"):
        optimizer.step()
    optimizer.set_backward_passes_per_step(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):
            model(torch.ones(1, 2)).sum().backward()
        optimizer.step()


@pytest.mark.parametrize("count", [1, 2])
def test_misuse_is_refused_as_by_horovod(count: int, request: pytest.FixtureRequest) -> None:
    run_horovod(None if count == 1 else request.getfixturevalue("two"), _misuse)


def _unused_on_one_rank() -> list[float]:
    first, second = nn.Parameter(torch.zeros(1)), nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([first, second], lr=1.0)
    optimizer = hvd.DistributedOptimizer(optimizer, [("first", first), ("second", second)])
    (first if hvd.rank() == 0 else second).sum().backward()
    optimizer.step()
    return [first.item(), second.item()]


def test_a_parameter_that_one_rank_does_not_use_gets_the_gradient_of_the_others(two: RankPool) -> None:
    assert run_horovod(two, _unused_on_one_rank) == [[-0.5, -0.5]] * 2
