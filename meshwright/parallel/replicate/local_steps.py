"""Local steps: each replica follows its own gradients, and every so often all take the mean of their weights."""

import torch.distributed as dist
from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook as local_sgd
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.nn.parallel import DistributedDataParallel

from meshwright.plan import Plan


class LocalSteps:
    """Holds what torch's hook and averager count. `begin` goes before each step, `end` behind its update; `align`
    before anybody looks at the weights, so that there is one model to look at."""

    def __init__(self, model: DistributedDataParallel, group: dist.ProcessGroup, plan: Plan) -> None:
        period, after = plan.gradients.local_steps, plan.gradients.local_after
        self._parameters = [parameter for parameter in model.module.parameters() if parameter.requires_grad]
        self._group = group
        self._apart = False
        self._hook = local_sgd.PostLocalSGDState(group, None, after, post_local_gradient_allreduce=False)
        model.register_comm_hook(self._hook, local_sgd.post_localSGD_hook)
        self._averager = PeriodicModelAverager(period, after, group)

    def begin(self, steps: int) -> None:
        """`steps` were taken before; a resumed run goes on where it was."""
        self._hook.iter = steps
        self._averager.step = steps + 1  # it counts the step that it is called behind

    def end(self) -> None:
        done = self._averager.step
        self._averager.average_parameters(iter(self._parameters))
        self._apart = done > self._averager.warmup_steps and not self._is_due(done)

    def align(self) -> None:
        if self._apart:
            average_parameters(iter(self._parameters), self._group)
            self._apart = False

    def _is_due(self, done: int) -> bool:
        return (done - self._averager.warmup_steps) % self._averager.period == 0
