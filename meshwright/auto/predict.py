"""`mw.predict`: the predicted step time and memory of training a model under one plan. If the cluster is this machine,
the model's operators are measured on it first."""

from dataclasses import replace
from typing import Any

import torch
from torch import nn

from meshwright.auto.inputs import check_model_and_cluster
from meshwright.calibrate.model_operators import measure_model_operators
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import find_cluster
from meshwright.numbers.limits import check_count
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.profile.optimizer import optimizer_cost
from meshwright.profile.tracing.real_steps import trace_or_measure_profile
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
    """Returns the predicted step time and memory of training this model. The model and the batch may be on the meta
    device. A model that cannot be traced, because its shapes depend on its data, is run for one or two steps on its
    device. `optimizer` is a template for the optimizer; without it, the prediction is for plain SGD. Without a plan,
    every device is a replica.

    >>> import torch, meshwright as mw
    >>> model = torch.nn.Linear(20, 5, device="meta")
    >>> batch = (torch.empty(8, 20, device="meta"), torch.empty(8, dtype=torch.long, device="meta"))
    >>> plan = mw.load_plan({"axes": {"shard": 8}, "numerics": {"precision": "bf16"}})
    >>> loss = torch.nn.functional.cross_entropy
    >>> prediction = mw.predict(model, batch, loss=loss, plan=plan, cluster="8xH100", global_batch=64)
    >>> prediction.step_s < 0.01 and sum(prediction.memory.breakdown.values()) == prediction.memory_bytes
    True
    """
    check_count("global_batch", global_batch)
    check_model_and_cluster(model, cluster)
    machines = find_cluster(cluster) if isinstance(cluster, str) else cluster
    run_plan = plan or Plan(axes=Axes(replicate=min(machines.device_count, global_batch)))
    check_size(run_plan, machines, global_batch)
    on_gpu = machines.kind == "cuda"
    cost = optimizer_cost(optimizer, on_gpu)
    profile, method = trace_or_measure_profile(
        model,
        sample_batch,
        loss,
        precision=run_plan.numerics.precision,
        on_gpu=on_gpu,
        target=target,
        recompute=run_plan.memory.recompute,
        with_structure=run_plan.world_size > run_plan.data_ranks or bool(run_plan.modules.splits),
    )
    machines = measure_model_operators(machines, profile, run_plan, global_batch)
    prediction = predict_plan(machines, profile, run_plan, global_batch, cost)
    return replace(prediction, based_on=f"{machines.basis}; {method}")
