"""The three ways to divide data train the same model: by batch and by dimension exactly, by sample in its own order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshwright.data.batch import Loading
from meshwright.errors import InputError
from meshwright.job import parse_job
from meshwright.launch.world import World
from meshwright.parallel.tensor.dimension import check_dimension, dimension_plan
from meshwright.plan import Axes, Plan
from meshwright.train.check import check
from meshwright.train.session import Session
from tests.ranks import run_ranks

WIDTH = 7  # which two ranks do not divide evenly


def _rows() -> TensorDataset:
    random = torch.Generator().manual_seed(0)
    inputs = torch.randn(22, WIDTH, generator=random, dtype=torch.float64)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def _model() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(WIDTH, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def _plan(partition: str, ranks: int) -> Plan:
    if partition != "dimension":
        return Plan(axes=Axes(replicate=ranks))
    from meshwright.batch import split

    return dimension_plan(_model(), split([_rows()[0][0][None], _rows()[0][1][None]]), ranks)


def _trained(rank: int, ranks: int, partition: str, parts: int | None, saved: str | None) -> dict[str, Any]:
    outputs: list[Tensor] = []
    session = Session(
        _model(),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1, momentum=0.9),
        loss=nn.functional.mse_loss,
        plan=_plan(partition, ranks),
        world=World(rank, rank, ranks, ranks, 0, torch.device("cpu"), None),
        sample=list(_rows()[:2]),
    )
    first = session.module.get_submodule("0")
    first.register_forward_hook(lambda layer, given, output: outputs.append(output.detach().clone()))
    loading = Loading(partition=partition, parts=parts)  # type: ignore[arg-type]
    losses = []
    if saved and (Path(saved) / "kept").exists():
        session.load(Path(saved) / "kept")
    for batch in session.batches(_rows(), 2, 6, loading):
        losses.append(float(session.step(batch)))
        if saved and session.steps == 3 and not (Path(saved) / "kept").exists():
            session.save(Path(saved) / "kept")
            break
    found = session.evaluate(_rows(), batch=6, loading=loading)
    return {"losses": losses, "found": found, "weights": session.state_dict(), "first": outputs[0].tolist()}


@pytest.mark.parametrize("partition", ["batch", "sample", "dimension"])
def test_ranks_train_as_one(partition: str) -> None:
    parts = 2 if partition == "sample" else None
    alone = _trained(0, 1, partition, parts, None)
    ranks = run_ranks(_trained, 2, partition, parts, None)
    for told in ranks:
        assert told["losses"] == pytest.approx(alone["losses"], rel=1e-12)
        assert told["found"] == pytest.approx(alone["found"], rel=1e-12)
        for name, weight in alone["weights"].items():
            torch.testing.assert_close(told["weights"][name], weight, rtol=1e-12, atol=1e-14)
    if partition == "dimension":  # every rank has the whole output of the layer that it has some columns of
        assert all(torch.allclose(torch.tensor(told["first"]), torch.tensor(alone["first"])) for told in ranks)
    else:
        together = torch.tensor([row for told in ranks for row in told["first"]])
        assert torch.allclose(together, torch.tensor(alone["first"]))
    assert (alone["losses"] == _trained(0, 1, "batch", None, None)["losses"]) == (partition != "sample")


def test_a_run_by_sample_goes_on_with_its_parts_on_fewer_ranks(tmp_path: Path) -> None:
    whole = _trained(0, 1, "sample", 2, None)
    first = run_ranks(_trained, 2, "sample", None, str(tmp_path))[0]  # two parts, since there are two ranks
    rest = _trained(0, 1, "sample", None, str(tmp_path))
    assert first["losses"] + rest["losses"] == pytest.approx(whole["losses"], rel=1e-12)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    from meshwright.batch import split

    example = split([_rows()[:2][0], _rows()[:2][1]])
    with pytest.raises(InputError, match=r"inputs over the tensor axis, but the plan \(replicate 2"):
        check_dimension(Plan(axes=Axes(replicate=2)), _model(), example)
    with pytest.raises(InputError, match=r"does not split 0, which is given the input.*\{0: \{kind: row\}\}"):
        check_dimension(Plan(axes=Axes(tensor=2)), _model(), example)
    with pytest.raises(InputError, match="no linear layer inside the model"):
        check_dimension(Plan(), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 1)).double(), example)
    with pytest.raises(InputError, match="batches are dicts: give pairs"):
        check_dimension(Plan(), _model(), split({"x": _rows()[:2][0], "target": _rows()[:2][1]}))
    check_dimension(_plan("dimension", 2), _model(), example)


def test_a_job_is_told_before_it_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from meshwright.cluster.detect import find

    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    raw: dict[str, Any] = {
        "model": {"call": "meshwright.workloads.regression:Regression"},
        "data": {
            "train": {"call": "meshwright.workloads.rows:rows", "count": 100},
            "synthetic": True,
            "partition": "dimension",
        },
        "loss": {"call": "torch.nn.functional:mse_loss"},
        "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
    }
    with pytest.raises(InputError, match="divides inputs over the tensor axis"):
        check(parse_job(raw), Plan(axes=Axes(replicate=2)), find("2xcpu"))
    with pytest.raises(InputError, match=r"data.parts is 3, into which data.partition: sample"):
        parse_job({**raw, "data": {**raw["data"], "parts": 3}})
