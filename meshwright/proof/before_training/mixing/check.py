"""Refuses plans that divide the batches of a model which mixes samples: before training, or with the first batch of a
loop that has given no sample batch."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from meshwright.errors import MixedSamples
from meshwright.messages.exchange import broadcast_value
from meshwright.model_io.batch import WHOLE_BATCH
from meshwright.plan import Plan
from meshwright.processes.world import World
from meshwright.progress import phase
from meshwright.proof.before_training.mixing.copies import without_weights
from meshwright.proof.before_training.mixing.find import find_mixing
from meshwright.proof.before_training.training import Training

FirstBatchCheck = Callable[[Any, bool], None]
"""Called with the first batch that a session gets, and with whether all ranks call it together."""


def divides_batches(plan: Plan) -> bool:
    """Whether a forward pass gets a part of a global batch only, and the plan claims to train the same model. Plans
    whose ranks average their weights now and then, or update them without each other, do not."""
    is_synchronous = plan.gradients.updates == "synchronous" and plan.gradients.local_steps == 1
    return plan.batch_parts > 1 and is_synchronous


def check_mixing(training: Training, plan: Plan, skip: str, world: World | None, device: torch.device) -> None:
    """Raises `MixedSamples` if the plan divides batches whose samples the model mixes. `world` is None if the ranks do
    not run yet; otherwise all of them call this together. `skip` says how a user trains without the check."""
    if not divides_batches(plan):
        return
    with phase("looking for samples that are mixed"):
        mixing = find_mixing(training, device) if world is None or world.rank == 0 else None
    found = str(mixing) if mixing else None
    found = found if world is None else broadcast_value(found)
    if found is not None:
        raise MixedSamples(_describe(found, plan, skip))


def first_batch_check(training: Training, plan: Plan, world: World, skip: str) -> FirstBatchCheck | None:
    """Returns the check of a loop that has given no sample batch; None if the plan does not divide batches, or the
    model cannot be copied. Nothing is held of the training's model but its structure and its buffers."""
    if not divides_batches(plan) or plan.world_size != world.size:
        return None
    try:
        kept = replace(training, model=without_weights(training.model), optimizer=torch.optim.SGD([torch.zeros(1)]))
    except Exception:  # attributes that cannot be copied
        return None

    def check(batch: Any, together: bool) -> None:
        subject = replace(kept, sample_batch=batch)
        if not together:  # the loop has called the model itself, with everything that is in this batch
            subject = replace(subject, loss=None, target=WHOLE_BATCH)
        check_mixing(subject, plan, skip, world if together else None, world.device)

    return check


def _describe(mixing: str, plan: Plan, skip: str) -> str:
    parts = [f"{plan.data_ranks} data ranks"] if plan.data_ranks > 1 else []
    parts += [f"{plan.microbatches} microbatches"] if plan.microbatches > 1 else []
    return (
        f"the plan ({plan.summary()}) does not train the same model as one device: {mixing}, and under the plan's"
        f" {' × '.join(parts)} each forward pass gets some of the samples only: let the model treat every sample by"
        " itself, compare samples in the loss function, which gets the outputs of all ranks, or choose a plan without"
        f" replicate and shard axes, accumulation and microbatches; {skip} trains it nevertheless"
    )
