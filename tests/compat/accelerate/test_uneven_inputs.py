"""`join_uneven_inputs`: ranks may have different numbers of batches."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from tests.ranks import RankPool

pytest.importorskip("accelerate", reason="the package accelerate is not installed")

from meshwright.compat.accelerate import Accelerator
from tests.compat.accelerate.loops import accelerate_process, network, samples


def _train(rank: int, world_size: int, plan: Any) -> tuple[list[int], list[Tensor]]:
    """Two epochs of three batches, of which rank 0 gets two and rank 1 one, and one batch more on each rank. Returns
    the numbers of batches of each epoch, and the weights."""
    with accelerate_process(rank, world_size):
        accelerator = Accelerator(plan=plan)
        model = network()
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
        loader: Any = DataLoader(samples(12), batch_size=4)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        counts = []
        for _ in range(2):
            counts.append(0)
            with accelerator.join_uneven_inputs([model], even_batches=False):
                for inputs, target in loader:
                    _step(accelerator, model, optimizer, schedule, inputs, target)
                    counts[-1] += 1
        counts.append(sum(1 for _ in loader))
        for inputs, target in loader:
            _step(accelerator, model, optimizer, schedule, inputs, target)
            break
        return counts, [value.clone() for value in accelerator.get_state_dict(model).values()]


def _step(accelerator: Any, model: Any, optimizer: Any, schedule: Any, inputs: Tensor, target: Tensor) -> None:
    accelerator.backward(nn.functional.mse_loss(model(inputs), target))
    optimizer.step()
    schedule.step()
    optimizer.zero_grad()


def _reference() -> list[Tensor]:
    """The same on one process: the loss is the mean over both ranks of their mean losses, or of one and zero."""
    model = network()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    inputs, target = samples(12)[:]
    for shares in ([(0, 4), (4, 8)], [(8, 12)], [(0, 4), (4, 8)], [(8, 12)], [(0, 4), (4, 8)]):
        losses = [nn.functional.mse_loss(model(inputs[begin:end]), target[begin:end]) for begin, end in shares]
        (torch.stack(losses).sum() / 2).backward()
        optimizer.step()
        schedule.step()
        schedule.step()  # once for each process
        optimizer.zero_grad()
    return list(model.state_dict().values())


def test_ranks_with_fewer_batches_take_part_with_zeros(two: RankPool) -> None:
    results = two.run(_train, None)
    assert [counts for counts, _ in results] == [[2, 2, 2], [1, 1, 2]]
    for _, weights in results:
        for ours, expected in zip(weights, _reference(), strict=True):
            torch.testing.assert_close(ours, expected, rtol=0, atol=1e-9)


def test_a_sharded_model_is_refused(two: RankPool) -> None:
    with pytest.raises(Exception, match="give it one prepared model, which a plan of replicas trains"):
        two.run(_train, {"axes": {"shard": 2}})


def test_one_process_trains_as_always() -> None:
    counts, _ = _train(0, 1, None)
    assert counts == [3, 3, 3]
