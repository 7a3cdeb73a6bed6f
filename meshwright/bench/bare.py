"""The reference of the strategies benchmark: a plain PyTorch training loop in one process, without Meshwright.

`python -m meshwright.bench.bare JOB.yaml STEPS cpu|cuda` prints its samples per second.
"""

import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader

from meshwright.batch import split_batch, target_key
from meshwright.call import bind
from meshwright.errors import InputError
from meshwright.job import Job, load_job
from meshwright.train.build import build_data, build_loading, construct_model, freeze
from meshwright.train.loss.loss import loss_from_model
from meshwright.train.step.optimizer import build_optimizer


def samples_per_s(
    job_file: str, steps: int, device: str, parallel: Callable[[nn.Module], nn.Module] = lambda model: model
) -> float:
    """Returns the samples per second of a loop of DataLoader, forward, backward and optimizer step. The first step is
    not timed. `parallel` returns the module that is run in place of the model."""
    job = load_job(job_file)
    loss_function = bind(job.loss, "loss") if job.loss else loss_from_model().function
    torch.manual_seed(job.train.seed)
    model = construct_model(job).to(device)
    freeze(model, job.train.freeze)
    optimizer = build_optimizer(job.optimizer, model)
    parallel_model = parallel(model)
    batches = _batches(job, device)
    begin = 0.0
    for step in range(steps + 1):
        example = split_batch(next(batches), target_key(job.data.target, job.loss is not None))
        output = parallel_model(*example.arguments, **example.keywords)
        result = loss_function(output, example.target)
        loss = result[0] / result[1] if isinstance(result, tuple) else result  # some losses return a sum and a count
        optimizer.zero_grad()
        loss.backward()
        if job.train.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), job.train.clip_norm)
        optimizer.step()
        if step in (0, steps):
            loss.item()  # waits for the device
            begin = begin or time.perf_counter()
    return steps * job.train.global_batch / (time.perf_counter() - begin)


def _batches(job: Job, device: str) -> Iterator[Any]:
    data, batch = build_data(job)[0], job.train.global_batch
    is_mapped = hasattr(data, "__getitem__")
    if is_mapped and len(data) < batch:
        raise InputError(f"train.global_batch is {batch}, but data.train has {len(data)} samples: lower it")
    collate = build_loading(job, torch.device(device)).collate
    loader = DataLoader(data, batch, shuffle=is_mapped, drop_last=True, collate_fn=collate)
    while True:
        for samples in loader:
            yield tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, samples)


if __name__ == "__main__":
    print(samples_per_s(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
