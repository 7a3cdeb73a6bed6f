"""Every ready job loads, and its parts work together: a batch is passed through its model, loss and metrics."""

from pathlib import Path

import pytest
import torch
from torch.utils.data import default_collate

from meshwright.job import Job, load_job
from meshwright.model_io.batch import split_batch
from meshwright.train.build import build_data, build_metrics, construct_model
from meshwright.train.loss.loss import classify_loss
from meshwright.train.metrics import MetricTotals
from meshwright.train.step.optimizer import build_optimizer
from meshwright.user.call import bind, build
from tests.soaked import all_but

JOBS = Path(__file__).parents[2] / "jobs"
SMALLER = {
    name: ["data.synthetic=true", "data.train.size=32", "data.eval.size=32"]
    for name in ("vgg16", "resnet18", "resnet50", "deeplab")
}


def job(name: str, *more: str) -> Job:
    return load_job(JOBS / f"{name}.yaml", [*SMALLER.get(name, []), *more])


@pytest.mark.parametrize("file", sorted(JOBS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_job_file_loads_and_begins_with_a_comment(file: Path) -> None:
    assert load_job(file).name == file.stem
    assert file.read_text().startswith("# ")


@pytest.mark.parametrize("name", all_but({*SMALLER} - {"deeplab"}, SMALLER))
def test_model_loss_metrics_and_optimizer_of_a_job_work_together(name: str) -> None:
    """The size of the inputs is the only change. Models are on the meta device, so that VGG16 takes no memory."""
    small = job(name)
    train, evaluation = build_data(small)
    example = split_batch(default_collate([train[0], train[1]]))
    with torch.device("meta"):
        model = construct_model(small)
    output = model(*(argument.to("meta") for argument in example.arguments))
    assert small.loss is not None
    loss = classify_loss(bind(small.loss, "loss"))
    assert loss.kind == "targets"
    assert loss.term(output, example.target.to("meta"), 2).value.shape == ()
    optimizer = build_optimizer(small.optimizer, model)
    assert small.schedule is not None
    build(small.schedule, optimizer, role="schedule")
    scores = torch.randn(output.shape)
    assert float(loss.term(scores, example.target, 2).value) > 0
    totals = MetricTotals(build_metrics(small), torch.device("cpu"))
    totals.add(scores, split_batch(default_collate([evaluation[0], evaluation[1]])).target, 2)
    measured = totals.finish(totals.totals())
    assert set(measured) == set(small.metrics)
    assert all(0 <= value <= 1 for value in measured.values())
