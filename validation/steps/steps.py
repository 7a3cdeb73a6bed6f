"""Step times, measured here and predicted: `python -m validation.steps.steps [NAME ...]`, or `recorded`.

On a GPU every case of cases.yaml, in bf16 (both layouts), fp32 and tf32; on CPU cores the MNIST net under one and
two ranks with the global batch of its job. Predictions are those of this machine as `local` measured it, with the
model's own operators measured beside (calibrate/model_operators.py); h200.json are measurements of another one, which
tests hold the reference GPU's calibration against, and which `recorded` shows: `held` ones, at the power limit, also
as such a GPU is predicted that nobody has calibrated.
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
from meshwright.calibrate.probe import measure_machine as measure_machine
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.launch.world import World
from meshwright.plan import Plan
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
TURNS = 7  # on CPU cores, whose speed others change: each predicts from what it measures, and then takes the steps
CPU_GLOBAL_BATCH = 128  # that of jobs/mnist.yaml


@dataclass(frozen=True)
class StepRow:
    """One case under one plan. The case's batch is that of all ranks."""

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
    """Those of h200.json, short or `held`, with their seconds."""
    known = cases()
    for row in json.loads(MEASURED.read_text())[kind]:
        yield StepRow(known[row["name"]], row["precision"], row["layout"]), row["step_s"]


def rows_here(cluster: Cluster) -> Iterator[StepRow]:
    """What can be measured on this machine; bf16 only where it has instructions for it, else a step takes minutes."""
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


# ---- predicted


def trace(row: StepRow, on_gpu: bool) -> ModelProfile:
    with torch.device("meta"):
        model = make_model(row.case)
    return trace_profile(model, _batch(row.case, "meta"), case_loss, precision=row.precision, on_gpu=on_gpu)


def predict(row: StepRow, cluster: Cluster, traced: ModelProfile | None = None) -> Prediction:
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


# ---- measured


def measure(row: StepRow, cluster: Cluster) -> float:
    """The median of `ROUNDS` rounds of steps, after some that warm up."""
    if cluster.kind == "cuda":
        return _steps(row, World(0, 0, 1, 1, 0, torch.device("cuda", 0), None), 6)
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (row, folder, max(1, cluster.cores // row.ranks)), row.ranks)
        return max(float(file.read_text()) for file in Path(folder).glob("seconds*"))


def _rank(rank: int, row: StepRow, folder: str, threads: int) -> None:
    torch.set_num_threads(threads)
    store: dist.Store | None = None
    if row.ranks > 1:
        store = dist.FileStore(str(Path(folder, "store")), row.ranks)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=row.ranks)
    taken = _steps(row, World(rank, rank, row.ranks, row.ranks, 0, torch.device("cpu"), store), 4)
    Path(folder, f"seconds{rank}").write_text(str(taken))
    if row.ranks > 1:
        dist.destroy_process_group()


def _steps(row: StepRow, world: World, steps: int) -> float:
    with world.device:
        model = make_model(row.case)
    session = Session(
        model,
        lambda held: OPTIMIZERS[row.case["optimizer"]](held.values()),
        loss=case_loss,
        plan=row.plan,
        world=world,
    )
    inputs, targets = _batch(row.case, str(world.device), row.case["batch"] // row.ranks)
    if inputs.is_floating_point():
        inputs = torch.randn_like(inputs)
    if "digits" in row.case["input"]:  # of one class they are soon learnt, and vanishing gradients are slow to compute
        targets = torch.randint(10, targets.shape, device=world.device)
    if row.layout == "channels_last":
        inputs = inputs.to(memory_format=torch.channels_last)

    def run() -> float:
        _wait(world.device)
        began = time.perf_counter()
        for _ in range(steps):
            session.step((inputs, targets))
        _wait(world.device)
        return (time.perf_counter() - began) / steps

    for _ in range(WARM_UP):
        run()
    return median(run() for _ in range(ROUNDS))


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def recorded_on() -> Cluster:
    """The GPU of h200.json, with the reference's calibration."""
    cluster = find_cluster("H200")
    node = cluster.nodes[0].model_copy(update={"device": reference_gpu()[0]})
    return cluster.model_copy(update={"nodes": (node,), "based_on": "calibrated"})


def show_recorded() -> None:
    errors: dict[str, list[float]] = {}
    for row, taken in measured_rows():
        errors.setdefault(row.precision, []).append(predict(row, recorded_on()).step_s / taken - 1)
        print(f"{row.case['name']:10} {row.precision} {row.layout:13} {errors[row.precision][-1]:+.1%}", flush=True)
    for precision, found in errors.items():
        off = [abs(error) for error in found]
        print(f"{precision}: {len(off)} steps, median error {median(off):.1%}, largest {max(off):.1%}")
    for row, taken in measured_rows("held"):
        alone, limited = (predict(row, cluster).step_s / taken - 1 for cluster in (recorded_on(), find_cluster("H200")))
        name = f"{row.case['name']} {row.precision}"
        print(f"held: {name:13} calibrated {alone:+.1%}, not calibrated {limited:+.1%}", flush=True)


def main(names: list[str]) -> None:
    if names == ["recorded"]:
        show_recorded()
        return
    cluster = find_cluster("local", measure_machine)
    turns = TURNS if cluster.kind == "cpu" else 1
    print(f"{cluster.device_count} × {cluster.nodes[0].device.name}, {cluster.based_on}; medians of {turns} turns")
    load = os.getloadavg()[0]
    if load > 1:
        print(f"{load:.1f} processes already want to run here: what is measured is slower than the machine is")
    errors = []
    for row in rows_here(cluster):
        if names and row.case["name"] not in names:
            continue
        predicted, taken = _in_turns(row, cluster, turns)
        errors.append(abs(median(predicted) / median(taken) - 1))
        print(
            f"{row.case['name']:10} batch {row.case['batch']:4} {row.ranks} ranks {row.precision} {row.layout:13}"
            f" measured {_told(taken)}  predicted {_told(predicted)}  {median(predicted) / median(taken) - 1:+.1%}",
            flush=True,
        )
        gc.collect()
        if cluster.kind == "cuda":
            torch.cuda.empty_cache()
    if errors:
        print(f"median error {median(errors):.1%}, largest {max(errors):.1%}")


def _in_turns(row: StepRow, cluster: Cluster, turns: int) -> tuple[list[float], list[float]]:
    """Predictions and measurements: a machine that slows down slows both."""
    traced = trace(row, cluster.kind == "cuda")
    found = [(predict(row, cluster, traced).step_s, measure(row, cluster)) for _ in range(turns)]
    return [predicted for predicted, _ in found], [taken for _, taken in found]


def _told(seconds: list[float]) -> str:
    spread = f" ({min(seconds) * 1e3:.1f} to {max(seconds) * 1e3:.1f})" if len(seconds) > 1 else ""
    return f"{median(seconds) * 1e3:8.2f} ms{spread}"


if __name__ == "__main__":
    main(sys.argv[1:])
