"""`MeshwrightFabricStrategy`: lets a loop of Lightning's Fabric train under a plan. Each module that `fabric.setup`
gets is divided as a whole."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.precision import Precision
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from meshwright.compat.lightning.checkpoint_folder import (
    is_checkpoint_folder,
    load_folder,
    naming_other_checkpoints,
    refuse_other_folder,
    save_folder,
)
from meshwright.compat.lightning.parts import divide_module
from meshwright.compat.lightning.plan_argument import (
    CheckpointFormat,
    check_format,
    check_loop_plan,
    check_options,
    check_precision,
    check_ranks,
    plan_of_argument,
)
from meshwright.compat.lightning.shares import BatchShare, ShareLoader, check_equal_shapes
from meshwright.compat.plan_argument import PlanArgument
from meshwright.errors import InputError
from meshwright.parallel.clip import clip_values_
from meshwright.plan import Plan
from meshwright.processes.torch_private import add_gloo_for_cpu_tensors
from meshwright.train.drive.driver import Driver
from meshwright.train.drive.whole_states import divide_loaded_state, whole_optimizer_state, whole_tensor
from meshwright.train.step.optimizer import use_fused_kernels


class ParallelForward(nn.Module):
    """What `fabric.setup` calls in place of the user's module."""

    def __init__(self, driver: Driver) -> None:
        super().__init__()
        self.module = driver.module
        self.driver = driver

    def named_modules(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, nn.Module]]:
        """Frees gathered weights first. Whoever looks at the parameters from outside, such as `zero_grad` of Fabric's
        module, then finds the shards, which have the gradients."""
        self.driver.reshard()
        yield from super().named_modules(*args, **kwargs)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.driver.forward(*args, **kwargs)


