"""Lightning's Trainer does not start ranks again. A training of which a rank was killed is started by its user with
`ckpt_path="last"`, and ends with the weights of one that was not interrupted."""

from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="needs the package lightning: pip install lightning==2.6.6")

from tests.compat.lightning.modules import largest_difference
from tests.compat.lightning.trainers import fit, fit_and_die
from tests.ranks import RankFailure, RankPool, ranks


def kill_and_resume(pool: RankPool, name: str, plan: Any, checkpoint_format: str, folder: Path) -> None:
    options = {"checkpoint_format": checkpoint_format}
    with pytest.raises(RankFailure):
        pool.run(fit_and_die, name, plan, str(folder), None, options)
    assert (folder / "killed").exists()
    assert (folder / "last.ckpt").is_dir() == (checkpoint_format == "meshwright" and plan != "ddp")
    results = pool.run(fit_and_die, name, plan, str(folder), "last", options)
    assert len(results[0]["losses"]) == (24 if name == "regression" else 0)  # the epoch of the failure is repeated
    expected = pool.run(fit, name, "ddp", str(folder))[0]
    assert largest_difference(expected["weights"], results[0]["weights"]) < 1e-9


@pytest.mark.soak
def test_a_training_continues_after_a_rank_was_killed(two: RankPool, tmp_path: Path) -> None:
    kill_and_resume(two, "regression", {"axes": {"shard": 2}}, "meshwright", tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize(
    ("axis", "checkpoint_format"),
    [("ddp", "lightning"), *((axis, form) for axis in ("replicate", "shard") for form in ("lightning", "meshwright"))],
)
@pytest.mark.parametrize("size", [1, 2, 3])
@pytest.mark.parametrize("name", ["regression", "gan"])
def test_every_plan_continues_after_a_rank_was_killed(
    name: str, size: int, axis: str, checkpoint_format: str, tmp_path: Path
) -> None:
    plan = "ddp" if axis == "ddp" else {"axes": {axis: size}}
    with ranks(size) as pool:
        kill_and_resume(pool, name, plan, checkpoint_format, tmp_path)
