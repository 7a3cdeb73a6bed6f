"""Ranks agree on what they run before they train, or every rank says which rank differs in what."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.agreement import agree, find_differences, versions
from meshwright.train.job_agreement import agree_on_job
from tests.ranks import RankPool
from tests.train.one_process import toy_job, world


def verdicts(records: list[dict[str, str]], store: dist.Store) -> list[str]:
    """Returns the error of each rank, or an empty text; threads stand for ranks."""

    def verdict(rank: int) -> str:
        try:
            agree(records[rank], rank, len(records), store, "job", 60)
        except InputError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(len(records)) as pool:
        return list(pool.map(verdict, range(len(records))))


@pytest.mark.soak
def test_a_thousand_ranks_agree_and_each_is_told_which_one_differs() -> None:
    records = [{"torch": "2.13.0", "train.seed": "0"} for _ in range(1000)]
    assert set(verdicts(records, dist.HashStore())) == {""}
    records[777] = {"torch": "2.11.0", "train.seed": "0"}
    (problem,) = set(verdicts(records, dist.HashStore()))
    assert "torch is 2.11.0 on rank 777 and 2.13.0 on rank 0" in problem


def test_differences_are_grouped_and_limited() -> None:
    assert find_differences([{"a": "1"}] * 3) == ""
    problem = find_differences([{"a": "1"}, {"a": "2"}, {"a": "2"}, {}])
    assert "a is 2 on ranks 1 and 2 and 1 on rank 0; a is missing on rank 3 and 1 on rank 0" in problem
    many = find_differences([{str(name): "1" for name in range(9)}, {str(name): "2" for name in range(9)}])
    assert "and 4 more differences" in many


def test_the_versions_of_torch_and_meshwright_are_compared() -> None:
    assert versions()["torch"] == torch.__version__
    assert versions()["the code of meshwright"].startswith("sha256 ")


def differing_jobs(rank: int, size: int, change: dict[str, Any], plans: bool) -> str:
    job = toy_job(**change) if rank == 1 else toy_job()
    plan = Plan(axes=Axes(shard=2) if plans and rank == 1 else Axes(replicate=2)) if plans else None
    try:
        agree_on_job(job, plan, "cpu", 0, world(rank, size))
    except InputError as error:
        return str(error)
    return ""


def test_a_rank_with_another_job_or_plan_is_named_on_all_ranks(two: RankPool) -> None:
    assert two.run(differing_jobs, {}, False) == ["", ""]
    (problem,) = set(two.run(differing_jobs, {"train": {"global_batch": 20}}, False))
    assert "train.global_batch is 20 on rank 1 and 10 on rank 0" in problem
    (problem,) = set(two.run(differing_jobs, {}, True))
    assert (
        "plan.axes.replicate is 1 on rank 1 and 2 on rank 0; plan.axes.shard is 2 on rank 1 and 1 on rank 0" in problem
    )


def differing_code(rank: int, size: int, file: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        if rank == 1:  # as on a machine whose copy of the file is another one
            patch.setattr(Path, "read_bytes", lambda path: b"" if path == Path(file) else b"other")
        try:
            agree_on_job(toy_job(model={"call": f"{file}:Net", "hidden": 8}), None, "cpu", 0, world(rank, size))
        except InputError as error:
            return str(error)
    return ""


def test_a_rank_with_another_version_of_the_users_code_is_named(two: RankPool, tmp_path: Path) -> None:
    (tmp_path / "model.py").write_text("from tests.train.toy import Net\n")
    (problem,) = set(two.run(differing_code, str(tmp_path / "model.py")))
    assert f"the file of '{tmp_path}/model.py' is sha256 e3b0c44298fc on rank 1 and sha256 " in problem
