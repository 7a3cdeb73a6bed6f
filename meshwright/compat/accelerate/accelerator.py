"""`Accelerator`: Accelerate's class of this name, whose models, gradients, precision and checkpoints are those of
Meshwright. Loaders, schedules, trackers, properties of processes and collectives are inherited.
"""

import inspect
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.distributed.tensor import DTensor

from meshwright.compat.accelerate.automatic_plan import check_before_training, choose_plan
from meshwright.compat.accelerate.checkpoint_folder import (
    has_checkpoint,
    load_folder,
    loader_state,
    restore_loaders,
    save_folder,
)
from meshwright.compat.accelerate.plan_argument import plan_of_argument
from meshwright.compat.accelerate.prepared_model import PreparedModel
from meshwright.compat.accelerate.settings import check_arguments, check_variables, read_variables, warn_once
from meshwright.compat.accelerate.shares import SharedBatches
from meshwright.compat.accelerate.uneven_inputs import JoinedModel
from meshwright.compat.plan_argument import PlanArgument
from meshwright.errors import InputError
from meshwright.messages.exchange import all_gather_values
from meshwright.parallel.apply import apply
from meshwright.parallel.clip import clip_values_
from meshwright.plan import Plan
from meshwright.processes.torch_private import add_gloo_for_cpu_tensors
from meshwright.train.drive.driver import loss_weight
from meshwright.train.step.optimizer import use_fused_kernels


