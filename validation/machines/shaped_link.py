"""Which plans are chosen for two machines with a fast and with a slow link between them: `python -m
validation.machines.shaped_link` joins two network namespaces, once as they are and once limited to 100 Mbit/s, lets
`meshwright doctor` measure the link under torchrun, and lets `meshwright train` choose a plan. Then both plans train on
both links, in turns. Needs root. The two machines share the cores of this one.

Measured on two idle Neoverse cores, 12 steps a run, two rounds, ms a step:

link          replicas (chosen for the link as it is)    pipeline of 2, gpipe, 4 microbatches (chosen for 100 Mbit/s)
as it is      257, 256                                   367, 359
100 Mbit/s    998, 1003                                  640, 633
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from validation.machines.namespaces import Machine, two_machines, why_not

LINKS = {"as it is": None, "100 Mbit/s": "100mbit"}
WIDTH, LAYERS, BATCH, STEPS, ROUNDS = 512, 8, 1024, 12, 2


class Wide(nn.Module):
    """Has 8.4 MB of weights, and passes 2 MB between layers for a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(LAYERS)))
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        scores: Tensor = self.head(self.layers(inputs))
        return scores


def samples() -> TensorDataset:
    generator = torch.Generator().manual_seed(0)
    return TensorDataset(torch.randn(2048, WIDTH, generator=generator), torch.randint(10, (2048,), generator=generator))


def _job(folder: Path, plan: Any) -> Path:
    content = {
        "model": {"call": "validation.machines.shaped_link:Wide"},
        "data": {"train": {"call": "validation.machines.shaped_link:samples"}},
        "loss": {"call": "torch.nn.functional:cross_entropy"},
        "optimizer": {"call": "torch.optim:SGD", "lr": 0.01},
        "train": {"steps": STEPS, "global_batch": BATCH},
        "checkpoint": {"every_steps": None},
        "log": {"every_steps": 4, "tensorboard": False},
        "tune": False,
        "plan": plan,
        "output": str(folder / "runs"),
    }
    file = folder / "wide.yaml"
    file.write_text(yaml.safe_dump(content))
    return file


def _torchrun(machines: tuple[Machine, Machine], folder: Path, *words: str) -> str:
    """Runs meshwright with these arguments on both machines. Returns the output of the first."""
    processes: list[subprocess.Popen[str]] = []
    for machine in machines:
        options = {
            "--nnodes": "2",
            "--nproc-per-node": "1",
            "--rdzv-backend": "c10d",
            "--rdzv-endpoint": f"{machines[0].address}:29500",
            "--rdzv-conf": f"is_host={int(machine is machines[0])}",
            "--local-addr": machine.address,
        }
        launcher = [sys.executable, "-m", "torch.distributed.run", *(word for pair in options.items() for word in pair)]
        cache = str(folder / "cache")
        log = folder / f"{machine.name}.log"
        processes.append(machine.start(*launcher, "-m", "meshwright", *words, log=log, XDG_CACHE_HOME=cache))
    output = folder / f"{machines[0].name}.log"
    if any(process.wait(600) for process in processes):
        raise RuntimeError(output.read_text())
    return output.read_text()


def _train(machines: tuple[Machine, Machine], folder: Path, plan: Any) -> tuple[dict[str, Any], float]:
    """Trains; returns the plan, and the seconds of a step after the first ones."""
    _torchrun(machines, folder, "train", str(_job(folder, plan)), "--resume", "never")
    run = max((folder / "runs").iterdir())
    entries = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    rates = [entry["samples_per_s"] for entry in entries if entry["kind"] == "train" and entry["samples_per_s"]]
    return yaml.safe_load((run / "plan.yaml").read_text()), BATCH / median(rates[1:])


def main() -> None:
    if reason := why_not():
        sys.exit(reason)
    plans: dict[str, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as temporary, two_machines() as machines:
        folders = {name: Path(temporary, str(number)) for number, name in enumerate(LINKS)}
        for name, rate in LINKS.items():
            _limit(machines, rate)
            folders[name].mkdir()
            report = _torchrun(machines, folders[name], "doctor")
            print(f"{name}: {next(line.strip() for line in report.splitlines() if 'to the first' in line)}", flush=True)
            plans[name], _ = _train(machines, folders[name], "auto")
            print(f"{name}: chosen {plans[name]}", flush=True)
        for name, rate in LINKS.items():
            _limit(machines, rate)
            times: dict[str, list[float]] = {other: [] for other in plans}
            for _ in range(ROUNDS):
                for other, plan in plans.items():
                    times[other].append(_train(machines, folders[name], plan)[1])
            for other, seconds in times.items():
                rounds = ", ".join(f"{value * 1e3:.0f}" for value in seconds)
                print(f"link {name}, plan chosen for '{other}': {rounds} ms a step", flush=True)


def _limit(machines: tuple[Machine, Machine], rate: str | None) -> None:
    for machine in machines:
        machine.shape(rate)


if __name__ == "__main__":
    main()
