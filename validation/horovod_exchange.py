"""`python -m validation.horovod_exchange [--ranks 2] [--rounds 12] [--json]` measures what the exchange of gradients
adds to a step on CPU ranks: through the `DistributedOptimizer` of `meshwright.compat.horovod`, and through DDP over
Gloo. Both are compared with the same loop without an exchange, in the same processes, which take turns in each
round."""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import meshwright.compat.horovod as hvd
from meshwright.compat.horovod.launcher.arguments import LaunchOptions
from meshwright.compat.horovod.launcher.static import run_static
from meshwright.compat.horovod.variables import read_horovod_variables
from meshwright.processes.loopback import connect_store
from meshwright.workloads.mnist import Net

BATCH, STEPS, WARM_UP = 64, 12, 5
LOOPS = ("no exchange", "DDP over Gloo", "DistributedOptimizer")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m validation.horovod_exchange", description=__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args()
    command = (sys.executable, "-m", __spec__.name, str(options.rounds), "json" if options.json else "table")
    run_static(LaunchOptions(command, options.ranks, variables={"OMP_NUM_THREADS": "1"}))


def measure(rounds: int) -> dict[str, Any]:
    """Returns the median seconds of a step of each loop, in each round, as the slowest rank has them."""
    torch.set_num_threads(1)
    hvd.init()
    torch.manual_seed(hvd.rank())
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))
    steps = {name: _step(name, images, labels) for name in LOOPS}
    seconds: dict[str, list[float]] = {name: [] for name in LOOPS}
    for step in steps.values():
        for _ in range(WARM_UP):
            step()
    for number in range(rounds):
        for name in LOOPS[number % len(LOOPS) :] + LOOPS[: number % len(LOOPS)]:
            hvd.barrier()
            times = []
            for _ in range(STEPS):
                begin = time.perf_counter()
                steps[name]()
                times.append(time.perf_counter() - begin)
            of_ranks = hvd.allgather(torch.tensor([median(times)], dtype=torch.float64))
            seconds[name].append(float(of_ranks.max()))
    return seconds


def _step(name: str, images: torch.Tensor, labels: torch.Tensor) -> Callable[[], None]:
    """Returns a function that makes one step of training the MNIST network."""
    torch.manual_seed(0)
    model: nn.Module = Net()
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.5)
    if name == "DDP over Gloo":
        variables = read_horovod_variables()
        assert variables.store is not None
        store = connect_store(variables.store.host, variables.store.port, timedelta(seconds=60))
        dist.init_process_group(
            "gloo", store=dist.PrefixStore("ddp", store), rank=variables.rank, world_size=variables.size
        )
        model = DistributedDataParallel(model)
    elif name == "DistributedOptimizer":
        optimizer = hvd.DistributedOptimizer(optimizer, model.named_parameters())

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(images), labels).backward()
        optimizer.step()

    return step


def summary(seconds: dict[str, list[float]]) -> dict[str, Any]:
    """Returns the medians over the rounds, and the ratio of what the exchanges add: of the medians, and its range over
    the rounds."""
    bare, ddp, ours = (seconds[name] for name in LOOPS)
    added = [(a - c, b - c) for a, b, c in zip(ours, ddp, bare, strict=True)]
    ratios = sorted(a / b for a, b in added if b > 0)
    return {
        "step_s": {name: median(values) for name, values in seconds.items()},
        "added_s": {"DDP over Gloo": median(b for _, b in added), "DistributedOptimizer": median(a for a, _ in added)},
        "ratio": median(a for a, _ in added) / median(b for _, b in added),
        "ratio_range": [ratios[0], ratios[-1]],
        "rounds": len(bare),
        "rounds_slower_than_ddp": sum(a > b for a, b in zip(ours, ddp, strict=True)),
    }


def _run_as_rank(rounds: int, output: str) -> None:
    result = summary(measure(rounds))
    if hvd.rank() == 0:
        if output == "json":
            print(json.dumps(result), flush=True)
        else:
            for name in LOOPS:
                added = result["added_s"].get(name)
                more = f", {added * 1e3:.2f} ms for the exchange" if added is not None else ""
                print(f"{name:<22} {result['step_s'][name] * 1e3:7.2f} ms{more}", flush=True)
            low, high = result["ratio_range"]
            print(
                f"ratio of the exchanges {result['ratio']:.2f} (rounds: {low:.2f} to {high:.2f}); slower than DDP in"
                f" {result['rounds_slower_than_ddp']} of {result['rounds']} rounds",
                flush=True,
            )
    hvd.barrier()
    dist.destroy_process_group()
    hvd.shutdown()


if __name__ == "__main__":
    if "HOROVOD_RANK" in os.environ:
        _run_as_rank(int(sys.argv[1]), sys.argv[2])
    else:
        main()
