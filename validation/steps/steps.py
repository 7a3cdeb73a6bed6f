"""Step times compared with predictions, measured on this machine or recorded on an H200.

`python -m validation.steps.steps [NAME ...]` measures and predicts steps on this machine: on a GPU every case of
cases.yaml, in bf16 (in both memory layouts), fp32 and tf32; on CPU cores the MNIST net with one and with two ranks. The
predictions use the calibration of this machine, and the model's own operators, which are measured first
(calibrate/model_operators.py).

`python -m validation.steps.steps recorded` predicts the steps that are recorded in h200.json, with the calibration of
the reference GPU. The steps under `held` ran long enough to reach the power limit of the GPU; they are also predicted
as those of an H200 that nobody has calibrated.
"""

import gc
import json
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
import yaml
from torch import Tensor
from torch.multiprocessing.spawn import spawn

from meshwright.calibrate.model_operators import measure_model_operators
from meshwright.calibrate.probe import measure_machine
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute.operator_time import reference_gpu
from meshwright.simulator.predict import Prediction, predict_plan
from meshwright.train.session import Session
from validation.memory.one_gpu import OPTIMIZERS, case_loss, make_batch, make_model

CASES = Path(__file__).with_name("cases.yaml")
MEASURED = Path(__file__).with_name("h200.json")
WARM_UP, ROUNDS = 2, 5
CPU_TURNS = (
    7  # other programs change the speed of CPU cores: each turn measures operators, predicts, and measures steps
)
CPU_GLOBAL_BATCH = 128  # as in jobs/mnist.yaml


@dataclass(frozen=True)
class StepRow:
    """One case of cases.yaml with its plan. The batch of the case is the global batch."""

    case: dict[str, Any]
    precision: str
    layout: str = "contiguous"
    ranks: int = 1

    @property
    def plan(self) -> Plan:
        return Plan.model_validate(
            {
                "axes": {"replicate": self.ranks},
                "numerics": {"precision": self.precision},
                "compute": {"layout": self.layout},
            }
        )


def cases() -> dict[str, dict[str, Any]]:
    return {case["name"]: case for case in yaml.safe_load(CASES.read_text())}


def measured_rows(kind: str = "rows") -> Iterator[tuple[StepRow, float]]:
    """The steps of h200.json with their seconds: the short ones (`rows`), or those at the power limit (`held`)."""
    cases_by_name = cases()
    for row in json.loads(MEASURED.read_text())[kind]:
        yield StepRow(cases_by_name[row["name"]], row["precision"], row["layout"]), row["step_s"]


def rows_here(cluster: Cluster) -> Iterator[StepRow]:
    """The steps that can be measured on this machine. On CPU cores bf16 is measured only if they have instructions for
    it, because a step would take minutes otherwise."""
    if cluster.kind == "cuda":
        for case in cases().values():
            yield StepRow(case, "bf16")
            if "tokens" not in case["input"]:
                yield StepRow(case, "bf16", "channels_last")
            yield StepRow(case, "fp32")
            yield StepRow(case, "tf32")
        return
    case = {**cases()["mnist"], "batch": CPU_GLOBAL_BATCH}
    for ranks in (1, 2):
        if ranks <= cluster.device_count:
            yield StepRow(case, "fp32", ranks=ranks)
            if cluster.nodes[0].device.accelerates("bf16"):
                yield StepRow(case, "bf16", ranks=ranks)


# ---- predictions


def trace(row: StepRow, on_gpu: bool) -> ModelProfile:
    with torch.device("meta"):
        model = make_model(row.case)
    return trace_profile(model, _batch(row.case, "meta"), case_loss, precision=row.precision, on_gpu=on_gpu)


def predict(row: StepRow, cluster: Cluster, traced: ModelProfile | None = None) -> Prediction:
    """The predicted step; `traced` is the profile of the model, which is traced if it is None."""
    on_gpu = cluster.kind == "cuda"
    optimizer = measure_optimizer_cost(OPTIMIZERS[row.case["optimizer"]], multi_tensor=on_gpu)
    traced = traced or trace(row, on_gpu)
    cluster = measure_model_operators(cluster, traced, row.plan, row.case["batch"])
    return predict_plan(cluster, traced, row.plan, row.case["batch"], optimizer)


def _batch(case: dict[str, Any], device: str, count: int | None = None) -> tuple[Tensor, Tensor]:
    if "digits" in case["input"]:
        count, side = count or case["batch"], case["input"]["digits"]
        with torch.device(device):
            return torch.zeros(count, 1, side, side), torch.zeros(count, dtype=torch.long)
    return make_batch({**case, "batch": count or case["batch"]}, device)


# ---- measurements


