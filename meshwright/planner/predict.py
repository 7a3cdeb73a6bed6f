"""`mw.predict`: what training a model under one plan needs, for a model at hand. A cluster that is this machine is
given measurements of the model's own operators first."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.calibrate.model_operators import with_own_shapes
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find
from meshwright.plan import Axes, Plan
from meshwright.profile.optimizer import cost_of
from meshwright.profile.tracing.real_steps import profile_or_measure
from meshwright.profile.tracing.step import LossFunction
from meshwright.simulator.predict import Prediction, check_size, predict_plan


def predict(
    model: nn.Module,
    sample_batch: Any,
    *,
    global_batch: int,
    loss: LossFunction | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    plan: Plan | None = None,
    cluster: str | Cluster = "local",
    target: str | None = None,
) -> Prediction:
    """What training this model needs. The model and the batch may lie on the meta device; a model whose shapes depend
    on its data is run for a step where it lies. `optimizer` is a template, plain SGD where it is left out; without a
    plan every device is a replica."""
    found = find(cluster) if isinstance(cluster, str) else cluster
    chosen = plan or Plan(axes=Axes(replicate=min(found.devices, global_batch)))
    check_size(chosen, found, global_batch)
    on_gpu = found.kind == "cuda"
    traced, how = profile_or_measure(
        model,
        sample_batch,
        loss,
        precision=chosen.numerics.precision,
        on_gpu=on_gpu,
        target=target,
        recompute=chosen.memory.recompute,
        structured=chosen.axes.tensor * chosen.axes.pipeline > 1 or bool(chosen.modules.splits),
    )
    found = with_own_shapes(found, traced, chosen, global_batch)
    predicted = predict_plan(found, traced, chosen, global_batch, cost_of(optimizer, on_gpu))
    return replace(predicted, based_on=f"{found.based_on}; {how}")
