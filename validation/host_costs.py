"""What the host spends in a step beside launching operators, measured here: `python -m validation.host_costs`.

All figures are in operators: seconds of the host, divided by those that it takes to launch one operator of a training
step (`launch_latency`). The simulator has the constants that they are printed beside.

On a GPU (simulator/compute/passes.py), for rows of layers so small that the device waits for its host:

    step overhead      seconds of a step of our session - its operators, on a line over the number of parameters
    cast               what a step in bf16 takes longer than one in fp32, for each of its casts
    without gradients  an operator of a single-tensor optimizer

On CPU ranks (simulator/runtime.py), seconds of the process, for a small decoder under two ranks and under one:

    unit     what FSDP2 adds for each of its units       message  what tensor parallelism adds for each collective
    stage    what a pipeline adds in every microbatch
"""

import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from statistics import linear_regression, median
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.multiprocessing.spawn import spawn

from meshwright.calibrate.device_rates import launch_latency
from meshwright.calibrate.timing import seconds
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.profile.optimizer import measure_optimizer_cost
from meshwright.profile.tracing.trace import trace_profile
from meshwright.profile.values import ModelProfile
from meshwright.simulator.compute import passes
from meshwright.simulator.compute.executed_profile import executed_profile, is_cast
from meshwright.simulator.runtime import OUR_RUNTIME
from meshwright.simulator.tensor.messages import tensor_messages
from meshwright.train.session import Session
from meshwright.workloads.text.decoder import Decoder

_ROWS_OF_LAYERS = (8, 32, 96)
_WIDTH, _SAMPLES = 16, 4
_BLOCKS, _TOKENS, _VOCABULARY = 4, 8, 64
_WARM_UP, _STEPS, _ROUNDS = 3, 10, 5
_BUDGET_S = 2.0
_OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "AdamW": lambda p: torch.optim.AdamW(p, foreach=False),
    "RMSprop": lambda p: torch.optim.RMSprop(p, foreach=False),
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
}


# ---- a GPU's host


def _measure_gpu(device: torch.device) -> None:
    launch_s = launch_latency(device)
    print(f"launching one operator takes {launch_s * 1e6:.1f} µs")
    parameters, overheads = [], []
    for layers in _ROWS_OF_LAYERS:
        step_s, profile = _session_step(layers, "fp32", device)
        operators = sum(s.block_count * len(s.operators) for s in profile.segments)
        parameters.append(float(len(profile.parameters)))
        overheads.append(step_s / launch_s - operators)
    slope, intercept = linear_regression(parameters, overheads)
    _print_beside("step overhead", intercept, passes.STEP_OVERHEAD)
    _print_beside("step overhead per parameter", slope, passes.STEP_OVERHEAD_PER_PARAMETER)
    half_s, half = _session_step(_ROWS_OF_LAYERS[-1], "bf16", device)
    casts = sum(s.block_count for s in half.segments for o in s.operators if is_cast(o))
    others = sum(s.block_count for s in half.segments for o in s.operators if not is_cast(o))
    _print_beside("cast", (half_s / launch_s - overheads[-1] - others) / casts, passes.CAST)
    for name, make_optimizer in _OPTIMIZERS.items():
        operator_s = _single_tensor_operator_s(make_optimizer, device)
        _print_beside(f"without gradients, {name}", operator_s / launch_s, passes.WITHOUT_GRADIENTS)


def _session_step(layers: int, precision: str, device: torch.device) -> tuple[float, ModelProfile]:
    """Seconds of a step of a row of layers, and its profile."""
    model = nn.Sequential(*(m for _ in range(layers) for m in (nn.Linear(_WIDTH, _WIDTH), nn.ReLU()))).to(device)
    batch = (torch.randn(_SAMPLES, _WIDTH, device=device), torch.randn(_SAMPLES, _WIDTH, device=device))
    profile = trace_profile(model, batch, F.mse_loss, precision=precision, merge_equal_blocks=False)
    session = Session(
        model,
        lambda parameters: torch.optim.AdamW(parameters.values()),
        loss=F.mse_loss,
        plan=Plan.model_validate({"numerics": {"precision": precision}}),
        world=World(0, 0, 1, 1, 0, device, None),
    )
    return seconds(lambda: session.step(batch), device, _BUDGET_S), executed_profile(profile)


