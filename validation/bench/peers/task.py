"""What every peer's script trains, and how it is timed. The model, its initial weights, the order of samples, the loss
and the optimizer come from the job, and are the same for all peers and for us. The loop itself is written by each
script in the way its library documents.

`python -m validation.bench.peers.NAME JOB.yaml STEPS SETTINGS PRECISION cpu|cuda` is run once per rank, with the
environment variables that torchrun sets. Rank 0 prints one line: `PREFIX` and a JSON object.
"""

import json
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Adam, AdamW, Optimizer
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, DistributedSampler, Subset

from meshwright.data.order import permutation
from meshwright.job import Job, load_job
from meshwright.model_io.batch import split_batch, target_key
from meshwright.processes.network.own_user import admit_own_user_only
from meshwright.train.build import build_data, build_initialized_model, build_loading
from meshwright.train.loss.loss import loss_from_model
from meshwright.train.step.optimizer import build_optimizer, use_fused_kernels
from meshwright.user.call import bind
from validation.bench.peers.ranks import PREFIX

WARM_UP_STEPS = 5  # not timed: compilation, allocations, and the buckets that DDP builds after its first step


@dataclass(frozen=True)
class PeerTask:
    """What one rank of a peer trains. `steps` are timed, after `WARM_UP_STEPS` more. `is_best` says whether to use the
    options that the peer's documentation recommends for speed, in place of its defaults. `precision` is `fp32` or
    `bf16`."""

    job: Job
    steps: int
    is_best: bool
    precision: str
    device_kind: str

    @property
    def total_steps(self) -> int:
        return self.steps + WARM_UP_STEPS

    @property
    def device(self) -> torch.device:
        """This rank's device. The process group must have been initialized."""
        return torch.device("cuda", dist.get_node_local_rank()) if self.device_kind == "cuda" else torch.device("cpu")

    @property
    def backend(self) -> str:
        return "nccl" if self.device_kind == "cuda" else "gloo"

    @property
    def clip_norm(self) -> float | None:
        return self.job.train.clip_norm

    def model(self) -> nn.Module:
        """Returns the model with the initial weights that our ranks start with, on the CPU."""
        return build_initialized_model(self.job)

    def optimizer(self, model: nn.Module) -> Optimizer:
        """Returns the job's optimizer. At the peer's best it has fused kernels, if torch has them: for weights that
        FSDP2 has sharded, only those of Adam and AdamW."""
        optimizer = build_optimizer(self.job.optimizer, model)
        is_sharded = any(isinstance(parameter, DTensor) for parameter in model.parameters())
        has_kernels = isinstance(optimizer, Adam | AdamW) if is_sharded else "fused" in optimizer.defaults
        if self.is_best and has_kernels:
            use_fused_kernels(optimizer)
        return optimizer

    @cached_property
    def data(self) -> Dataset[Any]:
        """The samples of all steps, in the order in which our ranks visit them: read in sequence, they form the same
        global batches."""
        data, batch = build_data(self.job)[0], self.job.train.global_batch
        return Subset(data, sample_order(self.job.train.seed, len(data), batch, self.total_steps).tolist())

    def loader(self, ranks: int, sampler: Any = None) -> DataLoader[Any]:
        """Returns a loader of this rank's share of each global batch. Without a sampler, the peer's library divides the
        samples among ranks."""
        loading = build_loading(self.job, torch.device(self.device_kind))
        return DataLoader(
            self.data,
            self.job.train.global_batch // ranks,
            sampler=sampler,
            num_workers=loading.workers,
            pin_memory=loading.pin_memory,
            collate_fn=loading.collate,
            drop_last=True,
        )

    def distributed_loader(self) -> DataLoader[Any]:
        """Returns a loader with PyTorch's DistributedSampler, for peers that leave the loader to the user."""
        return self.loader(dist.get_world_size(), DistributedSampler(self.data, shuffle=False))

    @cached_property
    def _loss_function(self) -> Callable[[Any, Any], Any]:
        return bind(self.job.loss, "loss") if self.job.loss else loss_from_model().function

    def loss(self, model: nn.Module | Any, batch: Any) -> Tensor:
        """Runs the model's forward pass, and returns the loss of this rank's batch."""
        example = split_batch(batch, target_key(self.job.data.target, self.job.loss is not None))
        result = self._loss_function(model(*example.arguments, **example.keywords), example.target)
        return result[0] / result[1] if isinstance(result, tuple) else result

    def on_device(self, batch: Any) -> Any:
        """Returns the batch with its tensors on this rank's device."""
        device = self.device
        return tree_map(
            lambda value: value.to(device, non_blocking=True) if isinstance(value, Tensor) else value, batch
        )

    def autocast(self) -> AbstractContextManager[Any]:
        """The context of forward passes, for peers that leave mixed precision to the user."""
        return torch.autocast(self.device_kind, torch.bfloat16) if self.precision == "bf16" else nullcontext()


