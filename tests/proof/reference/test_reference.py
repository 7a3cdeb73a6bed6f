"""The reference normalizes over the groups of samples that the plan makes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from meshwright.data.order import permutation
from meshwright.data.partition import even_shares, padded_microbatches
from meshwright.plan import Plan
from meshwright.proof.reference.groups import choose_grouping, describe_grouping
from meshwright.proof.reference.reference import Reference
from meshwright.proof.reference.reference_setup import build_setup
from meshwright.proof.request import ProofRequest
from tests.proof.cases import BATCH, proof_request


def replicated_plan(batch_norm: str = "local", ranks: int = 2, accumulation: int = 1) -> Plan:
    return Plan.model_validate(
        {
            "axes": {"replicate": ranks},
            "memory": {"accumulation": accumulation},
            "numerics": {"batch_norm": batch_norm},
        }
    )


def make_reference(request: ProofRequest) -> Reference:
    setup = build_setup(request)
    setup.model.train()
    grouping = choose_grouping(setup.model, request.plan, request.dropout)
    return Reference(setup, request, grouping, torch.device("cpu"))


def train(request: ProofRequest, steps: int = 1) -> tuple[Tensor, dict[str, Tensor], dict[str, Any]]:
    """The loss and gradients of the last step, and the state after it."""
    reference = make_reference(request)
    for _ in range(steps):
        batch = reference.next_batch()
        loss = reference.compute(batch)
        gradients = reference.gradients()
        reference.clip()
        reference.update(batch.last_of_epoch)
    return loss, gradients, reference.model.state_dict()


def compute_by_hand(request: ProofRequest, pieces: list[tuple[int, range]]) -> tuple[Tensor, Tensor]:
    """The mean loss over groups of the first batch, and BatchNorm's running mean after the groups of data rank 0."""
    setup = build_setup(request)
    model = setup.model.train()
    order = permutation(setup.seed, 0, len(setup.data))[:BATCH]
    total = torch.zeros((), dtype=torch.float64)
    mean = model.get_buffer("norm.running_mean").clone()
    for rank, piece in pieces:
        samples = [setup.data[int(order[index])] for index in piece]
        before = model.get_buffer("norm.running_mean").clone()
        output = model(torch.stack([x for x, _ in samples]).double())
        target = torch.stack([y for _, y in samples])
        total = total + torch.nn.functional.cross_entropy(output, target, reduction="sum")
        if rank != 0:
            model.get_buffer("norm.running_mean").copy_(before)
        mean = model.get_buffer("norm.running_mean").clone()
    return total.detach() / BATCH, mean


def test_local_statistics_are_those_of_each_microbatch_and_running_ones_of_rank_0() -> None:
    request = replace(proof_request("normalized"), plan=replicated_plan(ranks=2, accumulation=2))
    pieces = [
        (rank, piece) for rank in range(2) for piece in padded_microbatches(even_shares(range(BATCH), 2), rank, 2)
    ]
    loss, mean = compute_by_hand(request, pieces)
    loss_of_reference, _, state = train(request)
    assert float(loss_of_reference) == pytest.approx(float(loss), rel=1e-13)
    torch.testing.assert_close(state["norm.running_mean"], mean, rtol=1e-12, atol=0)
    assert int(state["norm.num_batches_tracked"]) == 2


def test_synchronized_statistics_are_those_of_all_ranks() -> None:
    one_rank = replace(proof_request("normalized"), plan=replicated_plan(ranks=1))
    synchronized = replace(proof_request("normalized"), plan=replicated_plan("synchronized", ranks=4))
    local = replace(proof_request("normalized"), plan=replicated_plan("local", ranks=4))
    losses = [float(train(request, steps=2)[0]) for request in (one_rank, synchronized, local)]
    assert losses[1] == pytest.approx(losses[0], rel=1e-12)
    assert abs(losses[2] - losses[0]) > 1e-6


def test_synchronized_microbatches_are_normalized_one_by_one() -> None:
    request = replace(proof_request("normalized"), plan=replicated_plan("synchronized", ranks=2, accumulation=2))
    groups = make_reference(request).next_batch().groups
    assert [group.samples for group in groups] == [4, 4]
    first = {index for rank in range(2) for index in padded_microbatches(even_shares(range(BATCH), 2), rank, 2)[0]}
    setup = build_setup(request)
    order = permutation(setup.seed, 0, len(setup.data))[:BATCH]
    expected = torch.stack([setup.data[int(order[index])][0] for index in sorted(first)])
    assert torch.equal(groups[0].data[0], expected.double())


def test_synchronized_statistics_do_not_see_a_borrowed_sample() -> None:
    request = replace(proof_request("normalized"), plan=replicated_plan("synchronized", ranks=4))
    reference = make_reference(request)
    batch = [reference.next_batch() for _ in range(3)][-1]
    (group,) = batch.groups
    assert group.samples == len(group.data[0]) == 3
    loss = reference.compute(batch)
    model = build_setup(request).model.train()
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(group.data[0]), group.data[1])
    assert float(loss) == pytest.approx(float(expected), rel=1e-13)


def test_microbatches_that_a_pipeline_repeats_affect_nothing() -> None:
    pipeline = {"cuts": ["conv"], "microbatches": 4}
    plan = Plan.model_validate({"axes": {"replicate": 2, "pipeline": 2}, "pipeline": pipeline})
    reference = make_reference(replace(proof_request("normalized"), plan=plan))
    groups = [reference.next_batch() for _ in range(3)][-1].groups
    # Two samples for data rank 0 and one for the other.
    assert [(group.rank, group.samples) for group in groups] == [(0, 1), (0, 1), (1, 1)]
    reference.compute(reference.next_batch())
    assert int(reference.model.get_buffer("norm.num_batches_tracked")) == 4


def test_a_model_without_batch_statistics_gets_the_whole_batch() -> None:
    request = replace(proof_request("attending"), plan=replicated_plan(ranks=4, accumulation=2))
    assert [group.samples for group in make_reference(request).next_batch().groups] == [BATCH]
    assert describe_grouping("whole", request.plan, False) is None


def test_frozen_statistics_need_no_groups() -> None:
    setup = build_setup(proof_request("normalized"))
    setup.model.train()
    setup.model.get_submodule("norm").eval()
    assert choose_grouping(setup.model, replicated_plan(ranks=4), dropout=False) == "whole"


def test_a_batch_without_any_target_trains_nothing() -> None:
    loss, gradients, _ = train(proof_request("plain", ignored=2 * BATCH + 3))
    assert float(loss) == 0
    assert all(not gradient.any() for gradient in gradients.values())


def test_the_reference_equals_a_plain_loop() -> None:
    request = proof_request("plain", "class weights", "sgd", ignored=6, clip_norm=0.05)
    setup = build_setup(request)
    model, optimizer = setup.model, setup.make_optimizer(dict(setup.model.named_parameters()))
    schedule = setup.make_schedule(optimizer) if setup.make_schedule else None
    order = permutation(setup.seed, 0, len(setup.data))
    weight = torch.arange(1.0, 5.0).double()
    for index in range(3):
        samples = [setup.data[int(i)] for i in order[index * BATCH : (index + 1) * BATCH]]
        output = model(torch.stack([x for x, _ in samples]).double())
        loss = torch.nn.functional.cross_entropy(output, torch.stack([y for _, y in samples]), weight)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        assert schedule is not None
        schedule.step()
    loss_of_reference, _, state = train(request, steps=3)
    assert float(loss_of_reference) == pytest.approx(float(loss.detach()), rel=1e-13)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=1e-12, atol=1e-15)
