"""torchvision's detectors: lists of pictures of different sizes, and a dict of losses that are means over boxes.
Trained on several ranks, they equal plain PyTorch on one device."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

import meshwright as mw
from meshwright.cluster.detect import find_cluster
from meshwright.data.loading import LoadingOptions
from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.model_io.batch import count_listed_samples, take_listed
from meshwright.plan import Plan
from meshwright.proof.request import ProofRequest
from meshwright.train.check import check_job
from meshwright.train.loss.detection import DetectorLoss
from meshwright.train.loss.loss import check_sample_comparison, loss_from_model
from meshwright.train.loss.trial import find_model_loss
from meshwright.train.metrics import evaluated_value
from meshwright.train.step.batch import samples_in, split_into_microbatches
from tests.proof.cases import prove_in_pool
from tests.ranks import RankPool
from tests.train.detection.detectors import Pictures, collate, detector

KINDS = ("faster_rcnn", "mask_rcnn", "keypoint_rcnn", "retinanet", "ssd", "fcos")
SAMPLES, BATCH = 7, 3  # the last batch has one sample, so on two ranks the second one has none


def loader(kind: str) -> "DataLoader[Any]":
    return DataLoader(Pictures(SAMPLES, kind == "keypoint_rcnn"), BATCH, collate_fn=collate)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(module.parameters(), lr=0.01)


def train_plainly(kind: str) -> tuple[list[float], dict[str, Tensor]]:
    module = detector(kind).train()
    optimizer, losses = optimizer_of(module), []
    for images, targets in loader(kind):
        optimizer.zero_grad()
        loss = torch.stack(list(module(images, targets).values())).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, module.state_dict()


def train_under(
    rank: int, size: int, kind: str, axis: str, own_backward: bool
) -> tuple[list[float], dict[str, Tensor]]:
    module = detector(kind)
    session = mw.parallelize(module, optimizer_of(module), plan={"axes": {axis: size}}, device="cpu")
    losses = []
    for batch in session.prepare(loader(kind)):
        if own_backward:
            session.optimizer.zero_grad()
            loss = session.forward(batch)
            session.backward(loss)
            session.optimizer.step()
        else:
            loss = session.step(batch)
        losses.append(loss.item())
    return losses, session.state_dict()


def check_equal(pool: RankPool, kind: str, axis: str, own_backward: bool) -> None:
    expected_losses, expected = train_plainly(kind)
    for losses, weights in pool.run(train_under, kind, axis, own_backward):
        assert losses == pytest.approx(expected_losses, rel=1e-5)
        for name, value in expected.items():
            torch.testing.assert_close(weights[name], value, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "axis", "own_backward"),
    [("mask_rcnn", "replicate", False), ("ssd", "shard", False), ("faster_rcnn", "shard", True)],
)
def test_two_ranks_equal_one_device(two: RankPool, kind: str, axis: str, own_backward: bool) -> None:
    check_equal(two, kind, axis, own_backward)


@pytest.mark.soak
@pytest.mark.parametrize("own_backward", [False, True])
@pytest.mark.parametrize("axis", ["replicate", "shard"])
@pytest.mark.parametrize("kind", KINDS)
def test_all_detectors_on_two_and_three_ranks(
    two: RankPool, three: RankPool, kind: str, axis: str, own_backward: bool
) -> None:
    for pool in (two, three):
        check_equal(pool, kind, axis, own_backward)


# ---- what the losses are means over


def test_losses_of_images_are_found_by_trial_and_losses_of_boxes_are_counted() -> None:
    sample = collate([Pictures()[0], Pictures()[2]])
    retinanet = detector("retinanet").train(False)
    buffers = {name: buffer.clone() for name, buffer in retinanet.named_buffers()}
    loss = find_model_loss(retinanet, sample)
    assert (loss.kind, loss.is_divisible) == ("samples", True)
    assert not any(module.training for module in retinanet.modules())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in retinanet.named_buffers())
    assert find_model_loss(detector("faster_rcnn"), sample).kind == "terms"


class CoupledInTraining(nn.Module):
    """Returns a loss in training mode only, which compares its samples."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)
        self.normalize = nn.BatchNorm1d(2)

    def forward(self, x: Tensor) -> Any:
        scores = self.normalize(self.layer(x))
        return {"spread": scores.std(0, correction=0).sum()} if self.training else scores


def test_a_loss_in_training_mode_only_is_tried_there() -> None:
    model = CoupledInTraining()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    loss = find_model_loss(model, torch.randn(2, 4))
    assert not loss.is_divisible
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(module.training for module in model.modules())


@pytest.mark.parametrize(
    ("plan", "reason"),
    [
        ({"memory": {"accumulation": 2}}, r"means over the boxes of a whole global batch, but .* 2 microbatches"),
        ({"axes": {"replicate": 2}, "gradients": {"servers": 1}}, "numbers of boxes: set gradients.servers to 0"),
    ],
)
def test_plans_that_cut_the_batch_are_refused(plan: dict[str, Any], reason: str) -> None:
    with pytest.raises(InputError, match=reason):
        check_sample_comparison(loss_from_model(detector("ssd")), Plan.model_validate(plan))


