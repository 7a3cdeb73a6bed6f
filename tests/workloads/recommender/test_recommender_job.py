"""The job recommender: it learns generated clicks, trains under plans as on one device, and its metric is exact."""

import os
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import torch
from pyarrow import parquet

from meshwright.errors import InputError
from meshwright.export.export import export
from meshwright.job import load_job
from meshwright.plan import Plan
from meshwright.train.metrics import MetricTotals
from meshwright.workloads.recommender.dlrm import DLRM, AreaUnderCurve
from tests.export.runs import train_run
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import train
from tests.workloads.job_proofs import JOBS, assert_loss_falls_as_the_file_says, prove_in_rank, small_job

TABLES = {"tables.*": {"kind": "vocabulary"}}
PLANS: dict[str, dict[str, Any]] = {
    "replicate": {"axes": {"replicate": 2}},
    "sparse": {"axes": {"replicate": 2}},
    "shard": {"axes": {"shard": 2}},
    "tensor": {"axes": {"tensor": 2}, "modules": {"splits": TABLES}},
    "pipeline": {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["tables.12"], "microbatches": 2}},
}


def test_the_loss_falls_as_the_job_file_says() -> None:
    assert assert_loss_falls_as_the_file_says("recommender")["auc"] > 0.8


@pytest.mark.parametrize("kind", all_but({"sparse"}, PLANS))
def test_the_job_trains_under_plans_as_on_one_device(two: RankPool, tmp_path: Path, kind: str) -> None:
    cache, settings = Path(os.environ["XDG_CACHE_HOME"]), (f"model.sparse={str(kind == 'sparse').lower()}",)
    proof = two.run(prove_in_rank, "recommender", Plan.model_validate(PLANS[kind]), tmp_path, cache, *settings)[0]
    assert proof.equal, proof.first_difference


def test_the_job_trains_on_parquet_files(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    for name, size in (("train", 40), ("val", 8)):
        numbers = torch.randint(0, 50, (40, size), generator=generator).tolist()
        columns = [[value % 2 for value in numbers[0]], *numbers[1:14], *([f"c{v}" for v in c] for c in numbers[14:])]
        table = pyarrow.table({f"column {place}": column for place, column in enumerate(columns)})
        parquet.write_table(table, tmp_path / f"{name}.parquet")
    small = ("model.rows=100", "model.dim=4", "model.bottom=[8]", "model.top=[8]")
    job = load_job(
        JOBS / "recommender.yaml", [f"data.root={tmp_path}", *small, "train.global_batch=10", "log.tensorboard=false"]
    )
    trainer = train(job, tmp_path / "run")
    assert trainer.session.steps == 4
    assert set(trainer.last_evaluation[1]) == {"loss", "auc"}  # type: ignore[index]


@pytest.mark.soak
@pytest.mark.parametrize("to", ["program", "int16"])
def test_the_job_is_exported(tmp_path: Path, to: str) -> None:
    run = train_run(small_job("recommender", "train.steps=2", "log.tensorboard=false"), tmp_path / "run")
    metrics = export(run, to).metrics
    assert metrics["loss"].after == pytest.approx(metrics["loss"].before, rel=1e-3)


def test_the_model_multiplies_all_pairs_of_vectors() -> None:
    model = DLRM(rows=[3, 5], dim=2, integers=1, categories=2, bottom=[2], top=[4])
    tables = [model.get_parameter(f"tables.{number}.weight") for number in range(2)]
    assert [len(table) for table in tables] == [3, 5]
    seen: list[torch.Tensor] = []
    model.top.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    score = model(torch.tensor([[1.0]]), torch.tensor([[4, 4]]))
    assert score.shape == (1,)
    dense = model.bottom(torch.tensor([[1.0]]))[0]
    first, second = tables[0][4 % 3], tables[1][4]
    expected = torch.stack([first @ dense, second @ dense, second @ first])
    torch.testing.assert_close(seen[0], torch.cat([dense, expected])[None])
    with pytest.raises(InputError, match="rows has 1 numbers, but categories is 2"):
        DLRM(rows=[3], categories=2)
    with pytest.raises(InputError, match=r"top is \[0\]"):
        DLRM(rows=3, top=[0])


def test_the_area_is_that_of_all_pairs_in_any_division_into_batches() -> None:
    torch.manual_seed(0)
    scores, target = torch.randn(400).round(decimals=2), (torch.rand(400) < 0.3).float()
    differences = scores[target == 1].unsqueeze(1) - scores[target == 0]
    expected = float((differences > 0).double().mean() + 0.5 * (differences == 0).double().mean())
    totals = MetricTotals({"auc": AreaUnderCurve()}, torch.device("cpu"))
    for part in (slice(0, 3), slice(3, 250), slice(250, 400)):
        totals.add(scores[part], target[part], len(scores[part]))
    assert totals.finish(totals.totals())["auc"] == pytest.approx(expected, abs=1e-9)
    metric = AreaUnderCurve()
    assert metric.finish(metric(scores, torch.zeros(400)).double()) == 0.5
    assert metric.finish(metric(torch.tensor([-1e4, 1e4]), torch.tensor([0.0, 1.0])).double()) == 1.0
