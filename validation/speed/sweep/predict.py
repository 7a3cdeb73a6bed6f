"""Predicts the steps of a results file under the plans that were measured. It needs no GPU: rows of another machine are
predicted with the calibration of the reference GPU."""

from pathlib import Path
from typing import Any

import torch

import meshwright as mw
from meshwright.cluster.catalog import entry_reported_as
from meshwright.cluster.cluster import Cluster
from meshwright.plan import Plan
from validation.speed.step_digest import step_digest
from validation.speed.sweep.form_process import Failure, run_probe
from validation.speed.sweep.models.all_models import MODELS
from validation.speed.sweep.results import Row, current_commit, ours, read_rows, write_rows
from validation.steps.steps import recorded_on

_LIMIT_S = 180.0


def complete_rows(results: Path, names: list[str]) -> None:
    """Predicts the rows of these models again, and writes the present commit into rows without one whose digest is the
    present one."""
    rows = read_rows(results)
    commit = current_commit()
    for row in rows:
        if row["commit"] is None and row["digest"] == step_digest():
            row["commit"] = commit
        if row["model"] in names and (figures := ours(row)):
            answer = run_probe(lambda row=row: predict_row(row), _LIMIT_S)  # type: ignore[misc]
            row["predicted"] = {"failure": answer.reason} if isinstance(answer, Failure) else answer
            print(f"{row['model']}: {_errors(row['predicted'], figures)}", flush=True)
            write_rows(results, rows)
    write_rows(results, rows)


def predict_row(row: Row) -> dict[str, Any]:
    """The predicted seconds and bytes of a row's step, or why there is no prediction."""
    case, meta = MODELS[row["model"]], torch.device("meta")
    figures = ours(row) or {}
    try:
        model = case.make_model(row["tiny"], meta)
        prediction = mw.predict(
            model,
            case.make_batch(row["tiny"], meta),
            global_batch=case.samples(row["tiny"]),
            loss=case.loss,
            optimizer=case.make_optimizer(model),
            plan=Plan.model_validate(figures["plan_fields"]),
            cluster=_cluster(row["device"]),
        )
    except Exception as error:
        return {"failure": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]}
    return {"step_s": prediction.step_s, "memory_bytes": prediction.memory_bytes}


def _cluster(device: str) -> str | Cluster:
    """The reference GPU for rows of it, the catalog's GPU for others, this machine for rows of a CPU."""
    entry = entry_reported_as(device)
    if entry is None:
        return "1xcpu"
    reference = recorded_on()
    name = entry.device.name
    return reference if name in reference.nodes[0].device.name or reference.nodes[0].device.name in name else name


def _errors(predicted: dict[str, Any], figures: dict[str, Any]) -> str:
    if "failure" in predicted:
        return str(predicted["failure"])
    text = f"time {predicted['step_s'] / figures['step_s'] - 1:+.1%}"
    if "peak_bytes" in figures:
        text += f", memory {predicted['memory_bytes'] / figures['peak_bytes'] - 1:+.1%}"
    return text
