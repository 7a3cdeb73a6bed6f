"""The reference normalizes over the groups of samples that the plan makes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.data.order import permutation
from meshwright.data.partition import even_shares, parts
from meshwright.plan import Plan
from meshwright.proof.question import Question
from meshwright.proof.reference.groups import describe, grouping
from meshwright.proof.reference.reference import Reference
from meshwright.proof.reference.setting import set_up
from tests.proof.cases import BATCH, question


def a_plan(batch_norm: str = "local", ranks: int = 2, accumulation: int = 1) -> Plan:
    return Plan.model_validate(
        {
            "axes": {"replicate": ranks},
            "memory": {"accumulation": accumulation},
            "numerics": {"batch_norm": batch_norm},
        }
    )


def reference(asked: Question) -> Reference:
    setting = set_up(asked)
    setting.model.train()
    return Reference(setting, asked, grouping(setting.model, asked.plan, asked.dropout), torch.device("cpu"))


def step(asked: Question, steps: int = 1) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    one = reference(asked)
    for _ in range(steps):
        batch = one.next_batch()
        loss = one.compute(batch)
        gradients = one.gradients()
        one.clip()
        one.update(batch.last)
    return loss, gradients, one.model.state_dict()


def by_hand(asked: Question, pieces: list[tuple[int, range]]) -> tuple[Tensor, Tensor]:
    """The mean loss over groups of the first batch, and BatchNorm's running mean after those of data rank 0."""
    setting = set_up(asked)
    model = setting.model.train()
    order = permutation(setting.seed, 0, len(setting.data))[:BATCH]
    total = torch.zeros((), dtype=torch.float64)
    mean = model.get_buffer("norm.running_mean").clone()
    for rank, piece in pieces:
        chosen = [setting.data[int(order[index])] for index in piece]
        before = model.get_buffer("norm.running_mean").clone()
        output = model(torch.stack([x for x, _ in chosen]).double())
        target = torch.stack([y for _, y in chosen])
        total = total + torch.nn.functional.cross_entropy(output, target, reduction="sum")
        if rank != 0:
            model.get_buffer("norm.running_mean").copy_(before)
        mean = model.get_buffer("norm.running_mean").clone()
    return total.detach() / BATCH, mean


def test_local_statistics_are_those_of_each_microbatch_and_running_ones_of_rank_0() -> None:
    asked = replace(question("normalized"), plan=a_plan(ranks=2, accumulation=2))
    pieces = [(rank, piece) for rank in range(2) for piece in parts(even_shares(range(BATCH), 2), rank, 2)]
    loss, mean = by_hand(asked, pieces)
    found, _, state = step(asked)
    assert float(found) == pytest.approx(float(loss), rel=1e-13)
    torch.testing.assert_close(state["norm.running_mean"], mean, rtol=1e-12, atol=0)
    assert int(state["norm.num_batches_tracked"]) == 2


def test_synchronized_statistics_are_those_of_all_ranks() -> None:
    alone = replace(question("normalized"), plan=a_plan(ranks=1))
    together = replace(question("normalized"), plan=a_plan("synchronized", ranks=4))
    apart = replace(question("normalized"), plan=a_plan("local", ranks=4))
    losses = [float(step(asked, steps=2)[0]) for asked in (alone, together, apart)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert abs(losses[2] - losses[0]) > 1e-6


def test_synchronized_microbatches_are_normalized_one_by_one() -> None:
    together = replace(question("normalized"), plan=a_plan("synchronized", ranks=2, accumulation=2))
    groups = reference(together).next_batch().groups
    assert [group.samples for group in groups] == [4, 4]
    first = {index for rank in range(2) for index in parts(even_shares(range(BATCH), 2), rank, 2)[0]}
    setting = set_up(together)
    order = permutation(setting.seed, 0, len(setting.data))[:BATCH]
    expected = torch.stack([setting.data[int(order[index])][0] for index in sorted(first)])
    assert torch.equal(groups[0].data[0], expected.double())


def test_synchronized_statistics_see_a_borrowed_sample_that_the_loss_does_not() -> None:
    asked = replace(question("normalized"), plan=a_plan("synchronized", ranks=4))
    one = reference(asked)
    batch = [one.next_batch() for _ in range(3)][-1]
    (group,) = batch.groups
    assert (group.samples, group.borrowed) == (3, 1)
    assert torch.equal(group.data[0][3], group.data[0][0]), "the first sample of the batch"
    loss = one.compute(batch)
    model = set_up(asked).model.train()
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(group.data[0])[:3], group.data[1][:3])
    assert float(loss) == pytest.approx(float(expected), rel=1e-13)


def test_a_pipeline_runs_the_last_microbatch_of_a_short_batch_again() -> None:
    pipeline = {"cuts": ["conv"], "microbatches": 4}
    plan = Plan.model_validate({"axes": {"replicate": 2, "pipeline": 2}, "pipeline": pipeline})
    one = reference(replace(question("normalized"), plan=plan))
    groups = [one.next_batch() for _ in range(3)][-1].groups
    # Two samples for data rank 0 and one for the other, whose own repetitions leave no trace.
    assert [(group.rank, group.samples, group.borrowed) for group in groups] == [
        (0, 1, 0),
        (0, 1, 0),
        (0, 0, 1),
        (0, 0, 1),
        (1, 1, 0),
    ]
    one.compute(one.next_batch())
    assert int(one.model.get_buffer("norm.num_batches_tracked")) == 4


def test_a_model_that_looks_at_no_batch_takes_it_whole() -> None:
    asked = replace(question("attending"), plan=a_plan(ranks=4, accumulation=2))
    assert [group.samples for group in reference(asked).next_batch().groups] == [BATCH]
    assert describe("whole", asked.plan, False) is None


def test_frozen_statistics_need_no_groups() -> None:
    setting = set_up(question("normalized"))
    setting.model.train()
    setting.model.get_submodule("norm").eval()
    assert grouping(setting.model, a_plan(ranks=4), dropout=False) == "whole"


def test_a_batch_without_any_target_trains_nothing() -> None:
    loss, gradients, _ = step(question("plain", ignored=2 * BATCH + 3))
    assert float(loss) == 0
    assert all(not gradient.any() for gradient in gradients.values())


def test_the_reference_is_what_a_bare_loop_is() -> None:
    asked = question("plain", "class weights", "sgd", ignored=6, clip_norm=0.05)
    setting = set_up(asked)
    model, optimizer = setting.model, setting.make_optimizer(dict(setting.model.named_parameters()))
    schedule = setting.make_schedule(optimizer) if setting.make_schedule else None
    order = permutation(setting.seed, 0, len(setting.data))
    weight = torch.arange(1.0, 5.0).double()
    for index in range(3):
        chosen = [setting.data[int(i)] for i in order[index * BATCH : (index + 1) * BATCH]]
        output = model(torch.stack([x for x, _ in chosen]).double())
        loss = torch.nn.functional.cross_entropy(output, torch.stack([y for _, y in chosen]), weight)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        assert schedule is not None
        schedule.step()
    found, _, state = step(asked, steps=3)
    assert float(found) == pytest.approx(float(loss.detach()), rel=1e-13)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-15)
