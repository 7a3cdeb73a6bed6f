"""`mw.prove`: the same comparison for a user's own model, without a job."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.parallel.check import check_runnable
from meshwright.plan import Plan
from meshwright.proof.fault import Fault
from meshwright.proof.proof import Proof, save
from meshwright.proof.prove import find_machine, prove_on, with_precision, work_folder
from meshwright.proof.question import OwnModel, Question
from meshwright.proof.samples import Samples
from meshwright.proof.shrink import shrink
from meshwright.train.step.loss import LossFunction


def prove(
    model: nn.Module,
    sample_batch: Any,
    *,
    loss: LossFunction | None = None,
    optimizer: torch.optim.Optimizer,
    plan: Plan,
    global_batch: int,
    steps: int = 3,
    dataset: Any = None,
    collate: Callable[[list[Any]], Any] | None = None,
    schedule: Callable[[torch.optim.Optimizer], LRScheduler] | None = None,
    clip_norm: float | None = None,
    seed: int = 0,
    target: str | None = None,
    ranks: int | None = None,
    dtype: str = "fp64",
    dropout: bool = False,
    device: str | None = None,
    output: str | Path | None = None,
    plant: Fault | None = None,
    timeout_s: float = 600,
) -> Proof:
    """Whether a model trains under a plan as on one device, from the weights it has. Neither it nor the optimizer, a
    template, is changed.

    Global batches are drawn from `dataset`, or made of the sample batch's samples. Model, optimizer, loss and data are
    pickled for the ranks; a script calls this below `if __name__ == "__main__":`. `output`: a folder to save the proof
    in.
    """
    machine = find_machine(plan, ranks, device)
    smaller, shrunk = shrink(with_precision(plan, dtype), machine.ranks)
    check_runnable(smaller)
    samples = Samples(sample_batch, steps * global_batch)
    own = OwnModel(
        model=model,
        optimizer=optimizer,
        loss=loss,
        data=samples if dataset is None else dataset,
        global_batch=global_batch,
        collate=samples.collate if dataset is None else collate,
        schedule=schedule,
        clip_norm=clip_norm,
        seed=seed,
        target=target,
        timeout_s=timeout_s,
    )
    question = Question(own, smaller, steps, dtype, dropout, plant)
    with work_folder(Path(output) if output else None) as folder:
        proof = replace(prove_on(question, machine.device, folder), shrunk=shrunk)
    if output:
        save(proof, Path(output), type(model).__name__.lower())
    return proof
