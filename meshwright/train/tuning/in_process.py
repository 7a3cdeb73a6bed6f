"""Times variants in this process, on a copy of the model, and leaves everything else as it was.

A user's model cannot always be sent to another process, and another process on the same GPU would need a second CUDA
context. The model itself is not used either: a plan replaces its forward functions and parameters, which could not all
be undone. So each variant gets a copy of the model, made with `copy.deepcopy`, with its own optimizer. It needs the
memory of one more set of weights than training; a variant that does not fit beside it is left out.

Each rank is alone meanwhile (steps.py), so that nothing can wait for another rank. The ranks time the same variant at
the same time and exchange their timings after each, so that one that fails is left out on all.
"""

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict
from time import perf_counter
from typing import Any

import torch

from meshwright.data.randomness import preserve_generators
from meshwright.messages.exchange import all_gather_values
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.train.session import Session
from meshwright.train.step.batch import map_tensors
from meshwright.train.torch_private import forgetting_compiled_code, without_default_group
from meshwright.train.tuning.steps import compiling_as_in, plan_of_rank, time_steps
from meshwright.train.tuning.time_limit import LimitReached, time_limit
from meshwright.train.tuning.variants import Measure, Timing
from meshwright.user.code import first_line

MakeSession = Callable[[Plan, World], Session]
"""Builds the session of a plan for one rank in a world of its own, always from the same weights."""

TakeBatches = Callable[[Session], Sequence[Any]]
"""Returns this rank's share of a few global batches, as the session takes them; always the same."""


def measure_in_process(make_session: MakeSession, batches: TakeBatches, world: World) -> Measure:
    """Returns the function that times a variant on this rank and on all others of the world, which call it
    together."""

    def measure(plan: Plan, limit_s: float, finds_spread: bool) -> list[Timing]:
        timing = _time_here(plan, make_session, batches, world, limit_s, finds_spread)
        return [_from_plain(values) for values in all_gather_values(_plain(timing))]

    return measure


def _plain(timing: Timing) -> dict[str, Any]:
    replayed = None if timing.replayed is None else [*timing.replayed]
    return {**asdict(timing), "losses": [*timing.losses], "replayed": replayed}


def _from_plain(values: dict[str, Any]) -> Timing:
    replayed = None if values["replayed"] is None else tuple(values["replayed"])
    return Timing(**{**values, "losses": tuple(values["losses"]), "replayed": replayed})


def _time_here(
    plan: Plan,
    make_session: MakeSession,
    batches: TakeBatches,
    world: World,
    limit_s: float,
    finds_spread: bool,
) -> Timing:
    own_plan = plan_of_rank(plan)
    assert own_plan is not None, "plans that divide the model are not timed"
    begin = perf_counter()
    timing = Timing()
    compiles = plan.compute.compile != "none"
    with unchanged_process(world.device), forgetting_compiled_code() if compiles else nullcontext():
        try:
            with time_limit(limit_s), without_default_group(), compiling_as_in(plan):
                alone = World(0, world.local_rank, 1, 1, 0, world.device, None)
                session = make_session(own_plan, alone)
                on_device = [map_tensors(lambda tensor: tensor.to(world.device), batch) for batch in batches(session)]
                time_steps(session, on_device, finds_spread, timing)
        except LimitReached:
            pass
        except Exception as error:  # whatever the model or the compiler raises: this variant cannot be taken
            timing.failure = first_line(error)
        session = on_device = None  # type: ignore[assignment]
    timing.seconds = perf_counter() - begin
    return timing


@contextmanager
def unchanged_process(device: torch.device) -> Iterator[None]:
    """At the end of this context, what steps change in a process is as it was: random generators, torch's settings, the
    filters of warnings, and the memory that torch keeps of the device, whose peak is counted anew. Warnings are not
    shown meanwhile."""
    cudnn, matmul = torch.backends.cudnn, torch.get_float32_matmul_precision()
    flags = cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32
    threads, gradients = torch.get_num_threads(), torch.is_grad_enabled()
    on_gpu = device.type == "cuda"
    generators = torch.cuda.get_rng_state_all() if on_gpu else []
    try:
        with preserve_generators(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        cudnn.enabled, cudnn.benchmark, cudnn.deterministic, cudnn.allow_tf32 = flags
        torch.set_float32_matmul_precision(matmul)
        torch.set_num_threads(threads)
        torch.set_grad_enabled(gradients)
        gc.collect()
        if on_gpu:
            torch.cuda.synchronize(device)
            torch.cuda.set_rng_state_all(generators)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
