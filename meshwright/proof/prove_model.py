"""`mw.prove`: compares the training of a user's model under a plan with its training on one device. `prove.py` does the
same for a job."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.profile.optimizer import check_is_optimizer
from meshwright.proof.proof import Proof, save_proof
from meshwright.proof.prove import available_ranks, prove_in_new_ranks, with_fixed_precision, work_folder
from meshwright.proof.request import ProofRequest, UserModel
from meshwright.proof.sample_dataset import SampleDataset
from meshwright.proof.shrink import shrink
from meshwright.train.loss.loss import LossFunction
from meshwright.train.session import Session


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
    start: str = "job",
    device: str | None = None,
    output: str | Path | None = None,
    prepare_session: Callable[[Session], None] | None = None,
    timeout_s: float = 600,
) -> Proof:
    """Compares a model's training under a plan with its training on one device. Both start from the weights that the
    model has; with `start="random"`, from others that are drawn so that no part of the model is negligible. The model
    is not changed. The optimizer is only a template, and is not changed either.

    Global batches come from `dataset`, or are made of the samples in `sample_batch` if `dataset` is None. Model,
    optimizer, loss and data are pickled for the ranks, so a script must call this function below `if __name__ ==
    "__main__":`. `ranks` is the largest number of ranks to start; a plan for more ranks is shrunk. The proof is saved
    in the folder `output`, unless that is None. `prepare_session` is a picklable function that every rank calls with
    its session before the first step; the reference does not call it. A test can use it to make the ranks train
    differently from one device.

    >>> import torch, meshwright as mw
    >>> model = torch.nn.Linear(4, 1)
    >>> optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    >>> batch = (torch.randn(8, 4), torch.randn(8, 1))
    >>> plan = mw.Plan.model_validate({"axes": {"replicate": 2}})
    >>> loss = torch.nn.functional.mse_loss
    >>> proof = mw.prove(model, batch, loss=loss, optimizer=optimizer, plan=plan, global_batch=8, steps=1)
    >>> proof.equal, proof.ranks
    (True, 2)
    """
    check_is_optimizer(optimizer)
    available = available_ranks(plan, ranks, device)
    smaller, shrunk = shrink(with_fixed_precision(plan, dtype), available.count)
    check_rules(smaller)
    samples = SampleDataset(sample_batch, steps * global_batch)
    user_model = UserModel(
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
    request = ProofRequest(user_model, smaller, steps, dtype, dropout, prepare_session, start)
    with work_folder(Path(output) if output else None) as folder:
        proof = replace(prove_in_new_ranks(request, available.device, folder), shrunk=shrunk)
    if output:
        save_proof(proof, Path(output), type(model).__name__.lower())
    return proof
