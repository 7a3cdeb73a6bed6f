"""`plan="auto"` of the Trainer's strategy: the fastest plan for the module's training step."""

import inspect
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.utils.data import DataLoader

from meshwright.auto.choose import best_plan
from meshwright.compat.check import check_in_loop
from meshwright.compat.lightning.plan_argument import check_loop_plan
from meshwright.compat.loaders import batch_of_first_samples
from meshwright.compat.plan_argument import ignoring_accumulation, without_accumulation
from meshwright.data.randomness import preserve_generators
from meshwright.errors import MeshwrightError
from meshwright.plan import Plan
from meshwright.plan_fields.groups import Axes
from meshwright.processes.world import rank_count
from meshwright.proof.before_training.before_training import fastest_equal_plan


class _TrainingStep(nn.Module):
    """A LightningModule as a model that returns its loss. It is called with the entries of a batch like `like`."""

    def __init__(self, module: Any, like: Any) -> None:
        super().__init__()
        self.module = module
        self._like_type = type(like)
        self._takes_index = len(inspect.signature(module.training_step).parameters) > 1

    def forward(self, *arguments: Any, **keywords: Any) -> Any:
        batch: Any = arguments[0] if arguments else keywords
        if issubclass(self._like_type, list | tuple):
            batch = self._like_type(arguments)
        output = self.module.training_step(batch, 0) if self._takes_index else self.module.training_step(batch)
        return output["loss"] if isinstance(output, Mapping) else output


def choose_plan(module: Any, loader: Any, device: str, *, checks: bool = True) -> Plan:
    """Returns the fastest plan that Lightning's loop can run, for training the module with batches of the loader, of
    which each rank has one in a step. If the step cannot be traced, every rank is a replica, and a warning says why.
    With `checks`, plans that train another model than one device are left out. All ranks call this together."""
    ranks = rank_count()
    replicas = Plan(axes=Axes(replicate=ranks))
    if not module.automatic_optimization or not isinstance(loader, DataLoader) or not loader.batch_size:
        warnings.warn(
            "plan 'auto': the steps of this module cannot be traced, so every rank is a replica", stacklevel=2
        )
        return replicas
    try:
        with preserve_generators():
            batch = next(iter(loader))
        with _without_trainer(module):
            step, global_batch = _TrainingStep(module, batch), loader.batch_size * ranks

            def search(refuse: Callable[[Plan], None]) -> Plan:
                def check(plan: Plan) -> None:
                    check_loop_plan(plan)
                    refuse(plan)

                # Steps of session.step would be timed, and Lightning makes its own.
                settings: dict[str, Any] = {"global_batch": global_batch, "device": device, "tune": 0}
                return without_accumulation(best_plan(step, batch, **settings, check=ignoring_accumulation(check)))

            def check_here(plan: Plan) -> None:
                if checks:
                    check_in_loop(step, None, batch, plan, device)

            return fastest_equal_plan(search, check_here)
    except MeshwrightError as error:
        warnings.warn(f"plan 'auto': every rank is a replica, because: {error}", stacklevel=2)
        return replicas


def check_before_training(module: Any, loader: Any, plan: Plan, device: str) -> None:
    """Raises `UnequalPlan` if the plan does not train the module as one device does. A module that makes its own steps,
    and a loader without samples by number, are not checked. All ranks call this together."""
    if not module.automatic_optimization or not isinstance(loader, DataLoader):
        return
    batch = batch_of_first_samples(loader)
    with _without_trainer(module):
        check_in_loop(_TrainingStep(module, batch), None, batch, plan, device)


@contextmanager
def _without_trainer(module: Any) -> Iterator[None]:
    """Within this context `self.log` does nothing."""
    trainer, module._trainer = module._trainer, None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        module._trainer = trainer