class Summed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.detector = detector("ssd")

    def forward(self, images: Any, targets: Any) -> Tensor:
        return torch.stack(list(self.detector(images, targets).values())).sum()


def test_a_sum_of_losses_and_unknown_losses_are_refused() -> None:
    loss = loss_from_model(Summed())
    assert isinstance(loss.function, DetectorLoss)
    images, targets = collate([Pictures()[0]])
    with loss.forward_context():
        output = Summed()(images, targets)
    with pytest.raises(InputError, match="return the detector's dict of losses"):
        loss.term(output, None, 1)
    with pytest.raises(InputError, match="a loss 'loss_depth', of which it is not known what it is a mean over"):
        loss.term({"loss_depth": output}, None, 1)


# ---- evaluation and jobs


def count_found(output: list[dict[str, Tensor]], target: Any) -> tuple[int, int]:
    assert len(output) == len(target)
    return sum(len(image["boxes"]) for image in output), len(output)


def test_an_evaluation_has_metrics_and_no_loss() -> None:
    module = detector("retinanet")
    session = mw.parallelize(module, optimizer_of(module), device="cpu")
    loading = LoadingOptions(collate=collate)
    values = session.evaluate(Pictures(), {"found": count_found}, 3, loading)
    assert values is not None
    assert set(values) == {"found"}
    with pytest.raises(InputError, match="without a loss in evaluation mode, and there is no metric"):
        session.evaluate(Pictures(), {}, 3, loading)
    with pytest.raises(InputError, match=r"checkpoint\.best is 'loss', but the evaluation has only found"):
        evaluated_value(values, "loss", "checkpoint.best")


def job_of(kind: str) -> Job:
    here = "tests.train.detection.detectors"
    return Job.model_validate(
        {
            "model": {"call": f"{here}:detector", "kind": kind},
            "data": {"train": {"call": f"{here}:Pictures"}, "collate": {"call": f"{here}:collate"}},
            "optimizer": {"call": "torch.optim:SGD", "lr": 0.01},
            "train": {"steps": 3, "global_batch": 4},
        }
    )


def test_a_job_is_checked_before_ranks_start() -> None:
    cluster = find_cluster("2xcpu")
    check_job(job_of("mask_rcnn"), Plan.model_validate({"axes": {"replicate": 2}}), cluster)
    check_job(job_of("retinanet"), Plan.model_validate({"memory": {"accumulation": 2}}), cluster)
    with pytest.raises(InputError, match="means over the boxes of a whole global batch"):
        check_job(job_of("mask_rcnn"), Plan.model_validate({"memory": {"accumulation": 2}}), cluster)
    with pytest.raises(InputError, match=r"in transform .*, because its code depends on the values of tensors\. So it"):
        check_job(job_of("mask_rcnn"), Plan.model_validate({"axes": {"tensor": 2}}), cluster)


@pytest.mark.soak
@pytest.mark.parametrize("axis", ["replicate", "shard"])
@pytest.mark.parametrize("kind", ["faster_rcnn", "retinanet", "ssd"])
def test_jobs_of_detectors_are_proved(two: RankPool, tmp_path: Path, kind: str, axis: str) -> None:
    plan = Plan.model_validate({"axes": {axis: 2}})
    proof = two.run(prove_in_pool, ProofRequest(job_of(kind), plan), tmp_path)[0]
    assert proof["equal"], proof["first_difference"]


# ---- batches of lists


def test_samples_in_lists_are_counted_and_cut() -> None:
    batch = collate([Pictures()[index] for index in range(5)])
    assert samples_in(batch) == count_listed_samples(batch) == 5
    parts = split_into_microbatches(batch, 2)
    assert [samples_in(part) for part in parts] == [2, 3]
    assert parts[1][0][0] is batch[0][2]
    assert parts[1][1][0] is batch[1][2]
    stacked = {"pixels": torch.arange(6.0).reshape(3, 2), "labels": [{}, {}, {}], "scale": torch.ones(2)}
    taken = take_listed(stacked, [2, 0])
    assert taken["pixels"].tolist() == [[4.0, 5.0], [0.0, 1.0]]
    assert taken["scale"] is stacked["scale"]


@pytest.mark.parametrize(
    "batch",
    [
        [torch.ones(2, 3), torch.ones(2)],
        [[torch.ones(2, 3), torch.ones(2, 3)], [torch.ones(2), torch.ones(2)]],
        [[torch.ones(2, 3)], [{}, {}]],
        {"x": torch.ones(2, 3), "options": []},
        torch.ones(2, 3),
    ],
)
def test_other_batches_have_no_lists_of_samples(batch: Any) -> None:
    assert count_listed_samples(batch) is None
