"""Every ready job loads, and its parts fit together: a batch goes through its model, loss and metrics."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import default_collate

from meshwright.batch import split
from meshwright.call import bind, build
from meshwright.job import Job, load_job
from meshwright.plan import Plan
from meshwright.train.build import build_data, build_metrics, build_session, make_model
from meshwright.train.loss import understand
from meshwright.train.metrics import Tally
from meshwright.train.optimizer import build_optimizer
from tests.train.alone import world

JOBS = Path(__file__).parents[2] / "jobs"
SMALLER = {
    "vgg16": ["data.train.size=32", "data.eval.size=32"],
    "resnet50": ["data.train.size=32", "data.eval.size=32"],
    "deeplab": ["data.train.size=32", "data.eval.size=32"],
    "gpt": ["model.layers=2", "model.hidden=32", "model.heads=4", "data.train.sequence=16", "data.eval.sequence=16"],
}


def job(name: str, *more: str) -> Job:
    return load_job(JOBS / f"{name}.yaml", [*SMALLER.get(name, []), *more])


@pytest.mark.parametrize("file", sorted(JOBS.glob("*.yaml")), ids=lambda file: file.stem)
def test_a_job_says_what_it_shows(file: Path) -> None:
    assert load_job(file).name == file.stem
    assert file.read_text().startswith("# ")


@pytest.mark.parametrize("name", SMALLER)
def test_the_parts_of_a_job_fit_together(name: str) -> None:
    """Everything is as the job says but for the size of its inputs; on the meta device, so that VGG16 costs nothing."""
    small = job(name)
    train, evaluation = build_data(small)
    example = split(default_collate([train[0], train[1]]))
    with torch.device("meta"):
        model = make_model(small)
    output = model(*(argument.to("meta") for argument in example.arguments))
    assert small.loss is not None
    loss = understand(bind(small.loss, "loss"))
    assert loss.kind == "targets"
    assert loss.term(output, example.target.to("meta"), 2).value.shape == ()
    optimizer = build_optimizer(small.optimizer, model)
    assert small.schedule is not None
    build(small.schedule, optimizer, role="schedule")
    scores = torch.randn(output.shape)
    assert float(loss.term(scores, example.target, 2).value) > 0
    tally = Tally(build_metrics(small), torch.device("cpu"))
    tally.add(scores, split(default_collate([evaluation[0], evaluation[1]])).target, 2)
    measured = tally.finish(tally.totals())
    assert set(measured) == set(small.metrics)
    assert all(0 <= value < 1 for value in measured.values())


def test_gpt_decays_matrices_only() -> None:
    small = job("gpt")
    optimizer = build_optimizer(small.optimizer, make_model(small))
    decayed, spared = optimizer.param_groups
    assert (decayed["weight_decay"], spared["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in decayed["params"]} == {2}
    assert {p.dim() for p in spared["params"]} == {1}


def test_gpt_trains_evaluates_and_goes_on(tmp_path: Path) -> None:
    small = job("gpt", "schedule.warmup=4", "schedule.total=40", "optimizer.lr=0.02", "model.vocabulary=64")
    data: list[Any] = list(build_data(job("gpt", "data.train.alphabet=16", "data.eval.alphabet=16")))
    session = build_session(small, Plan(), world(), lambda doing: None)
    batches = session.batches(data[0], global_batch=16)
    losses = [float(session.step(next(batches))) for _ in range(16)]
    assert losses[-1] < 0.8 * losses[0]
    evaluated = session.evaluate([data[1][index] for index in range(8)], build_metrics(small))
    assert evaluated is not None
    assert evaluated["accuracy"] > 0.1
    path = session.save(tmp_path / "saved")
    again = build_session(small, Plan(), world(), lambda doing: None)
    again.load(path)
    assert again.optimizer.param_groups[0]["lr"] == session.optimizer.param_groups[0]["lr"]
    batch = next(batches)
    assert float(again.step(batch)) == float(session.step(batch))
