"""`best_plan` proposes plans that `parallelize` runs: for every job of this repository, and for sparse embeddings."""

import math
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.auto.choose import best_plan
from meshwright.auto.inputs import model_planning_inputs
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.errors import InputError, NotPredictable
from meshwright.job import load_job
from meshwright.parallel.check import check_plan
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.planner.search import search
from meshwright.train.build import construct_model
from meshwright.train.job_parts import JobParts
from meshwright.train.step.optimizer import build_optimizer
from meshwright.user.call import bind
from tests.auto.machines import cpu_cluster, store_measurement
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import world

JOBS = Path(__file__).parents[2] / "jobs"
SETTINGS = ["data.synthetic=true", "data.eval=null", "metrics={}", "checkpoint.best=null"]
QUICK = {"mnist"}


def train_one_step(rank: int, size: int, name: str, plan: Plan) -> float:
    """The loss of the first step of a job, in a rank that runs."""
    job = load_job(JOBS / f"{name}.yaml", SETTINGS)
    parts = JobParts(job)
    torch.manual_seed(0)
    model = construct_model(job)
    with patch("meshwright.train.parallelize.join", lambda *_: world(rank, size)):
        session = mw.parallelize(
            model,
            build_optimizer(job.optimizer, model),
            loss=bind(job.loss, "loss") if job.loss else None,
            plan=plan,
            clip_norm=job.train.clip_norm,
            target=job.data.target,
            sample_batch=parts.sample,
        )
    batches = session.batches(parts.data[0], epochs=1, global_batch=job.train.global_batch)
    return float(session.step(next(batches)))


@pytest.mark.parametrize("name", all_but(QUICK, sorted(file.stem for file in JOBS.glob("*.yaml"))))
def test_the_best_plan_of_every_job_is_run_by_parallelize(two: RankPool, name: str) -> None:
    job = load_job(JOBS / f"{name}.yaml", SETTINGS)
    parts = JobParts(job)
    plan = best_plan(
        parts.model,
        parts.sample,
        global_batch=job.train.global_batch,
        loss=bind(job.loss, "loss") if job.loss else None,
        optimizer=build_optimizer(job.optimizer, parts.model),
        cluster=cpu_cluster(2),
        target=job.data.target,
    )
    assert plan.world_size == 2
    losses = two.run(train_one_step, name, plan)
    assert losses[0] == losses[1]
    assert math.isfinite(losses[0])


class SparseWords(nn.Module):
    """A table of words with sparse gradients, large enough that dividing it would be faster."""

    def __init__(self, words: int = 20_000) -> None:
        super().__init__()
        self.table = nn.Embedding(words, 64, sparse=True)
        self.head = nn.Linear(64, 4)

    def forward(self, words: Tensor) -> Tensor:
        output: Tensor = self.head(self.table(words).mean(1))
        return output


def sparse_sample() -> tuple[Tensor, Tensor]:
    return torch.zeros(8, 5, dtype=torch.long), torch.zeros(8, dtype=torch.long)


def train_sparse_words(rank: int, size: int, plan: Plan) -> float:
    torch.manual_seed(0)
    model = SparseWords()
    with patch("meshwright.train.parallelize.join", lambda *_: world(rank, size)):
        session = mw.parallelize(
            model,
            torch.optim.Adagrad(model.parameters()),
            loss=nn.functional.cross_entropy,
            plan=plan,
            sample_batch=sparse_sample(),
        )
    return float(session.step(tuple(value[rank::size] for value in sparse_sample())))


def test_the_best_plan_of_sparse_embeddings_is_one_that_the_executor_accepts(two: RankPool) -> None:
    model, sample = SparseWords(), sparse_sample()
    cluster = cpu_cluster(2, bandwidth_bytes_per_s=1e9)  # so slow that a divided optimizer step would be faster
    optimizer = torch.optim.Adagrad(model.parameters())
    loss = nn.functional.cross_entropy
    inputs, profiles = model_planning_inputs(model, sample, cluster, global_batch=8, loss=loss, optimizer=optimizer)
    unchecked = search(replace(inputs, check_plan=check_rules), profiles).ranked[0].plan
    assert unchecked.axes.shard == 2
    with pytest.raises(InputError, match="table has sparse gradients"):
        check_plan(unchecked, model, sample)
    plan = best_plan(model, sample, global_batch=8, loss=loss, optimizer=optimizer, cluster=cluster)
    check_plan(plan, model, sample)
    assert plan.axes.replicate == plan.world_size == 2
    losses = two.run(train_sparse_words, plan)
    assert losses[0] == losses[1]


@pytest.mark.parametrize(
    ("sparse", "cluster", "can_fuse"),
    [(False, "2xH100", True), (True, "2xH100", False), (False, cpu_cluster(2), False)],
)
def test_a_fused_optimizer_is_for_dense_gradients(sparse: bool, cluster: str | Cluster, can_fuse: bool) -> None:
    model = SparseWords(10)
    model.table.sparse = sparse
    for optimizer in (torch.optim.SGD(model.parameters(), lr=0.1), None):
        machines = find_cluster(cluster) if isinstance(cluster, str) else cluster
        inputs, _ = model_planning_inputs(model, sparse_sample(), machines, global_batch=8, optimizer=optimizer)
        assert inputs.can_fuse_optimizer is (can_fuse and optimizer is not None)
        assert inputs.allow == "rounding"


class Uncopied(nn.Module):
    """A model that can neither be traced nor measured, because it cannot be copied."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 2)

    def __deepcopy__(self, memo: object) -> "Uncopied":
        raise RuntimeError("it holds a socket")

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.layer(x)
        return out


def test_ranks_are_replicas_of_a_model_of_which_nothing_can_be_predicted() -> None:
    model, sample = Uncopied(), (torch.randn(8, 4), torch.zeros(8, dtype=torch.long))
    loss = nn.functional.cross_entropy
    store_measurement()
    with pytest.warns(UserWarning, match=r"^plan: one rank .*, without a prediction: .*it holds a socket") as caught:
        plan = best_plan(model, sample, global_batch=8, loss=loss, device="cpu")
    assert len(caught) == 1
    assert plan == Plan()
    session = mw.parallelize(model, torch.optim.SGD(model.parameters(), 0.1), loss=loss, plan=plan, device="cpu")
    assert math.isfinite(session.step(sample))
    refused: tuple[dict[str, Any], ...] = (
        {"cluster": "8xH100"},
        {"device": "cpu", "fix": {"numerics.precision": "fp32"}},
    )
    for options in refused:
        with pytest.raises(NotPredictable, match="it holds a socket"):
            best_plan(model, sample, global_batch=8, loss=loss, **options)
