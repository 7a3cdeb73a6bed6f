"""The reference of the strategies benchmark: the loop anybody would write for one process, without Meshwright.

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

from meshwright.batch import split
from meshwright.call import bind
from meshwright.errors import InputError
from meshwright.job import Job, load_job
from meshwright.train.build import build_data, build_loading, freeze, make_model
from meshwright.train.step.loss import models_own
from meshwright.train.step.optimizer import build_optimizer


def samples_per_s(
    job_file: str, steps: int, device: str, parallel: Callable[[nn.Module], nn.Module] = lambda model: model
) -> float:
    """A plain DataLoader, forward, backward and optimizer step; the first step is not counted. `parallel` says how the
    model is run."""
    job = load_job(job_file)
    loss_function = bind(job.loss, "loss") if job.loss else models_own().function
    torch.manual_seed(job.train.seed)
    model = make_model(job).to(device)
    freeze(model, job.train.freeze)
    optimizer = build_optimizer(job.optimizer, model)
    runner = parallel(model)
    batches = _batches(job, device)
    began = 0.0
    for step in range(steps + 1):
        example = split(next(batches), job.data.target)
        found = loss_function(runner(*example.arguments, **example.keywords), example.target)
        loss = found[0] / found[1] if isinstance(found, tuple) else found  # a sum and a count
        optimizer.zero_grad()
        loss.backward()
        if job.train.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), job.train.clip_norm)
        optimizer.step()
        if step in (0, steps):
            loss.item()  # waits for the device
            began = began or time.perf_counter()
    return steps * job.train.global_batch / (time.perf_counter() - began)


def _batches(job: Job, device: str) -> Iterator[Any]:
    data, batch = build_data(job)[0], job.train.global_batch
    mapped = hasattr(data, "__getitem__")
    if mapped and len(data) < batch:
        raise InputError(f"train.global_batch is {batch}, but data.train has {len(data)} samples: lower it")
    collate = build_loading(job, torch.device(device)).collate
    loader = DataLoader(data, batch, shuffle=mapped, drop_last=True, collate_fn=collate)
    while True:
        for one in loader:
            yield tree_map(lambda value: value.to(device) if isinstance(value, torch.Tensor) else value, one)


if __name__ == "__main__":
    print(samples_per_s(sys.argv[1], int(sys.argv[2]), sys.argv[3]))