def _single_tensor_operator_s(
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer], device: torch.device
) -> float:
    parameters = [nn.Parameter(torch.zeros(_WIDTH, device=device)) for _ in range(_ROWS_OF_LAYERS[-1])]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    cost = measure_optimizer_cost(make_optimizer, multi_tensor=False)
    optimizer = make_optimizer(parameters)
    return seconds(optimizer.step, device, _BUDGET_S) / len(parameters) / cost.operators_per_parameter


# ---- CPU ranks


def _measure_cpu() -> None:
    with torch.device("meta"):
        model = _decoder()
    sample = torch.zeros(_SAMPLES, _TOKENS, dtype=torch.long)
    profile = trace_profile(model, (sample, sample), _token_loss, on_gpu=False, with_structure=True)
    assert profile.structure is not None
    cuts = profile.structure.cuts
    plans = {
        "one rank": Plan(),
        "unit": Plan.model_validate({"axes": {"shard": 2}}),
        "message": Plan.model_validate({"axes": {"tensor": 2}}),
        "stage": Plan.model_validate(
            {"axes": {"pipeline": 2}, "pipeline": {"cuts": [cuts[len(cuts) // 2].after], "microbatches": 4}}
        ),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    launch_s = launch_latency(torch.device("cpu"))
    torch.set_num_threads(threads)
    print(f"launching one operator takes {launch_s * 1e6:.1f} µs")
    taken = {name: _process_seconds(plan) for name, plan in plans.items()}
    messages = sum(message.times for message in tensor_messages(profile, plans["message"], _SAMPLES)[0])
    microbatches = plans["stage"].microbatches
    added = {
        "unit": (taken["unit"] - taken["one rank"]) / (len(profile.blocks) + 1),
        "message": (taken["message"] - taken["one rank"]) / messages,
        "stage": taken["stage"] / microbatches - taken["one rank"] / 2,
    }
    for name, added_s in added.items():
        _print_beside(name, added_s / launch_s, getattr(OUR_RUNTIME.orchestration, name))


def _process_seconds(plan: Plan) -> float:
    """Seconds of the busiest rank's process for a step in which each microbatch of a rank has `_SAMPLES` samples."""
    with tempfile.TemporaryDirectory() as folder:
        spawn(_rank, (plan, folder), plan.world_size)
        return max(float(file.read_text()) for file in Path(folder).glob("seconds*"))


def _rank(rank: int, plan: Plan, folder: str) -> None:
    torch.set_num_threads(1)
    size = plan.world_size
    store: dist.Store | None = None
    if size > 1:
        store = dist.FileStore(str(Path(folder, "store")), size)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=size)
    batch: Any = tuple(torch.randint(_VOCABULARY, (_SAMPLES * plan.microbatches, _TOKENS)) for _ in range(2))
    session = Session(
        _decoder(),
        lambda parameters: torch.optim.SGD(parameters.values(), lr=0.1),
        loss=_token_loss,
        plan=plan,
        world=World(rank, rank, size, size, 0, torch.device("cpu"), store),
        sample=batch,
    )
    rounds = []
    for number in range(_WARM_UP + _ROUNDS):
        began = time.process_time()
        for _ in range(_STEPS):
            session.step(batch)
        if number >= _WARM_UP:
            rounds.append((time.process_time() - began) / _STEPS)
    Path(folder, f"seconds{rank}").write_text(str(median(rounds)))
    if size > 1:
        dist.destroy_process_group()


def _decoder() -> Decoder:
    return Decoder(layers=_BLOCKS, hidden=32, heads=4, sequence=_TOKENS, vocabulary=_VOCABULARY, tied=False)


def _token_loss(scores: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(scores.flatten(0, 1), targets.flatten())


def _print_beside(name: str, measured: float, constant: float) -> None:
    print(f"{name:28} measured {measured:7.2f}   simulator {constant:g}", flush=True)


if __name__ == "__main__":
    if torch.cuda.is_available():
        _measure_gpu(torch.device("cuda", 0))
    _measure_cpu()
