"""The job physics: a loss on derivatives of the output trains as on one device, and the exact solution is exact."""

import os
from pathlib import Path

import numpy as np
import pytest
import torch

from meshwright.errors import InputError
from meshwright.export.export import export
from meshwright.plan import Plan
from meshwright.workloads.physics.burgers import VISCOSITY, BurgersLoss, RelativeError, exact_solution, initial_value
from meshwright.workloads.physics.network import SolutionNetwork
from meshwright.workloads.physics.points import points
from tests.export.runs import train_run
from tests.ranks import RankPool
from tests.soaked import all_but
from tests.workloads.job_proofs import assert_loss_falls_as_the_file_says, prove_in_rank, small_job

SPLITS = {"layers.0": {"kind": "column"}, "layers.2": {"kind": "row"}}
PLANS = {
    "replicate": {"axes": {"replicate": 2}},
    "shard": {"axes": {"shard": 2}},
    "shard, recompute": {"axes": {"shard": 2}, "memory": {"recompute": "full", "accumulation": 2}},
    "tensor": {"axes": {"tensor": 2}, "modules": {"splits": SPLITS}},
}


def test_the_loss_falls_as_the_job_file_says() -> None:
    assert assert_loss_falls_as_the_file_says("physics")["error"] < 1


@pytest.mark.parametrize("kind", all_but({"shard", "tensor"}, PLANS))
def test_a_loss_on_derivatives_trains_as_on_one_device(two: RankPool, tmp_path: Path, kind: str) -> None:
    cache = Path(os.environ["XDG_CACHE_HOME"])
    plan = Plan.model_validate(PLANS[kind])
    proof = two.run(prove_in_rank, "physics", plan, tmp_path, cache, "model.hidden=[8,8,8]")[0]
    assert proof.equal, proof.first_difference


def test_the_exported_program_returns_the_solution(tmp_path: Path) -> None:
    settings = ["train.steps=2", "log.tensorboard=false", "model.hidden=[8,8]", "checkpoint.every_steps=null"]
    result = export(train_run(small_job("physics", *settings), tmp_path / "run"), "program")
    assert result.metrics["error"].after == pytest.approx(result.metrics["error"].before, rel=1e-5)


def test_derivatives_are_those_of_the_output() -> None:
    torch.manual_seed(0)
    model, at = SolutionNetwork([8, 8]).double(), torch.rand(5, 2, dtype=torch.float64)
    output, step = model(at), 1e-4
    assert not model.eval()(at).keys() - {"u"}
    t, x = torch.tensor([step, 0.0]), torch.tensor([0.0, step])
    u = {name: model(at + shift)["u"] for name, shift in (("+t", t), ("-t", -t), ("+x", x), ("-x", -x))}
    torch.testing.assert_close(output["u_t"], (u["+t"] - u["-t"]) / (2 * step), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(output["u_x"], (u["+x"] - u["-x"]) / (2 * step), rtol=1e-5, atol=1e-6)
    second = (u["+x"] - 2 * output["u"] + u["-x"]) / step**2
    torch.testing.assert_close(output["u_xx"], second, rtol=1e-4, atol=1e-5)


def test_the_exact_solution_fulfils_the_equation_and_the_known_values() -> None:
    t, x, step = np.array([0.2, 0.5, 0.9]), np.array([0.3, -0.6, 0.8]), 1e-4
    u = exact_solution(t, x)
    u_t = (exact_solution(t + step, x) - exact_solution(t - step, x)) / (2 * step)
    right, left = exact_solution(t, x + step), exact_solution(t, x - step)
    residual = u_t + u * (right - left) / (2 * step) - VISCOSITY * (right - 2 * u + left) / step**2
    assert np.abs(residual).max() < 1e-4
    assert exact_solution(np.zeros(3), x) == pytest.approx(initial_value(x))
    assert exact_solution(t, np.ones(3)) == pytest.approx(0, abs=1e-9)


def test_the_loss_uses_the_residual_or_the_value_by_the_kind_of_each_point() -> None:
    output = {
        name: torch.tensor([number] * 2) for name, number in (("u", 2.0), ("u_t", 3.0), ("u_x", 5.0), ("u_xx", 7.0))
    }
    target = torch.tensor([[0.0, 9.0], [1.0, 1.5]])
    loss = BurgersLoss(viscosity=0.5, value_weight=4)
    assert float(loss(output, target)) == pytest.approx(((3 + 2 * 5 - 0.5 * 7) ** 2 + 4 * 0.5**2) / 2)
    metric = RelativeError()
    assert metric.finish(metric(output, target)) == pytest.approx(0.5 / 1.5)
    assert float(loss({"u": output["u"][1:]}, target[1:])) == pytest.approx(4 * 0.5**2)
    with pytest.raises(InputError, match="points for evaluation are of the kind 1, but some are of the kind 0"):
        loss({"u": output["u"]}, target)
    with pytest.raises(InputError, match="viscosity is 0"):
        BurgersLoss(viscosity=0)


def test_points_are_read_from_a_folder_or_generated(tmp_path: Path) -> None:
    generated = points("train", count=200)
    inputs, targets = generated.batch_of(range(200))
    known = targets[:, 0] == 1
    assert int(known.sum()) == 20
    assert ((inputs[:, 0] == 0) | (inputs[:, 1].abs() == 1))[known].all()
    assert (points("val", count=200).batch_of(range(20))[1][:, 0] == 1).all()
    for split in ("train", "val"):
        np.save(tmp_path / f"{split}_features.npy", np.zeros((3, 2), np.float32))
        np.save(tmp_path / f"{split}_targets.npy", np.zeros((3, 1), np.float32))
    with pytest.raises(InputError, match=r"train_targets.npy has 1 columns"):
        points("train", str(tmp_path))
    np.save(tmp_path / "train_targets.npy", np.zeros((3, 2), np.float32))
    assert len(points("train", str(tmp_path))) == 3
    for keywords, words in (({"split": "test"}, "split is 'test'"), ({"count": 3}, "count is 3")):
        with pytest.raises(InputError, match=words):
            points(**keywords)
    with pytest.raises(InputError, match="hidden is"):
        SolutionNetwork([])
