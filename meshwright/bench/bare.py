"""The reference of the strategies benchmark: the loop anybody would write for one process, without Meshwright.

`python -m meshwright.bench.bare JOB.yaml STEPS` prints its samples per second.
"""

import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from torch.utils.data import DataLoader

from meshwright.call import bind
from meshwright.job import load_job
from meshwright.train.build import build_data, make_model
from meshwright.train.optimizer import build_optimizer


def samples_per_s(job_file: str, steps: int) -> float:
    """A plain DataLoader, forward, backward and optimizer step; the first step is not counted."""
    job = load_job(job_file)
    assert job.loss is not None
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(job.train.seed)
    model, loss_function = make_model(job).to(device), bind(job.loss, "loss")
    optimizer = build_optimizer(job.optimizer, model)
    batches = _endless(DataLoader(build_data(job)[0], job.train.global_batch, shuffle=True, drop_last=True))
    began = 0.0
    for step in range(steps + 1):
        inputs, targets = (tensor.to(device) for tensor in next(batches))
        loss = loss_function(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in (0, steps):
            loss.item()  # waits for the device
            began = began or time.perf_counter()
    return steps * job.train.global_batch / (time.perf_counter() - began)


def _endless(loader: DataLoader[Any]) -> Iterator[Any]:
    while True:
        yield from loader


if __name__ == "__main__":
    print(samples_per_s(sys.argv[1], int(sys.argv[2])))
