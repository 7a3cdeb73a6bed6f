"""Compares the steps that are recorded in h200.json with predictions, in time and in memory.

`python -m validation.speed.predict` predicts every step under a plan of this package (rows whose variant begins with
`ours`) with the calibration of the reference GPU, and prints the errors, their median and the largest. Rows with a
`source` were not measured in turns with others: they are single runs, and may have no memory. The rows were measured
with commits from 977a841 to 148fb1a; the sweep (validation/speed/sweep) measures and predicts the present step.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import median
from typing import Any

from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.values import ModelProfile
from meshwright.simulator.predict import Prediction, predict_plan
from validation.memory.one_gpu import OPTIMIZERS
from validation.speed.plans import PLANS, plan_of
from validation.steps.steps import StepRow, cases, recorded_on, trace

MEASURED = Path(__file__).with_name("h200.json")


@dataclass(frozen=True)
class SpeedError:
    """The relative errors of a recorded step: positive if the prediction is too long, or too large. `memory` is None if
    the memory was not measured."""

    name: str
    batch: int
    variant: str
    time: float
    memory: float | None


def recorded_errors(names: tuple[str, ...] = ()) -> Iterator[SpeedError]:
    """The errors of all recorded steps under plans of this package, or of those of the workloads `names`."""
    for row in json.loads(MEASURED.read_text()):
        way = row["variant"].removeprefix("ours ")
        if way in PLANS and (not names or row["name"] in names):
            prediction = predict_row(row)
            yield SpeedError(
                row["name"],
                row["batch"],
                way,
                prediction.step_s / row["step_s"] - 1,
                _predicted_bytes(prediction) / row["allocated_bytes"] - 1 if "allocated_bytes" in row else None,
            )


def predict_row(row: dict[str, Any]) -> Prediction:
    """The predicted step of a row of h200.json."""
    case = {**cases()[row["name"]], "batch": row["batch"]}
    plan = plan_of(case, row["variant"].removeprefix("ours "))
    optimizer = measure_optimizer_cost(OPTIMIZERS[case["optimizer"]], multi_tensor=True)
    return predict_plan(recorded_on(), _profile(row["name"]), plan, row["batch"], optimizer)


def _predicted_bytes(prediction: Prediction) -> int:
    """The predicted peak without the batch, which was in memory before the measurement began."""
    return prediction.memory_bytes - prediction.memory.breakdown["inputs"]


@lru_cache(maxsize=1)
def _profile(name: str) -> ModelProfile:
    return trace(StepRow(cases()[name], "bf16"), on_gpu=True)


def _summary(errors: list[float]) -> str:
    sizes = [abs(error) for error in errors]
    return f"{len(sizes)} steps, median error {median(sizes):.1%}, largest {max(sizes):.1%}"


def main() -> None:
    errors = []
    for error in recorded_errors():
        errors.append(error)
        memory = "" if error.memory is None else f"  memory {error.memory:+6.1%}"
        print(f"{error.name:10} {error.batch:4} {error.variant:26} time {error.time:+6.1%}{memory}", flush=True)
    for variant in dict.fromkeys(error.variant for error in errors):
        print(f"{variant}: time, {_summary([error.time for error in errors if error.variant == variant])}")
    print(f"time, all: {_summary([error.time for error in errors])}")
    print(f"memory, all: {_summary([error.memory for error in errors if error.memory is not None])}")


if __name__ == "__main__":
    main()
