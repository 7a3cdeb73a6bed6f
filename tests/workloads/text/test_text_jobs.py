"""The ready text jobs: their parts work together at full size, and with generated data they learn, on one device and
under their plans."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_map
from torch.utils.data import default_collate

from meshwright.errors import InputError
from meshwright.job import Job, load_job
from meshwright.model_io.batch import split_batch
from meshwright.plan import Plan
from meshwright.proof.proof import Proof
from meshwright.proof.prove import prove_in_running_ranks
from meshwright.proof.request import ProofRequest
from meshwright.train.build import build_data, build_metrics, construct_model
from meshwright.train.job_session import build_session
from meshwright.train.loss.loss import classify_loss
from meshwright.train.step.optimizer import build_optimizer
from meshwright.user.call import bind, build
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.train.one_process import world

JOBS = Path(__file__).parents[3] / "jobs"
SMALL = "data.synthetic=true"
NAMES = ("gpt", "bert", "two_tower", "multitask", "embeddings")
HEADS = {"heads.topic": 0, "heads.mood": 0, "heads.alike": 1, "heads.fits": 1}
VOCABULARY = {"center": {"kind": "vocabulary"}, "context": {"kind": "vocabulary"}}
PLANS: dict[str, dict[str, dict[str, Any]]] = {
    "replicate": {name: {"axes": {"replicate": 2}} for name in NAMES},
    "shard": {name: {"axes": {"shard": 2}} for name in NAMES},
    "tensor": {
        "gpt": {"axes": {"tensor": 2}, "modules": {"sequence": True, "loss": True}},
        "bert": {"axes": {"tensor": 2}, "modules": {"loss": True}},
        "multitask": {"axes": {"tensor": 2}},
        "embeddings": {"axes": {"tensor": 2}, "modules": {"splits": VOCABULARY}},
    },
    "pipeline": {
        name: {"axes": {"pipeline": 2}, "pipeline": {"cuts": [cut], "microbatches": 2}}
        for name, cut in (("gpt", "blocks.0"), ("bert", "encoder.blocks.0"), ("multitask", "encoder.blocks.0"))
    },
    "branches": {
        "multitask": {"axes": {"tensor": 2}, "modules": {"branches": HEADS}},
        "two_tower": {"axes": {"tensor": 2}, "modules": {"branches": {"query": 0, "document": 1}}},
    },
}
CASES = [(name, kind) for kind, plans in PLANS.items() for name in plans]


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("XDG_CACHE_HOME", str(folder))
        yield folder


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """Uses one thread: with several, threads of small models mostly wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def job(name: str, *more: str) -> Job:
    return load_job(JOBS / f"{name}.yaml", more)


@pytest.mark.parametrize("name", NAMES)
def test_the_error_of_a_job_without_data_names_both_remedies(name: str) -> None:
    with pytest.raises(InputError, match=r"data\.root=FOLDER.*data\.synthetic=true"):
        build_data(job(name))


@pytest.mark.parametrize("name", NAMES)
def test_model_loss_and_optimizer_of_a_job_work_together_at_full_size(name: str) -> None:
    """Only the data are generated. Models are on the meta device, so that they take no memory."""
    full_job = job(name)
    small = full_job.model_copy(update={"data": full_job.data.model_copy(update={"synthetic": True})})
    train, _ = build_data(small)
    example = split_batch(tree_map(lambda tensor: tensor.to("meta"), default_collate([train[0], train[1]])))
    with torch.device("meta"):
        model = construct_model(full_job)
        output = model(*example.arguments)
    assert full_job.loss is not None
    classify_loss(bind(full_job.loss, "loss")).term(output, example.target, 2)
    optimizer = build_optimizer(full_job.optimizer, model)
    if full_job.schedule:
        build(full_job.schedule, optimizer, role="schedule")


@pytest.mark.parametrize("name", all_but({"two_tower"}, NAMES))
def test_on_generated_data_the_loss_falls_as_the_job_file_says(name: str) -> None:
    comment = (JOBS / f"{name}.yaml").read_text().replace("\n#", "")
    match = re.search(r"falls below (\d+)% of its first value in 20 steps", comment)
    assert match is not None
    share = int(match[1]) / 100
    small = job(name, SMALL)
    train, evaluation = build_data(small)
    session = build_session(small, Plan(), world(), lambda activity: None)
    batches = session.batches(train, global_batch=small.train.global_batch)
    losses = [float(session.step(next(batches))) for _ in range(20)]
    assert losses[-1] < share * losses[0]
    evaluated = session.evaluate(evaluation, build_metrics(small), batch=64)
    assert evaluated is not None
    assert evaluated["loss"] < share * losses[0]
    assert set(evaluated) == {"loss", *small.metrics}


def prove_in_rank(rank: int, size: int, name: str, plan: Plan, folder: Path, cache: Path) -> Proof | None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(cache))
        return prove_in_running_ranks(ProofRequest(job(name, SMALL), plan, steps=2), world(rank, size), folder)


@pytest.mark.parametrize(("name", "kind"), all_but({("embeddings", "tensor")}, CASES))
def test_a_job_trains_under_its_plans_as_on_one_device(
    two: RankPool, tmp_path: Path, cache: Path, name: str, kind: str
) -> None:
    proof = two.run(prove_in_rank, name, Plan.model_validate(PLANS[kind][name]), tmp_path, cache)[0]
    assert proof.equal, proof.first_difference
    assert proof.steps == 2


def test_gpt_has_weight_decay_on_matrices_only() -> None:
    small = job("gpt", SMALL)
    optimizer = build_optimizer(small.optimizer, construct_model(small))
    matrices, vectors = optimizer.param_groups
    assert (matrices["weight_decay"], vectors["weight_decay"]) == (0.1, 0.0)
    assert {p.dim() for p in matrices["params"]} == {2}
    assert {p.dim() for p in vectors["params"]} == {1}


def test_gpt_continues_from_a_checkpoint(tmp_path: Path) -> None:
    small = job("gpt", SMALL)
    session = build_session(small, Plan(), world(), lambda activity: None)
    batches = session.batches(build_data(small)[0], global_batch=8)
    for _ in range(3):
        session.step(next(batches))
    path = session.save(tmp_path / "saved")
    resumed = build_session(small, Plan(), world(), lambda activity: None)
    resumed.load(path)
    assert resumed.optimizer.param_groups[0]["lr"] == session.optimizer.param_groups[0]["lr"]
    batch = next(batches)
    assert float(resumed.step(batch)) == float(session.step(batch))