def sample_order(seed: int, samples: int, batch: int, steps: int) -> np.ndarray:
    """Returns the indices of the samples of `steps` global batches, epoch after epoch, without the last batch of an
    epoch if it is incomplete. This is the order in which `meshwright train` visits them with `data.drop_last`."""
    per_epoch = samples // batch
    epochs = -(-steps // per_epoch)
    whole_batches = [permutation(seed, epoch, samples)[: per_epoch * batch] for epoch in range(epochs)]
    return np.concatenate(whole_batches)[: steps * batch]


def train_by_hand(
    task: PeerTask,
    recorder: "StepRecorder",
    parallel_model: nn.Module,
    model: nn.Module,
    forward_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> None:
    """The plain PyTorch training loop. `parallel_model` is called, and wraps `model`, whose parameters are trained."""
    optimizer = task.optimizer(model)
    for batch in task.distributed_loader():
        with forward_context():
            loss = task.loss(parallel_model, task.on_device(batch))
        optimizer.zero_grad()
        loss.backward()
        if task.clip_norm:
            nn.utils.clip_grad_norm_(model.parameters(), task.clip_norm)
        optimizer.step()
        recorder.step(loss)


class StepRecorder:
    """Times the steps of a rank, and keeps the losses of its first and last step. Call `step` at the end of each
    step."""

    def __init__(self, task: PeerTask) -> None:
        self._task = task
        self._count = 0
        self._first = self._last = 0.0
        self._begin_s = self._end_s = 0.0

    def step(self, loss: Tensor) -> None:
        self._count += 1
        if self._count == 1:
            self._first = float(loss.detach())
        if self._count == WARM_UP_STEPS:
            float(loss.detach())  # waits for the device
            self._begin_s = time.perf_counter()
        if self._count == self._task.total_steps:
            self._last = float(loss.detach())
            self._end_s = time.perf_counter()

    def result(self) -> dict[str, Any]:
        """Returns what rank 0 prints: samples per second, and the mean over ranks of the first and the last loss. All
        ranks must call this."""
        if self._count != self._task.total_steps:
            raise RuntimeError(f"the loop made {self._count} steps instead of {self._task.total_steps}")
        losses = torch.tensor([self._first, self._last], device=self._task.device)
        dist.all_reduce(losses)
        first, last = (losses / dist.get_world_size()).tolist()
        samples = self._task.steps * self._task.job.train.global_batch
        return {
            "samples_per_s": samples / (self._end_s - self._begin_s),
            "first_loss": first,
            "final_loss": last,
            "threads": torch.get_num_threads(),
        }


def run_peer(train: Callable[[PeerTask, StepRecorder], None]) -> None:
    """Trains as one rank of a peer, as the command line says, and prints the result on rank 0. `train` initializes the
    process group, makes all steps, and calls the recorder after each."""
    job_file, steps, settings, precision, device_kind = sys.argv[1:]
    task = PeerTask(load_job(job_file), int(steps), settings == "best", precision, device_kind)
    recorder = StepRecorder(task)
    admit_own_user_only()
    train(task, recorder)
    result = recorder.result()
    if dist.get_rank() == 0:
        print(PREFIX + json.dumps(result), flush=True)
    dist.destroy_process_group()
