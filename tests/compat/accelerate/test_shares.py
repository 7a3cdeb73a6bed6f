"""Loops of Accelerate train on the same global batches if processes have unequal shares of them."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks import RankPool

accelerate = pytest.importorskip("accelerate", reason="the package accelerate is not installed")

from accelerate.utils import DataLoaderConfiguration  # noqa: E402

from meshwright.compat.accelerate import Accelerator  # noqa: E402
from meshwright.errors import InputError  # noqa: E402
from tests.compat.accelerate.loops import accelerate_process, network, samples  # noqa: E402

SHARES: dict[str, Any] = {"axes": {"replicate": 2}, "shares": [5, 3]}


def train(accelerator: Any, batch: int, shuffle: bool = True, workers: int = 0) -> tuple[dict[str, Tensor], Tensor]:
    """Trains two epochs of 43 samples. Returns the weights, and the predictions of all samples in an evaluation."""
    torch.manual_seed(8)
    model: Any = network()
    optimizer: Any = torch.optim.AdamW(model.parameters(), lr=0.02)
    loader: Any = DataLoader(samples(43), batch_size=batch, shuffle=shuffle, num_workers=workers)
    evaluation: Any = DataLoader(samples(43), batch_size=4)
    optimizer, loader, evaluation, model = accelerator.prepare(optimizer, loader, evaluation, model)
    for _ in range(2):
        for inputs, target in loader:
            with accelerator.accumulate(model):
                accelerator.backward(nn.functional.mse_loss(model(inputs), target))
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        predictions = [accelerator.gather_for_metrics(model(inputs)) for inputs, _ in evaluation]
    return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}, torch.cat(predictions)


def train_on(rank: int, world_size: int, make: Any, options: dict[str, Any], *args: Any) -> Any:
    with accelerate_process(rank, world_size):
        return train(make(**options), *args)


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one[0], other[0], rtol=0, atol=1e-9)
    torch.testing.assert_close(one[1], other[1], rtol=0, atol=1e-9)
    assert len(one[1]) == 43


@pytest.mark.parametrize(
    ("plan", "options", "arguments"),
    [
        (SHARES, {"gradient_accumulation_steps": 2}, (4,)),
        pytest.param({**SHARES, "axes": {"shard": 2}}, {}, (4,), marks=pytest.mark.soak),
        pytest.param(SHARES, {"loading": {"split_batches": True}}, (8,), marks=pytest.mark.soak),
        pytest.param(SHARES, {}, (4, True, 2), marks=pytest.mark.soak),
        pytest.param(SHARES, {"loading": {"use_seedable_sampler": True}}, (4,), marks=pytest.mark.soak),
    ],
    ids=str,
)
def test_shares_train_as_equal_ones(two: RankPool, plan: Any, options: dict[str, Any], arguments: Any) -> None:
    if "loading" in options:
        options = {"dataloader_config": DataLoaderConfiguration(**options["loading"])}
    theirs = two.run(train_on, accelerate.Accelerator, options, *arguments)
    ours = two.run(train_on, Accelerator, {**options, "plan": plan}, *arguments)
    assert_equal(ours[0], theirs[0])
    assert_equal(ours[1], ours[0])


def train_uneven(rank: int, world_size: int, plan: Any) -> Any:
    """The last batch of an epoch of 41 samples has one, of which the second process gets none."""
    with accelerate_process(rank, world_size):
        loading = DataLoaderConfiguration(even_batches=False)
        accelerator = Accelerator(plan=plan, dataloader_config=loading)
        model: Any = network()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        loader: Any = DataLoader(samples(41), batch_size=8 // world_size)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        seen = []
        for inputs, target in loader:
            accelerator.backward(nn.functional.mse_loss(model(inputs), target))
            optimizer.step()
            optimizer.zero_grad()
            seen.append(accelerator.gather_for_metrics(inputs))
        assert torch.equal(torch.cat(seen), samples(41).tensors[0])
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def test_a_process_without_a_sample_has_no_weight(two: RankPool) -> None:
    expected = train_uneven(0, 1, None)
    for weights in two.run(train_uneven, SHARES):
        torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)


def train_on_targets(rank: int, world_size: int, plan: Any) -> Any:
    """A loss that is the mean over the targets that are not ignored, which `count` says."""
    with accelerate_process(rank, world_size):
        accelerator = Accelerator(plan=plan)
        torch.manual_seed(3)
        model: Any = nn.Linear(6, 4).double()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.5)
        inputs, target = samples(40).tensors[0], torch.arange(40) % 4
        target[torch.arange(40) % 3 == 0] = -100
        loader: Any = DataLoader(TensorDataset(inputs, target), batch_size=8 // world_size)
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for part, labels in loader:
            loss = nn.functional.cross_entropy(model(part), labels)
            accelerator.backward(loss, count=int(labels.ne(-100).sum()))
            optimizer.step()
            optimizer.zero_grad()
        return {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}


def test_processes_are_weighted_by_their_targets(two: RankPool) -> None:
    expected = train_on_targets(0, 1, None)
    for plan in (SHARES, None):
        for weights in two.run(train_on_targets, plan):
            torch.testing.assert_close(weights, expected, rtol=0, atol=1e-9)


class Stream(torch.utils.data.IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(range(8))


def refusals(rank: int, world_size: int) -> list[str]:
    """What is refused with shares, each in one line."""
    answers: list[str] = []

    def refused(run: Any) -> None:
        with pytest.raises(InputError) as error:
            run()
        answers.append(str(error.value))

    with accelerate_process(rank, world_size):
        accelerator = Accelerator(plan=SHARES)
        refused(lambda: accelerator.prepare(DataLoader(Stream(), batch_size=4)))
        refused(lambda: accelerator.prepare(DataLoader(samples(), batch_sampler=[[0, 1], [2]])))
        model: Any = network()
        optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer = accelerator.prepare(model, optimizer)
        model(samples().tensors[0][: 3 + rank]).sum().backward()
        refused(optimizer.step)
        refused(lambda: accelerator.join_uneven_inputs([model], even_batches=False).__enter__())
        refused(lambda: accelerator.gather(torch.zeros(2, 3 + rank)))
    return answers


def test_what_shares_refuse(two: RankPool) -> None:
    for answers in two.run(refusals):
        expected = [
            "reads a stream",
            "has no batch_size",
            "replace loss.backward",
            "join_uneven_inputs",
            "(2, 3), (2, 4)",
        ]
        assert all(part in answer and "\n" not in answer for part, answer in zip(expected, answers, strict=True)), (
            answers
        )
