"""Local steps (local SGD): each replica updates its weights by its own gradients, and every few steps all replicas take
the mean of their weights."""

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

from meshwright.plan import Plan


class LocalSteps:
    """Drives torch's local SGD hook and averager. Call `before_step` before each step, `after_step` after its optimizer
    update, and `average_weights` before the weights are evaluated or saved, so that all replicas have the same."""

    def __init__(self, model: DistributedDataParallel, group: dist.ProcessGroup, plan: Plan) -> None:
        period, warmup_steps = plan.gradients.local_steps, plan.gradients.local_after
        self._parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        self._group = group
        self._weights_differ = False
        self._hook = local_sgd.PostLocalSGDState(group, None, warmup_steps, post_local_gradient_allreduce=False)
        model.register_comm_hook(self._hook, local_sgd.post_localSGD_hook)
        self._averager = PeriodicModelAverager(period, warmup_steps, group)

    def before_step(self, steps: int) -> None:
        """`steps` is the number of steps taken before this one; a resumed run continues its count."""
        self._hook.iter = steps
        self._averager.step = steps + 1  # it counts the step that it is called after

    def after_step(self) -> None:
        steps = self._averager.step
        self._averager.average_parameters(iter(self._parameters))
        self._weights_differ = steps > self._averager.warmup_steps and not self._is_due(steps)

    def average_weights(self) -> None:
        """Gives all replicas the mean weights; does nothing where they are equal."""
        if self._weights_differ:
            average_parameters(iter(self._parameters), self._group)
            self._weights_differ = False

    def _is_due(self, steps: int) -> bool:
        return (steps - self._averager.warmup_steps) % self._averager.period == 0
