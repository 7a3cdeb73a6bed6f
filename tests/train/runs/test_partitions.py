"""All partitions of the data train the same model: by batch and by dimension exactly, by sample in another order."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from meshwright.data.batch import LoadingOptions
from meshwright.errors import InputError
from meshwright.job import parse_job
from meshwright.parallel.tensor.dimension_partition import check_dimension_partition, dimension_partition_plan
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.world import World
from meshwright.train.check import check_job
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
    from meshwright.model_io.batch import split_batch

    return dimension_partition_plan(_model(), split_batch([_rows()[0][0][None], _rows()[0][1][None]]), ranks)


def _train(rank: int, ranks: int, partition: str, parts: int | None, saved: str | None) -> dict[str, Any]:
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
    first.register_forward_hook(lambda layer, inputs, output: outputs.append(output.detach().clone()))
    loading = LoadingOptions(partition=partition, parts=parts)  # type: ignore[arg-type]
    losses = []
    if saved and (Path(saved) / "checkpoint").exists():
        session.load(Path(saved) / "checkpoint")
    for batch in session.batches(_rows(), 2, 6, loading):
        losses.append(float(session.step(batch)))
        if saved and session.steps == 3 and not (Path(saved) / "checkpoint").exists():
            session.save(Path(saved) / "checkpoint")
            break
    metrics = session.evaluate(_rows(), batch=6, loading=loading)
    return {"losses": losses, "metrics": metrics, "weights": session.state_dict(), "first": outputs[0].tolist()}


@pytest.mark.parametrize("partition", ["batch", "sample", "dimension"])
def test_ranks_train_as_one(partition: str) -> None:
    parts = 2 if partition == "sample" else None
    one_process = _train(0, 1, partition, parts, None)
    ranks = run_ranks(_train, 2, partition, parts, None)
    for result in ranks:
        assert result["losses"] == pytest.approx(one_process["losses"], rel=1e-12)
        assert result["metrics"] == pytest.approx(one_process["metrics"], rel=1e-12)
        for name, weight in one_process["weights"].items():
            torch.testing.assert_close(result["weights"][name], weight, rtol=1e-12, atol=1e-14)
    if partition == "dimension":  # every rank has the whole output of the layer that it has some columns of
        assert all(
            torch.allclose(torch.tensor(result["first"]), torch.tensor(one_process["first"])) for result in ranks
        )
    else:
        together = torch.tensor([row for result in ranks for row in result["first"]])
        assert torch.allclose(together, torch.tensor(one_process["first"]))
    assert (one_process["losses"] == _train(0, 1, "batch", None, None)["losses"]) == (partition != "sample")


def test_a_run_divided_by_sample_keeps_its_parts_on_fewer_ranks(tmp_path: Path) -> None:
    whole = _train(0, 1, "sample", 2, None)
    first = run_ranks(_train, 2, "sample", None, str(tmp_path))[0]  # two parts, since there are two ranks
    rest = _train(0, 1, "sample", None, str(tmp_path))
    assert first["losses"] + rest["losses"] == pytest.approx(whole["losses"], rel=1e-12)


def test_a_plan_that_does_not_fit_is_refused() -> None:
    from meshwright.model_io.batch import split_batch

    example = split_batch([_rows()[:2][0], _rows()[:2][1]])
    with pytest.raises(InputError, match=r"inputs over the tensor axis, but the plan \(replicate 2"):
        check_dimension_partition(Plan(axes=Axes(replicate=2)), _model(), example)
    with pytest.raises(InputError, match=r"does not split 0, which is given the input.*\{0: \{kind: row\}\}"):
        check_dimension_partition(Plan(axes=Axes(tensor=2)), _model(), example)
    with pytest.raises(InputError, match="no linear layer inside the model"):
        check_dimension_partition(Plan(), nn.Sequential(nn.Tanh(), nn.Linear(WIDTH, 1)).double(), example)
    with pytest.raises(InputError, match="batches are dicts: give pairs"):
        check_dimension_partition(Plan(), _model(), split_batch({"x": _rows()[:2][0], "target": _rows()[:2][1]}))
    check_dimension_partition(_plan("dimension", 2), _model(), example)


def test_a_job_with_a_wrong_partition_is_refused_before_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from meshwright.cluster.detect import find_cluster

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
        check_job(parse_job(raw), Plan(axes=Axes(replicate=2)), find_cluster("2xcpu"))
    with pytest.raises(
        InputError, match=r"data.parts is 3, which only data.partition: sample uses, but data.partition is dimension"
    ):
        parse_job({**raw, "data": {**raw["data"], "parts": 3}})
