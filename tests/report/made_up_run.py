"""A run folder as `train` writes it, made up: of any length, on any number of ranks."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch import nn

from meshwright.cluster.names import cluster_from_name
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.heartbeat import Heartbeat
from meshwright.report.run.page_values import page_values
from meshwright.train.output.activity_times import SMALLEST_WINDOW, WINDOWS_BEFORE_DOUBLING, times_file
from meshwright.train.output.folder import RunFolder

BEGAN = 1_790_000_000.0
HOSTILE = "<img src=x onerror=alert(1)><b>bold</b> %{x} &lt;/script></script>"
STEP_S = 0.2
SLOW_RANK = 3  # computes a fifth longer than the others, if there are so many ranks


def make_run(folder: Path, ranks: int = 4, steps: int = 200, hostile: bool = False, finished: bool = True) -> Path:
    """Writes a run into a folder that does not exist, and returns it. With `hostile`, names hold HTML."""
    run = RunFolder(folder)
    folder.mkdir(parents=True)
    name = HOSTILE if hostile else "accuracy"
    plan = Plan(axes=Axes(replicate=ranks))
    job = {"name": "made-up", "model": {"call": HOSTILE if hostile else "module:Net"}, "log": {"profile_steps": None}}
    run.job.write_text(json.dumps(job))  # JSON is YAML
    run.plan.write_text(plan.to_yaml())
    run.device.write_text(f"cuda {HOSTILE if hostile else 'H100'}\n")
    run.metrics.write_text("".join(json.dumps(entry) + "\n" for entry in _metrics(steps, name)))
    run.times.mkdir()
    for rank in range(ranks):
        lines = (json.dumps(line) for line in _times(rank, steps, HOSTILE if hostile else f"node{rank // 8}"))
        times_file(run.times, rank).write_text("\n".join(lines) + "\n")
    run.logs.mkdir()
    for rank in range(min(ranks, 8)):
        heartbeat = Heartbeat.in_folder(run.logs, rank, attempt=1)
        heartbeat.update(steps, "backward")
    (run.logs / "rank-0.log").write_text(f"a line of the log {HOSTILE if hostile else ''}\n")
    run.page.write_text(json.dumps(_page_values(ranks, plan, hostile)))
    if finished:
        run.result.write_text(json.dumps(_result(steps, name)))
    return folder


def _page_values(ranks: int, plan: Plan, hostile: bool) -> dict[str, Any]:
    model = nn.Module()
    model.add_module(HOSTILE.replace(".", "") if hostile else "body", nn.Linear(8, 8))
    cluster = cluster_from_name(f"{ranks}xH100" if ranks <= 8 else f"{-(-ranks // 8)}x8xH100")
    values = page_values(cluster, plan, model)
    values["prediction"] = {
        "step_s": STEP_S,
        "breakdown": {"compute": 0.15, "launch": 0.01, "replicate": 0.03, "optimizer": 0.01},
        "memory_bytes": 30 * 2**30,
        "based_on": HOSTILE if hostile else "measured",
    }
    return values


def _metrics(steps: int, name: str) -> Iterator[dict[str, Any]]:
    for step in range(10, steps + 1, 10):
        loss = 2.5 * math.exp(-step / steps * 3) + 0.1 * math.sin(step)
        moment = BEGAN + step * STEP_S
        values = {"loss": loss, "lr": 0.1 * (1 - step / steps), "samples_per_s": 1e4 + 500 * math.sin(step / 50)}
        yield {"kind": "train", "step": step, "epoch": 0, **values, "time": moment}
        if step % max(50, steps // 20) == 0:
            yield {"kind": "eval", "step": step, "epoch": 0, "loss": loss, name: 1 - loss / 3, "time": moment}


def _times(rank: int, steps: int, host: str) -> Iterator[dict[str, Any]]:
    yield {"start": 0, "step": 0, "time": BEGAN, "pid": 100 + rank, "host": host, "device": "H100"}
    window, done = SMALLEST_WINDOW, 0
    slowness = 1.2 if rank == SLOW_RANK else 1.0
    while done < steps:
        while done >= window * WINDOWS_BEFORE_DOUBLING:
            window *= 2
        done = min(done + window, steps)
        computing = 0.14 * slowness * (1 + 0.02 * math.sin(done + rank))
        seconds = {
            "prepare": 0.001 * window,
            "forward": computing / 3 * window,
            "backward": computing * 2 / 3 * window,
            "exchange": max(0.01, 0.18 - computing) * window,
            "optimizer": 0.01 * window,
            "data": 0.002 * window,
            "log": 0.0005 * window,
        }
        moment = BEGAN + done * STEP_S
        yield {"step": done, "steps": window, "time": moment, "seconds": seconds, "peak_bytes": (28 + rank % 3) * 2**30}
        if done % 100 == 0:
            yield {"event": "save", "step": done, "time": moment, "seconds": 0.4}
        if done == steps // 20 * 10:  # killed in the middle, and started again
            yield {"start": 1, "step": done, "time": moment, "pid": 900 + rank, "host": host, "device": "H100"}


def _result(steps: int, name: str) -> dict[str, Any]:
    return {
        "run": "made-up-0001",
        "steps": steps,
        "loss": 0.123,
        "metrics": {"loss": 0.1, name: 0.9},
        "samples_per_s": 10_000.0,
        "skipped_steps": 0,
        "restarts": 1,
        "predicted_step_s": STEP_S,
        "measured_step_s": 0.21,
        "peak_memory_bytes": 30 * 2**30,
    }