def measure(row: StepRow, cluster: Cluster) -> float:
    """The measured seconds of a step on the slowest rank: the median of `ROUNDS` rounds, after `WARM_UP` rounds."""
    if cluster.kind == "cuda":
        return _measure_step_s(row, World(0, 0, 1, 1, 0, torch.device("cuda", 0), None), 6)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (row, folder, max(1, cluster.cores // row.ranks)), row.ranks)
        return max(float(file.read_text()) for file in Path(folder).glob("seconds*"))


def _rank(rank: int, row: StepRow, folder: str, threads: int) -> None:
    torch.set_num_threads(threads)
    store: dist.Store | None = None
    if row.ranks > 1:
        store = dist.FileStore(str(Path(folder, "store")), row.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=row.ranks)
    step_s = _measure_step_s(row, World(rank, rank, row.ranks, row.ranks, 0, torch.device("cpu"), store), 4)
    Path(folder, f"seconds{rank}").write_text(str(step_s))
    if row.ranks > 1:
        dist.destroy_process_group()


def _measure_step_s(row: StepRow, world: World, steps: int) -> float:
    """The measured seconds of a step on this rank; every round has `steps` steps."""
    with world.device:
        model = make_model(row.case)
    session = Session(
        model,
        lambda parameters: OPTIMIZERS[row.case["optimizer"]](parameters.values()),
        loss=case_loss,
        plan=row.plan,
        world=world,
    )
    inputs, targets = _batch(row.case, str(world.device), row.case["batch"] // row.ranks)
    if inputs.is_floating_point():
        inputs = torch.randn_like(inputs)
    if words := row.case.get("words"):  # equal tokens would all choose the same experts
        inputs = targets = torch.randint(words, inputs.shape, device=world.device)
    if "digits" in row.case["input"]:  # a single class is soon learned, and denormal gradients are slow to compute
        targets = torch.randint(10, targets.shape, device=world.device)
    if row.layout == "channels_last":
        inputs = inputs.to(memory_format=torch.channels_last)

    def round_s() -> float:
        _wait(world.device)
        begin = time.perf_counter()
        for _ in range(steps):
            session.step((inputs, targets))
        _wait(world.device)
        return (time.perf_counter() - begin) / steps

    for _ in range(WARM_UP):
        round_s()
    return median(round_s() for _ in range(ROUNDS))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recorded_on() -> Cluster:
    """The GPU of h200.json as a cluster, with the calibration of the reference GPU."""
    cluster = find_cluster("H200")
    node = cluster.nodes[0].model_copy(update={"device": reference_gpu()[0]})
    return cluster.model_copy(update={"nodes": (node,), "based_on": "calibrated"})


def recorded_errors(kind: str = "rows") -> Iterator[tuple[StepRow, float]]:
    """The recorded steps with the relative errors of their predictions; positive if the prediction is too slow."""
    for row, step_s in measured_rows(kind):
        yield row, predict(row, recorded_on()).step_s / step_s - 1


def show_recorded() -> None:
    """Prints the errors of all recorded steps, and their median by precision."""
    errors: dict[str, list[float]] = {}
    for row, error in recorded_errors():
        errors.setdefault(row.precision, []).append(abs(error))
        print(f"{row.case['name']:10} {row.precision} {row.layout:13} {error:+.1%}", flush=True)
    for precision, values in errors.items():
        print(f"{precision}: {len(values)} steps, median error {median(values):.1%}, largest {max(values):.1%}")
    for row, step_s in measured_rows("held"):
        calibrated, catalog = (
            predict(row, cluster).step_s / step_s - 1 for cluster in (recorded_on(), find_cluster("H200"))
        )
        name = f"{row.case['name']} {row.precision}"
        print(f"held: {name:13} calibrated {calibrated:+.1%}, not calibrated {catalog:+.1%}", flush=True)


def main(names: list[str]) -> None:
    if names == ["recorded"]:
        show_recorded()
        return
    cluster = find_cluster("local", measure_machine)
    turns = CPU_TURNS if cluster.kind == "cpu" else 1
    print(f"{cluster.device_count} × {cluster.nodes[0].device.name}, {cluster.based_on}; medians of {turns} turns")
    load = os.getloadavg()[0]
    if load > 1:
        print(f"the load average is {load:.1f}: other processes make the measured steps slower")
    errors = []
    for row in rows_here(cluster):
        if names and row.case["name"] not in names:
            continue
        predicted_s, measured_s = _in_turns(row, cluster, turns)
        error = median(predicted_s) / median(measured_s) - 1
        errors.append(abs(error))
        print(
            f"{row.case['name']:10} batch {row.case['batch']:4} {row.ranks} ranks {row.precision} {row.layout:13}"
            f" measured {_format_ms(measured_s)}  predicted {_format_ms(predicted_s)}  {error:+.1%}",
            flush=True,
        )
        gc.collect()
        if cluster.kind == "cuda":
            torch.cuda.empty_cache()
    if errors:
        print(f"median error {median(errors):.1%}, largest {max(errors):.1%}")


def _in_turns(row: StepRow, cluster: Cluster, turns: int) -> tuple[list[float], list[float]]:
    """The predicted and the measured seconds of each turn. They alternate, so that a machine that becomes slower
    affects both."""
    traced = trace(row, cluster.kind == "cuda")
    pairs = [(predict(row, cluster, traced).step_s, measure(row, cluster)) for _ in range(turns)]
    return [predicted_s for predicted_s, _ in pairs], [measured_s for _, measured_s in pairs]


def _format_ms(seconds: list[float]) -> str:
    spread = f" ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})" if len(seconds) > 1 else ""
    return f"{median(seconds) * 1e3:8.2f} ms{spread}"


if __name__ == "__main__":
    main(sys.argv[1:])
