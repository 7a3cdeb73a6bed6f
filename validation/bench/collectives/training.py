"""What combining gradients costs in training. Two things are measured: forward and backward pass of the MNIST net in
stock DDP with the communication hook of each algorithm; and whole steps of a `Session`, compared with ranks that train
without communication."""

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

from meshwright.collectives.reducer import Reducer
from meshwright.parallel.replicate.replicate import ReducerHook
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes, Gradients
from meshwright.processes.world import World
from meshwright.train.session import Session
from meshwright.workloads.mnist import Net, digits
from validation.bench.collectives.timing import time_against_reference

BATCH = 64
_BUDGET_S = 0.2  # short, so that the compared runs are close in time
_ROUND_FACTOR = 4  # times as many rounds as for single collectives
_BATCHES = 4


def measure_training(
    group: dist.ProcessGroup, world: World, reducers: Mapping[str, Reducer], rounds: int
) -> dict[str, Any]:
    """Returns the measurement as a JSON object. All ranks call this function together. In its rows, `alone_s` is the
    time of forward and backward pass without communication, and `lost_s` is how much longer they take with
    communication."""
    functions = {"native": _passes(group, None, exchange=True)}
    for name, reducer in reducers.items():
        if name != "native":
            functions[name] = _passes(group, reducer, exchange=True)
    times = time_against_reference(
        _passes(group, None, exchange=False), functions, group, rounds * _ROUND_FACTOR, _BUDGET_S
    )
    lost = {name: [time_s - alone_s for time_s, alone_s in pairs] for name, pairs in times.items()}
    native_s = median(lost["native"])
    rows = [
        {
            "algorithm": name,
            "ranks": group.size(),
            "time_s": median(time_s for time_s, _ in pairs),
            "spread": _quartiles([time_s for time_s, _ in pairs]),
            "alone_s": median(alone_s for _, alone_s in pairs),
            "lost_s": median(lost[name]),
            "spread_lost_s": _quartiles(lost[name]),
            "ratio_to_native": median(lost[name]) / native_s if native_s > 0 else None,
        }
        for name, pairs in times.items()
    ]
    sessions = _sessions(group, world, rounds)
    return {"model": "MNIST net", "batch": BATCH, "rounds": rounds * _ROUND_FACTOR, "rows": rows, "sessions": sessions}


def _passes(group: dist.ProcessGroup, reducer: Reducer | None, *, exchange: bool) -> Callable[[], None]:
    torch.manual_seed(0)
    model = DistributedDataParallel(Net(), process_group=group, gradient_as_bucket_view=True)
    if reducer is not None:
        model.register_comm_hook(None, ReducerHook(reducer).run)
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(10, (BATCH,))

    def run() -> None:
        model.zero_grad(set_to_none=True)
        with nullcontext() if exchange else model.no_sync():
            nn.functional.cross_entropy(model(images), labels).backward()

    return run


def _sessions(group: dist.ProcessGroup, world: World, rounds: int) -> list[dict[str, Any]]:
    """Returns, for the algorithms `native` and `auto`, the samples per second of all ranks together, and the ratio to
    ranks that each train a model alone."""
    ranks = group.size()
    single_rank = replace(world, rank=0, size=1, store=None)
    functions = {}
    for name in ("native", "auto"):
        gradients = Gradients.model_validate({"algorithm": name})
        functions[name] = _steps(Plan(axes=Axes(replicate=ranks), gradients=gradients), world, BATCH * ranks)
    times = time_against_reference(
        _steps(Plan(), single_rank, BATCH), functions, group, rounds * _ROUND_FACTOR, _BUDGET_S
    )
    return [
        {
            "algorithm": name,
            "samples_per_s": BATCH * ranks / median(time_s for time_s, _ in pairs),
            "of_no_exchange": median(alone_s / time_s for time_s, alone_s in pairs),
            "spread_of_no_exchange": _quartiles([alone_s / time_s for time_s, alone_s in pairs]),
        }
        for name, pairs in times.items()
    ]


def _quartiles(values: list[float]) -> tuple[float, float]:
    low, _, high = quantiles(values, n=4)
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