class MeshwrightFabricStrategy(DDPStrategy):
    """Trains the modules of a Fabric loop under a plan: a `Plan`, its groups as a dict, or the path of a plan file.
    Without a plan, every rank is a replica. The arguments are those of `MeshwrightStrategy`."""

    def __init__(
        self, plan: PlanArgument = None, *, checkpoint_format: CheckpointFormat = "lightning", **options: Any
    ) -> None:
        check_format(checkpoint_format)
        check_options(options)
        self._plan_argument = plan
        self._precision_flag = "32-true"
        self._precision: Precision | None = None
        super().__init__(**options)
        self._checkpoint_format = checkpoint_format
        self._drivers: list[Driver] = []
        self._backward_sync_control = _NoSync()
        self._share = BatchShare()  # of the batch that a loader has read last

    @property
    def precision(self) -> Precision:
        """The plan decides the precision; a plugin of the same precision serves `fabric.autocast`."""
        return self._precision or Precision()

    @precision.setter
    def precision(self, plugin: Precision | None) -> None:
        if plugin is not None:
            check_precision(str(plugin.precision))
            self._precision_flag = str(plugin.precision)
            self._precision = plugin

    def _read_plan(self) -> Plan:
        if self._plan_argument == "auto":
            raise InputError(
                "plan is 'auto', but Fabric has no batch before the module is set up: give"
                " plan=mw.best_plan(model, sample_batch, global_batch=…)"
            )
        argument = self._plan_argument
        plan = plan_of_argument(argument, self.world_size, self._precision_flag, plan_decides=argument is not None)
        check_loop_plan(plan)
        check_ranks(plan, self.world_size)
        return plan

    # ---- setting up

    def setup_environment(self) -> None:
        super().setup_environment()
        add_gloo_for_cpu_tensors()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divides the batches of a loader by the plan's shares."""
        samples = self._read_plan().shares.samples if self._plan_argument is not None else ()
        if not samples:
            return dataloader
        return ShareLoader(dataloader, samples, self.global_rank, self._note_share)

    def _note_share(self, share: BatchShare | None) -> None:
        self._share = share or BatchShare()

    def setup_module(self, module: nn.Module) -> ParallelForward:
        driver = divide_module(module, self._read_plan(), self.root_device, self.world_size)
        self._drivers.append(driver)
        return ParallelForward(driver)

    def setup_module_and_optimizers(self, module: nn.Module, optimizers: Any, scheduler: Any = None) -> Any:
        """Divides the module. The optimizers, which schedules may refer to, get the divided parameters."""
        names = {id(parameter): name for name, parameter in module.named_parameters()}
        forward = self.setup_module(module)
        divided = dict(module.named_parameters())
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                for parameter in group["params"]:
                    if id(parameter) not in names:
                        shape = tuple(parameter.shape)
                        raise InputError(f"the optimizer holds a parameter of shape {shape} that the model lacks")
                group["params"] = [divided[names[id(parameter)]] for parameter in group["params"]]
        return forward, [self.setup_optimizer(optimizer) for optimizer in optimizers], scheduler

    def setup_optimizer(self, optimizer: Optimizer) -> Optimizer:
        holders = [driver for driver in self._drivers if driver.holds(optimizer)]
        if self._drivers and not holders:
            raise InputError(
                "no module that was set up has the optimizer's parameters: set both up with"
                " fabric.setup(model, optimizer), or make the optimizer after fabric.setup_module(model)"
            )
        if any(driver.plan.compute.fused_optimizer for driver in holders):
            use_fused_kernels(optimizer)
        optimizer.register_load_state_dict_pre_hook(divide_loaded_state)
        return optimizer

    # ---- steps

    def backward(self, tensor: Tensor, module: nn.Module | None, *args: Any, **kwargs: Any) -> None:
        with ExitStack() as stack:
            for driver in self._drivers:
                stack.enter_context(driver.backward_pass())
            weighted = tensor if self._share.weight == 1 else tensor * self._share.weight
            super().backward(weighted, module, *args, **kwargs)

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        if any(driver.plan.shares.samples for driver in self._drivers):
            check_equal_shapes(tensor)
        return super().all_gather(tensor, group, sync_grads)

    def optimizer_step(self, optimizer: Any, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, **kwargs)
        for driver in self._drivers:
            if driver.holds(optimizer):
                driver.after_optimizer_step(optimizer)
        return output

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        norm = self._driver_of(module).clip_norm(_parameters(optimizer), float(max_norm), float(norm_type))
        if error_if_nonfinite and not torch.isfinite(norm):
            raise RuntimeError(f"the norm of the gradients is {norm.item()}, so they cannot be clipped")
        return norm

    def clip_gradients_value(self, module: nn.Module, optimizer: Optimizer, clip_val: float) -> None:
        clip_values_(_parameters(optimizer), float(clip_val))

    def _driver_of(self, module: nn.Module) -> Driver:
        inner = module.module if isinstance(module, ParallelForward) else module
        for driver in self._drivers:
            if driver.module is inner:
                return driver
        raise InputError(f"a {type(inner).__name__} was not set up: call fabric.setup(model, optimizer) first")

    # ---- checkpoints

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        return self._driver_of(module).whole_state() if isinstance(module, ParallelForward) else module.state_dict()

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        inner = module.module if isinstance(module, ParallelForward) else module
        inner.load_state_dict(state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        for driver in self._drivers:
            driver.reshard()
        return whole_optimizer_state(optimizer)

    def save_checkpoint(
        self,
        path: Any,
        state: dict[str, Any],
        storage_options: Any = None,
        filter: dict[str, Callable[[str, Any], bool]] | None = None,
    ) -> None:
        if self._checkpoint_format == "lightning":
            whole = apply_to_collection(state, DTensor, whole_tensor)  # a loop may give `model.state_dict()`
            super().save_checkpoint(path, whole, storage_options, filter)
            return
        if filter:
            raise InputError("a filter needs checkpoint_format='lightning': folders hold all tensors of the modules")
        others = {key: value for key, value in state.items() if not isinstance(value, nn.Module | Optimizer)}
        contents = {key: value.state_dict() if hasattr(value, "state_dict") else value for key, value in others.items()}
        folder = Path(self.broadcast(str(path)))
        save_folder(folder, _joined_modules(state), self._mesh, _optimizers(state), contents)

    def load_checkpoint(
        self, path: Any, state: Any = None, strict: bool = True, weights_only: bool | None = None
    ) -> dict[str, Any]:
        if not is_checkpoint_folder(Path(path)):
            refuse_other_folder(Path(path))
            return super().load_checkpoint(path, state, strict, weights_only)
        if not isinstance(state, dict) or not any(isinstance(value, nn.Module) for value in state.values()):
            raise InputError(f"{path} is a folder of shards: give fabric.load(path, {{'model': model, …}})")
        with naming_other_checkpoints(Path(path)):
            contents = load_folder(Path(path), _joined_modules(state), self._mesh, _optimizers(state))
        for key, value in state.items():
            if isinstance(value, nn.Module | Optimizer) or key not in contents:
                continue
            if hasattr(value, "load_state_dict"):
                value.load_state_dict(contents.pop(key))
            else:
                state[key] = contents.pop(key)
        return contents

    @property
    def _mesh(self) -> Any:
        return self._drivers[0].mesh if self._drivers else None


class _NoSync(_BackwardSyncControl):
    """`fabric.no_backward_sync`: accumulates the gradients of one module without combining them."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[Any]:
        if not enabled:
            return nullcontext()
        if not isinstance(module, ParallelForward):
            raise TypeError(f"no_backward_sync takes a module of fabric.setup, and this is a {type(module).__name__}")
        return module.driver.no_sync()


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _joined_modules(state: Mapping[str, Any]) -> nn.Module:
    """The modules of a Fabric state as one module, in which their keys are their names."""
    modules = {key: value for key, value in state.items() if isinstance(value, nn.Module)}
    return nn.ModuleDict(
        {key: value.module if isinstance(value, ParallelForward) else value for key, value in modules.items()}
    )


def _optimizers(state: Mapping[str, Any]) -> list[Optimizer]:
    return [value for value in state.values() if isinstance(value, Optimizer)]
