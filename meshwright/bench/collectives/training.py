"""What combining gradients costs where it matters: the MNIST net in stock DDP, forward and backward, with each
algorithm's hook; and whole steps of a `Session` beside ranks that train each for itself."""

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import replace
from itertools import cycle, islice
from statistics import median, quantiles
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from meshwright.bench.collectives.timing import beside
from meshwright.collectives.reducer import Reducer
from meshwright.launch.world import World
from meshwright.parallel.replicate.replicate import Hook
from meshwright.plan import Axes, Gradients, Plan
from meshwright.train.session import Session
from meshwright.workloads.mnist import Net, digits

BATCH = 64
_BUDGET_S = 0.2  # little, so that what is compared lies close together
_TIMES = 4  # of the rounds that collectives alone get
_BATCHES = 4


def measure_training(
    group: dist.ProcessGroup, world: World, reducers: Mapping[str, Reducer], rounds: int
) -> dict[str, Any]:
    """Every rank calls this. `lost_s`: forward and backward beyond what they take without any exchange."""
    ways = {"native": _passes(group, None, exchange=True)}
    for name, reducer in reducers.items():
        if name != "native":
            ways[name] = _passes(group, reducer, exchange=True)
    found = beside(_passes(group, None, exchange=False), ways, group, rounds * _TIMES, _BUDGET_S)
    lost = {name: [taken - alone for taken, alone in pairs] for name, pairs in found.items()}
    native_s = median(lost["native"])
    rows = [
        {
            "algorithm": name,
            "ranks": group.size(),
            "time_s": median(taken for taken, _ in pairs),
            "spread": _quartiles([taken for taken, _ in pairs]),
            "alone_s": median(alone for _, alone in pairs),
            "lost_s": median(lost[name]),
            "spread_lost_s": _quartiles(lost[name]),
            "ratio_to_native": median(lost[name]) / native_s if native_s > 0 else None,
        }
        for name, pairs in found.items()
    ]
    sessions = _sessions(group, world, rounds)
    return {"model": "MNIST net", "batch": BATCH, "rounds": rounds * _TIMES, "rows": rows, "sessions": sessions}


def _passes(group: dist.ProcessGroup, reducer: Reducer | None, *, exchange: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, gradient_as_bucket_view=True)
    if reducer is not None:
        model.register_comm_hook(None, Hook(reducer).run)
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with nullcontext() if exchange else model.no_sync():
            nn.functional.cross_entropy(model(images), labels).backward()

    return run


def _sessions(group: dist.ProcessGroup, world: World, rounds: int) -> list[dict[str, Any]]:
    """Samples a second of all ranks: without exchange each trains its own model."""
    ranks = group.size()
    lone = replace(world, rank=0, size=1, store=None)
    ways = {}
    for name in ("native", "auto"):
        gradients = Gradients.model_validate({"algorithm": name})
        ways[name] = _steps(Plan(axes=Axes(replicate=ranks), gradients=gradients), world, BATCH * ranks)
    found = beside(_steps(Plan(), lone, BATCH), ways, group, rounds * _TIMES, _BUDGET_S)
    return [
        {
            "algorithm": name,
            "samples_per_s": BATCH * ranks / median(taken for taken, _ in pairs),
            "of_no_exchange": median(alone / taken for taken, alone in pairs),
            "spread_of_no_exchange": _quartiles([alone / taken for taken, alone in pairs]),
        }
        for name, pairs in found.items()
    ]


def _quartiles(found: list[float]) -> tuple[float, float]:
    low, _, high = quantiles(found, n=4)
    return low, high


def _steps(plan: Plan, world: World, global_batch: int) -> Callable[[], None]:
    torch.manual_seed(0)
    session = Session(
        Net(),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.01, momentum=0.9),
        loss=nn.functional.cross_entropy,
        plan=plan,
        world=world,
    )
    batches = cycle(list(islice(session.batches(digits("train"), global_batch=global_batch), _BATCHES)))

    def run() -> None:
        session.step(next(batches))

    return run