class Accelerator(SharedBatches):
    """Accelerate's `Accelerator`, with the same arguments and two more.

    `plan` is a `Plan`, its groups as a dict, the path of a plan file, or `auto`. Without it, every process is a
    replica, as under Accelerate. With `check`, a plan that trains another model than one device is refused when the
    model and its loader are prepared.
    """

    def __init__(self, *arguments: Any, plan: PlanArgument = None, check: bool = True, **keywords: Any) -> None:
        given = inspect.signature(accelerate.Accelerator).bind(*arguments, **keywords).arguments
        without_effect = check_arguments(given) + check_variables(read_variables())
        super().__init__(*arguments, **keywords)
        if "split_batches" in given:  # Accelerate 1.15 has this argument, and ignores it
            self.dataloader_config.split_batches = bool(given["split_batches"])
        if self.is_main_process:
            warn_once(without_effect)
        self._checks = check
        self._plan_argument = plan
        self._plan_is_written = plan is not None and plan != "auto"
        self._plan: Plan | None = None
        self._prepared: list[PreparedModel] = []

    @property
    def plan_is_known(self) -> bool:  # type: ignore[override]
        return self._plan is not None or self._plan_argument != "auto"

    @property
    def plan(self) -> Plan:  # type: ignore[override]
        """The plan that prepared models are trained under."""
        if self._plan is None:
            if self._plan_argument == "auto":
                raise InputError("plan is 'auto': prepare the model and its DataLoader in one call first")
            self._plan = plan_of_argument(
                self._plan_argument,
                self.num_processes,
                self.state.mixed_precision,
                self.device.type,
                plan_decides=self._plan_is_written,
            )
        return self._plan

    # ---- preparing

    def prepare(self, *objects: Any, device_placement: Any = None) -> Any:
        """As Accelerate's. An optimizer that was made of a model's parameters before this call keeps its groups, and
        gets the parameters that the plan has left on this rank."""
        if self._plan_argument == "auto" and any(isinstance(item, nn.Module) for item in objects):
            settings = self.num_processes, self.split_batches, self.device.type
            self._plan_argument = choose_plan(objects, *settings, checks=self._checks)
        if self._checks and self.num_processes > 1 and any(isinstance(item, nn.Module) for item in objects):
            add_gloo_for_cpu_tensors()
            check_before_training(objects, self.plan, self.device.type)
        names = {
            id(parameter): (module, name)
            for module in objects
            if isinstance(module, nn.Module)
            for name, parameter in module.named_parameters()
        }
        result = super().prepare(*objects, device_placement=device_placement)
        for item in result if isinstance(result, tuple) else (result,):
            if isinstance(item, AcceleratedOptimizer):
                self._use_prepared_parameters(item.optimizer, names)
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Applies the plan to the model, in place, and returns a `PreparedModel` that calls it. With `evaluation_mode`,
        the model is only moved to the device."""
        if isinstance(model, PreparedModel):
            self._add(model)
            return model
        if self.verify_device_map(model) and self.num_processes > 1:
            raise InputError("the model was loaded with a device_map of several devices: load it without device_map")
        if evaluation_mode:
            return super().prepare_model(model, device_placement=device_placement, evaluation_mode=True)
        if self.num_processes > 1:
            add_gloo_for_cpu_tensors()
        prepared = PreparedModel(apply(self.plan, model, self.device, self.num_processes))
        self._add(prepared)
        return prepared

    def _add(self, model: PreparedModel) -> None:
        if model not in self._prepared:
            self._prepared.append(model)
            self._models.append(model.module)

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        was_prepared = getattr(optimizer, "_is_accelerate_prepared", False)
        prepared = super().prepare_optimizer(optimizer, device_placement=device_placement)
        if not was_prepared:
            prepared.optimizer.register_step_pre_hook(lambda *_: self._combine_gradients())
            prepared.optimizer.register_step_post_hook(lambda stepped, *_: self._after_step(stepped))
            if self.plan.compute.fused_optimizer:
                use_fused_kernels(prepared.optimizer)
        return prepared

    def _use_prepared_parameters(
        self, optimizer: torch.optim.Optimizer, names: dict[int, tuple[nn.Module, str]]
    ) -> None:
        """Replaces the parameters in the optimizer's groups by those that the plan has left on this rank. `names` has
        the parameters before the models were prepared, by id."""
        known = {id(parameter) for model in self._prepared for parameter in model.parameters()}
        for group in optimizer.param_groups:
            for position, parameter in enumerate(group["params"]):
                if id(parameter) in known:
                    continue
                if id(parameter) in names:
                    module, name = names[id(parameter)]
                    group["params"][position] = module.get_parameter(name)
                elif self.plan.axes.shard > 1:
                    raise InputError(
                        f"the optimizer holds a parameter of shape {tuple(parameter.shape)} that no prepared model has:"
                        " prepare model and optimizer in one call, or make the optimizer of the prepared model"
                    )

    def unwrap_model(self, model: nn.Module, keep_fp32_wrapper: bool = True, keep_torch_compile: bool = True) -> Any:
        inner = model.module if isinstance(model, PreparedModel) else model
        return super().unwrap_model(inner, keep_fp32_wrapper, keep_torch_compile)

    def free_memory(self, *objects: Any) -> Any:
        self._prepared = []
        return super().free_memory(*objects)

    def _find(self, model: nn.Module) -> PreparedModel | None:
        """The prepared model that is, or calls, this module. None if there is none."""
        return next((prepared for prepared in self._prepared if model in (prepared, prepared.module)), None)

    # ---- steps

    def backward(self, loss: Tensor, count: float | None = None, **keywords: Any) -> None:
        """As Accelerate's. `count` is the number of samples, or of targets, that the loss is a mean over; processes are
        weighted by it. Without it, and with shares, they are weighted by their samples of the batch that a prepared
        loader gave last."""
        sizes: Sequence[float] | None = self.current_sizes() if count is None else all_gather_values(float(count))
        if sizes is not None:
            loss = loss * loss_weight(sizes[self.process_index], sum(sizes), len(sizes))
        with ExitStack() as stack:
            for model in self._prepared:
                stack.enter_context(model.backward_pass())
            super().backward(loss, **keywords)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        prepared = self._find(model)
        with prepared.driver.no_sync() if prepared is not None else nullcontext():
            yield

    @staticmethod
    @contextmanager
    def trigger_sync_in_backward(model: nn.Module) -> Iterator[None]:
        with model.combining() if isinstance(model, PreparedModel) else nullcontext():
            yield

    def _combine_gradients(self) -> None:
        for model in self._prepared:
            model.combine_gradients()

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        for model in self._prepared:
            if model.driver.holds(optimizer):
                model.after_optimizer_step(optimizer)

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        self._combine_gradients()
        parameters = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        if norm_type != 2 or not any(isinstance(parameter, DTensor) for parameter in parameters):
            norm: Tensor = super().clip_grad_norm_(parameters, max_norm, norm_type)
            return norm
        return self._prepared[0].driver.clip_norm(parameters, float(max_norm))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        self._combine_gradients()
        self.unscale_gradients()
        clip_values_([parameters] if isinstance(parameters, Tensor) else parameters, clip_value)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[nn.Module], even_batches: bool | None = None) -> Iterator[None]:
        models = [prepared for model in joinables if (prepared := self._find(model)) is not None]
        with self._loaders_with(even_batches):
            enabled = self.num_processes > 1 and not (self.even_batches if even_batches is None else even_batches)
            if not enabled:
                yield
                return
            if self.plan.shares.samples:
                raise InputError(
                    "join_uneven_inputs: under a plan with shares, processes have equally many batches, and a short"
                    " one is divided among them: leave it out"
                )
            if len(models) != 1 or len(joinables) != 1 or models[0].parallel.gradient_averager is None:
                raise InputError(
                    f"join_uneven_inputs was given {len(joinables)} objects: give it one prepared model, which a plan"
                    " of replicas trains"
                )
            model, averager = models[0], models[0].parallel.gradient_averager
            assert averager is not None
            optimizers = [o.optimizer for o in self._optimizers if model.driver.holds(o.optimizer)]
            joined = JoinedModel(model.module, averager, self.device, optimizers, self._schedulers)
            model.joined = joined
            try:
                with Join([joined], throw_on_early_termination=False):
                    yield
            finally:
                model.joined = None

    @contextmanager
    def _loaders_with(self, even_batches: bool | None) -> Iterator[None]:
        """Within this context, prepared loaders have this `even_batches`; their own if it is None."""
        samplers = [
            loader.batch_sampler
            for loader in self._dataloaders
            if even_batches is not None
            and not isinstance(loader, DataLoaderDispatcher)
            and hasattr(loader.batch_sampler, "even_batches")
        ]
        before = [sampler.even_batches for sampler in samplers]
        for sampler in samplers:
            sampler.even_batches = even_batches
        try:
            yield
        finally:
            for sampler, value in zip(samplers, before, strict=True):
                sampler.even_batches = value

    # ---- checkpoints

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> Any:
        prepared = self._find(model)
        return super().get_state_dict(model, unwrap) if prepared is None else prepared.state_dict()

    def save_state(self, output_dir: Any = None, safe_serialization: bool = True, **keywords: Any) -> str:
        """Writes models, optimizers, schedules, random generators and registered objects to a folder, and returns it.
        Nothing is pickled, whatever `safe_serialization` is. All ranks call this together."""
        if keywords:
            raise InputError(f"save_state({', '.join(keywords)}) is not offered: leave it out")
        folder = self._folder_to_save(output_dir)
        weights = [self.get_state_dict(model) for model in self._models] if self._save_model_state_pre_hook else []
        for hook in self._save_model_state_pre_hook.values():
            hook(list(self._models), weights, str(folder))
        contents = {
            "step": self.step,
            "schedules": [schedule.state_dict() for schedule in self._schedulers],
            "objects": [item.state_dict() for item in self._custom_objects],
            "scaler": self.scaler.state_dict() if self.scaler is not None else None,
            "loaders": [loader_state(loader) for loader in self._dataloaders],
        }
        for model in self._prepared:
            model.driver.align_buffers()
        number = self.project_configuration.iteration
        save_folder(folder, self._models, self._torch_optimizers(), self._mesh(), contents, number)
        self.project_configuration.iteration += 1
        return str(folder)

    def load_state(self, input_dir: Any = None, load_kwargs: Any = None, **keywords: Any) -> None:
        """Loads what `save_state` has written under any plan and number of ranks. Under a plan of replicas, it also
        loads folders that Accelerate itself has written. All ranks call this together."""
        folder = self._folder_to_load(input_dir)
        if not has_checkpoint(folder):
            if any(model.is_sharded for model in self._prepared):
                raise InputError(
                    f"{folder} was not saved by meshwright's Accelerator, and only plans of replicas load other"
                    " folders: load it under such a plan, and save it with save_state"
                )
            if not any(file.suffix in _ACCELERATE_FILES for file in folder.iterdir()):
                raise InputError(f"{folder} has no checkpoint: give a folder that save_state has written")
            super().load_state(str(folder), load_kwargs, **keywords)
            return
        if keywords or load_kwargs:
            names = [*keywords, *(["load_kwargs"] if load_kwargs else [])]
            raise InputError(f"load_state({', '.join(names)}) is not offered: leave it out")
        for hook in self._load_model_state_pre_hook.values():
            hook(list(self._models), str(folder))
        contents = load_folder(folder, self._models, self._torch_optimizers(), self._mesh())
        self._restore("schedules", self._schedulers, contents["schedules"], folder)
        self._restore("objects", self._custom_objects, contents["objects"], folder)
        restore_loaders(self._dataloaders, contents["loaders"])
        self.step = int(contents["step"])
        if self.scaler is not None and contents["scaler"] is not None:
            self.scaler.load_state_dict(contents["scaler"])
        if self.plan.compute.fused_optimizer:
            for optimizer in self._torch_optimizers():
                use_fused_kernels(optimizer)  # the saved state may be of an optimizer that was not fused

    def _restore(self, kind: str, items: Sequence[Any], states: Sequence[Any], folder: Path) -> None:
        if len(items) != len(states):
            raise InputError(
                f"{folder} has {len(states)} {kind}, but this script has {len(items)}: prepare and register the same"
                " ones as the script that saved it"
            )
        for item, state in zip(items, states, strict=True):
            item.load_state_dict(state)

    def _torch_optimizers(self) -> list[torch.optim.Optimizer]:
        return [optimizer.optimizer for optimizer in self._optimizers]

    def _mesh(self) -> Any:
        return self._prepared[0].parallel.mesh if self._prepared else None

    def _folder_to_save(self, output_dir: Any) -> Path:
        """The folder of the next save, which exists. With automatic names, removes the oldest folders first."""
        settings = self.project_configuration
        if not settings.automatic_checkpoint_naming:
            if output_dir is None:
                raise InputError("save_state needs a folder: give output_dir, or automatic_checkpoint_naming=True")
            folder = Path(output_dir)
        else:
            parent = Path(self.project_dir) / "checkpoints"
            folder = parent / f"checkpoint_{settings.iteration}"
            self.wait_for_everyone()
            if folder.exists():
                raise InputError(f"{folder} exists: set accelerator.project_configuration.iteration to the next number")
            self.wait_for_everyone()  # all ranks have looked
            if self.is_main_process and settings.total_limit is not None:
                for old in _numbered_folders(parent)[: -settings.total_limit + 1 or None]:
                    shutil.rmtree(old)
        folder.mkdir(parents=True, exist_ok=True)
        return folder

    def _folder_to_load(self, input_dir: Any) -> Path:
        if input_dir is not None:
            folder = Path(input_dir)
            if not folder.is_dir():
                raise InputError(f"{folder} is no folder: give one that save_state has written")
            return folder
        if not self.project_configuration.automatic_checkpoint_naming:
            raise InputError("load_state needs a folder: give input_dir, or automatic_checkpoint_naming=True")
        folders = _numbered_folders(Path(self.project_dir) / "checkpoints")
        if not folders:
            raise InputError(f"{self.project_dir}/checkpoints has no checkpoint: give input_dir")
        return folders[-1]


def _numbered_folders(parent: Path) -> list[Path]:
    """The folders of automatic checkpoints, from the oldest to the newest."""
    found = [(int(match[1]), path) for path in parent.glob("checkpoint_*") if (match := _NUMBERED.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


_ACCELERATE_FILES = (".safetensors", ".bin", ".pkl")  # in folders that Accelerate itself has saved
_NUMBERED = re.compile(r"checkpoint_(\d+)")
