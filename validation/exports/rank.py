"""One rank that trains by an exported configuration with DeepSpeed or Accelerate, or by the plan itself with this
package: `python -m validation.exports.rank PROGRAM FILE JOB STEPS`. The model with its initial weights, the data and
their order come from the job. What the configuration says is left to the program that reads it. Rank 0 prints the
losses of all steps, the median time of a step, and what the program says about its layout."""

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader, DistributedSampler, Subset

from meshwright.job import Job, load_job, load_plan
from meshwright.train.build import build_data, build_initialized_model
from meshwright.train.parallelize import parallelize
from meshwright.train.step.optimizer import build_optimizer
from meshwright.user.call import bind
from validation.bench.peers.ranks import PREFIX
from validation.bench.peers.task import sample_order

WARM_UP_STEPS = 4
Step = Callable[[], float]  # makes a step and returns this rank's mean loss of it


def batches(job: Job, samples: int, steps: int, microbatches: int) -> Iterator[list[Any]]:
    """Yields this rank's microbatches of each step: the global batches that we train on, divided among ranks."""
    data, batch = build_data(job)[0], job.train.global_batch
    chosen = Subset(data, sample_order(job.train.seed, len(data), batch, steps).tolist())
    loader = iter(DataLoader(chosen, samples, sampler=DistributedSampler(chosen, shuffle=False)))
    for _ in range(steps):
        yield [next(loader) for _ in range(microbatches)]


def train_with_deepspeed(file: str, job: Job, steps: int) -> tuple[Iterator[float], dict[str, Any]]:
    import deepspeed

    # DeepSpeed would first compile an all-reduce in shared memory, for minutes; it goes through Gloo instead.
    deepspeed.ops.__compatible_ops__ = {}
    dist.init_process_group("gloo")
    deepspeed.init_distributed(dist_backend="gloo")
    model = build_initialized_model(job)
    # The configuration has the optimizer.
    engine, _, _, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=file)
    loss_of = loss_function(job)

    def losses() -> Iterator[float]:
        accumulation = engine.gradient_accumulation_steps()
        for parts in batches(job, engine.train_micro_batch_size_per_gpu(), steps, accumulation):
            total = 0.0
            for inputs, target in parts:
                loss = loss_of(engine(inputs), target)
                engine.backward(loss)
                engine.step()
                total += float(loss.detach()) / accumulation
            yield total

    layout = {
        "ranks": engine.dp_world_size,
        "stage": engine.zero_optimization_stage(),
        "samples": engine.train_micro_batch_size_per_gpu(),
        "accumulation": engine.gradient_accumulation_steps(),
        "global_batch": engine.train_batch_size(),
        "precision": str(engine.torch_autocast_dtype()) if engine.torch_autocast_enabled() else "fp32",
        "optimizer": type(getattr(engine.optimizer, "optimizer", engine.optimizer)).__name__,
    }
    return losses(), layout


def train_with_accelerate(file: str, job: Job, steps: int) -> tuple[Iterator[float], dict[str, Any]]:
    from accelerate import Accelerator
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    # What `accelerate launch` hands to the ranks, which are started already.
    arguments = launch_command_parser().parse_args(["--config_file", file, "script.py"])
    variables = prepare_multi_gpu_env(_validate_launch_command(arguments)[0])
    os.environ.update({name: value for name, value in variables.items() if name.startswith(("ACCELERATE_", "FSDP_"))})
    accelerator = Accelerator(cpu=True)
    model = build_initialized_model(job)
    optimizer = build_optimizer(job.optimizer, model)
    prepared, optimizer = accelerator.prepare(model, optimizer)
    loss_of, accumulation = loss_function(job), accelerator.gradient_accumulation_steps
    samples = job.train.global_batch // accelerator.num_processes // accumulation

    def losses() -> Iterator[float]:
        for parts in batches(job, samples, steps, accumulation):
            total = 0.0
            for inputs, target in parts:
                with accelerator.accumulate(prepared):
                    with accelerator.autocast():
                        loss = loss_of(prepared(inputs), target)
                    accelerator.backward(loss)
                    if accelerator.sync_gradients and job.train.clip_norm:
                        accelerator.clip_grad_norm_(prepared.parameters(), job.train.clip_norm)
                    optimizer.step()
                    optimizer.zero_grad()
                total += float(loss.detach()) / accumulation
            yield total

    layout = {
        "ranks": accelerator.num_processes,
        "kind": str(accelerator.distributed_type).removeprefix("DistributedType."),
        "wrapper": type(prepared).__name__,
        "samples": samples,
        "accumulation": accumulation,
        "global_batch": samples * accelerator.num_processes * accumulation,
        "precision": accelerator.mixed_precision,
    }
    return losses(), layout


def train_by_plan(file: str, job: Job, steps: int) -> tuple[Iterator[float], dict[str, Any]]:
    plan = load_plan(file)
    model = build_initialized_model(job)
    loss_of = loss_function(job)
    session = parallelize(
        model,
        build_optimizer(job.optimizer, model),
        loss=loss_of,
        plan=plan,
        clip_norm=job.train.clip_norm,
        device="cpu",
    )
    samples = job.train.global_batch // plan.data_ranks

    def losses() -> Iterator[float]:
        for (batch,) in batches(job, samples, steps, 1):
            yield float(session.step(batch))

    return losses(), {"ranks": plan.world_size, "plan": plan.summary()}


def loss_function(job: Job) -> Callable[[Any, Any], Tensor]:
    assert job.loss is not None
    return bind(job.loss, "loss")


PROGRAMS = {"deepspeed": train_with_deepspeed, "accelerate": train_with_accelerate, "meshwright": train_by_plan}


def main() -> None:
    program, file, job_file, steps = sys.argv[1:]
    losses, layout = PROGRAMS[program](file, load_job(job_file), int(steps))
    values, seconds = [], []
    while True:
        begin = time.perf_counter()
        loss = next(losses, None)
        if loss is None:
            break
        seconds.append(time.perf_counter() - begin)
        values.append(loss)
    mean = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(mean)
    if dist.get_rank() == 0:
        means = (mean / dist.get_world_size()).tolist()
        step_s = median(seconds[WARM_UP_STEPS:])
        print(PREFIX + json.dumps({"losses": means, "step_s": step_s, "layout": layout}), flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
