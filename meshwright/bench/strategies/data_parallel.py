"""The predicted step of `torch.nn.DataParallel`, which no plan expresses: one process copies the model from the first
GPU to all others in every step, runs a part of the batch on each, and adds the gradients on the first.

    step      = compute + n × launch + broadcast + reduce + other        predict_data_parallel
    broadcast = parameters / bandwidth                    a chain through all GPUs, in pieces
    reduce    = (n - 1) × parameters / bandwidth          the first GPU receives the gradients of every other

`compute`, `launch` (starting operators, where the GPU waits for it) and `other` (the optimizer's step, reading input)
are those of one GPU with its part of the batch. The threads of one Python process start the operators of all n GPUs one
after another, because of its global interpreter lock.
"""

from meshwright.bench.strategies.plans import StrategyPlanner
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.simulator.predict import predict_plan


def predict_data_parallel(planner: StrategyPlanner, one_device: Plan) -> float | None:
    """Returns the predicted seconds of a step on all GPUs of the cluster; None on CPUs, and if the model cannot be
    traced. `one_device` is the plan for one of them."""
    cluster, devices = planner.cluster, planner.cluster.device_count
    if cluster.kind != "cuda":
        return None
    try:
        inputs, profiles = planner.planning
        profile = profiles.get(one_device.numerics.precision, "none")
        one = inputs.cluster.with_device_count(1)
        part = max(1, -(-inputs.global_batch // devices))
        terms = predict_plan(one, profile, one_device, part, inputs.optimizer).breakdown
    except MeshwrightError:
        return None
    bandwidth = min(node.link.bandwidth_bytes_per_s for node in cluster.nodes)
    parameter_bytes = profile.parameter_bytes
    broadcast_s = parameter_bytes / bandwidth
    reduce_s = (devices - 1) * parameter_bytes / bandwidth
    other_s = sum(value for name, value in terms.items() if name not in ("compute", "launch"))
    return terms["compute"] + devices * terms["launch"] + broadcast_s + reduce_s + other_s
