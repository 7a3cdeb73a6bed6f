"""`MeshwrightStrategy`: lets Lightning's Trainer train under a plan. Lightning starts the ranks, calls the loops and
the hooks, and logs; Meshwright replicates or shards the module, combines gradients, and gathers or divides
checkpoints."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies.strategy import _ForwardRedirection
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.signature_utils import is_param_in_hook_signature
from torch import Tensor

from meshwright.compat.lightning.automatic_plan import check_before_training, choose_plan
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
from meshwright.compat.lightning.plan_precision import PlanPrecision
from meshwright.compat.lightning.session_hook import (
    count_steps,
    has_session_hook,
    load_session,
    make_session,
    save_session,
)
from meshwright.compat.lightning.shares import BatchShare, ShareLoader, SharesOfLoaders, check_equal_shapes
from meshwright.compat.plan_argument import PlanArgument
from meshwright.data.prepared import PreparedShare
from meshwright.errors import InputError
from meshwright.messages.exchange import all_gather_values
from meshwright.model_io.batch import at_least_fp32
from meshwright.plan import Plan
from meshwright.processes.torch_private import add_gloo_for_cpu_tensors
from meshwright.train.drive.driver import Driver
from meshwright.train.drive.whole_states import divide_loaded_state
from meshwright.train.session import Session
from meshwright.train.step.optimizer import use_fused_kernels


class MeshwrightStrategy(DDPStrategy):
    """Trains a LightningModule under a plan: a `Plan`, its groups as a dict, the path of a plan file, or `auto`.
    Without a plan, every rank is a replica. Launching, environments and collectives are those of Lightning's
    `DDPStrategy`.

    `checkpoint_format` is the format in which checkpoints are saved: `lightning`, one file with whole tensors, or
    `meshwright`, a folder of which each rank writes its part. Checkpoints of both formats are loaded. `options` are
    those of `DDPStrategy` that are not about DDP: `cluster_environment`, `process_group_backend`, `timeout` and others.
    With `check`, a plan that trains another model than one device is refused before the first step.
    """

    def __init__(
        self,
        plan: PlanArgument = None,
        *,
        checkpoint_format: CheckpointFormat = "lightning",
        check: bool = True,
        **options: Any,
    ) -> None:
        check_format(checkpoint_format)
        check_options(options)
        self._checks = check
        self._plan_argument = plan
        self._precision_flag = "32-true"
        self._plan: Plan | None = None
        self._driver: Driver | None = None
        self.session: Session | None = None  # of a module with the hook `session`, which then has no driver
        self._precision_plugin: PlanPrecision | None = None
        super().__init__(**options)
        self._checkpoint_format = checkpoint_format
        self._loaded_folder = False  # whether the checkpoint that was loaded last is a folder
        self._forward_redirection = _ForwardRedirection()
        self._shares = SharesOfLoaders()
        self._share = BatchShare()  # of the batch that is trained on
        self._is_in_training_step = False

    @property
    def plan(self) -> Plan:
        """The plan that the module is trained under, once `setup` has read or chosen it."""
        assert self._plan is not None, "the strategy is not set up"
        return self._plan

    @property
    def precision_plugin(self) -> PlanPrecision:
        if self._precision_plugin is None:
            self._precision_plugin = PlanPrecision()
        return self._precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Precision | None) -> None:
        if plugin is None or isinstance(plugin, PlanPrecision):
            self._precision_plugin = plugin
            return
        check_precision(str(plugin.precision))
        self._precision_flag = str(plugin.precision)

    # ---- setting up

    def setup(self, trainer: Any) -> None:
        assert self.accelerator is not None
        self.accelerator.setup(trainer)
        self.model_to_device()
        module: Any = self.lightning_module
        if has_session_hook(module):
            self._set_up_session(module, trainer)
        elif self._driver is None or self._driver.module is not module:
            self._driver = self._divide(module, trainer)
        self.model = module
        self.precision_plugin.driver = self._driver
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _set_up_session(self, module: Any, trainer: Any) -> None:
        if self._checkpoint_format != "meshwright":
            raise InputError(
                f"{type(module).__name__} has the hook session, whose checkpoints are folders: give"
                " MeshwrightStrategy(checkpoint_format='meshwright')"
            )
        if self.session is None:
            add_gloo_for_cpu_tensors()
            self._plan = self._read_plan(trainer)
            self.session = make_session(module, self._plan)
            count_steps(self.session, trainer)

    def _divide(self, module: Any, trainer: Any) -> Driver:
        add_gloo_for_cpu_tensors()
        self._plan = plan = self._read_plan(trainer)
        check_loop_plan(plan)
        check_ranks(plan, self.world_size)
        if plan.shares.samples and is_param_in_hook_signature(module.training_step, "dataloader_iter", explicit=True):
            raise InputError(
                f"the plan ({plan.summary()}) has shares, but {type(module).__name__}.training_step takes"
                " dataloader_iter, so that the share of its batch is not known: let it take batch"
            )
        if self._checks and trainer.state.fn == TrainerFn.FITTING:
            check_before_training(module, trainer.fit_loop._data_source.dataloader(), plan, self.root_device.type)
        return divide_module(
            module, plan, self.root_device, self.world_size, in_parts=not module.automatic_optimization
        )

    @property
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        if self.session is None:
            return {"num_replicas": self.world_size, "rank": self.global_rank}
        return {"num_replicas": self.plan.data_ranks, "rank": self.session.parallel.position.data_rank}

    def process_dataloader(self, dataloader: Any) -> Any:
        """Divides the batches of a loader for training by the plan's shares; others are divided evenly."""
        assert self.lightning_module is not None
        if not self.plan.shares.samples or not self.lightning_module.trainer.training:
            return dataloader
        data_rank = self.distributed_sampler_kwargs["rank"]
        return ShareLoader(dataloader, self.plan.shares.samples, data_rank, self._shares.add_loader())

    def _read_plan(self, trainer: Any) -> Plan:
        argument = self._plan_argument
        if argument == "auto":
            argument = None
            if trainer.state.fn == TrainerFn.FITTING:
                loader = trainer.fit_loop._data_source.dataloader()
                argument = choose_plan(self.lightning_module, loader, self.root_device.type, checks=self._checks)
        plan_decides = self._plan_argument is not None and self._plan_argument != "auto"
        plan = plan_of_argument(argument, self.world_size, self._precision_flag, plan_decides=plan_decides)
        if self._layer_sync is not None:  # Trainer(sync_batchnorm=True)
            numerics = plan.numerics.model_copy(update={"batch_norm": "synchronized"})
            plan = plan.model_copy(update={"numerics": numerics})
        return plan

    def setup_optimizers(self, trainer: Any) -> None:
        self._reset_optimizers_and_schedulers()
        if self.session is not None:
            self.optimizers = [self.session.optimizer]
            return
        super().setup_optimizers(trainer)
        if self.plan.compute.fused_optimizer:
            for optimizer in self.optimizers:
                use_fused_kernels(optimizer)

    def teardown(self) -> None:
        if self.session is None and (self._driver is None or self.plan.axes.shard == 1):
            super().teardown()
            return
        # Shards stay where they are: moving the module would not move what FSDP2 holds.
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        if self._driver is not None:
            self._driver.reshard()
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # ---- steps

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Sets the weight of this rank's loss, and the number of samples by which `self.log` weights its means."""
        self._share = self._shares.begin()
        self.precision_plugin.loss_weight = self._share.weight
        if self._share.samples is not None:
            assert self.lightning_module is not None
            results = self.lightning_module.trainer._results
            assert results is not None
            results.batch_size = self._share.samples
            if self.session is not None:
                self.session.note_share(PreparedShare(batch, self._share.samples, self._share.global_samples))

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._is_in_training_step = True
        try:
            return at_least_fp32(self._run_step("training_step", *args, **kwargs))
        finally:
            self._is_in_training_step = False

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """As Lightning's. What a training step logs as a mean is weighted by the samples of the ranks. Numbers of
        samples, which Lightning divides by at the end of an epoch, are not rounded."""
        if isinstance(tensor, Tensor) and reduce_op in ("mean", "avg"):
            if not tensor.is_floating_point():
                tensor = tensor.double()
            elif self._is_in_training_step and self._share.weight != 1:
                tensor = tensor * self._share.weight
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        if self._plan is not None and self._plan.shares.samples:
            check_equal_shapes(tensor)
        return super().all_gather(tensor, group, sync_grads)

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("validation_step", *args, **kwargs)

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("test_step", *args, **kwargs)

    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        return self._run_step("predict_step", *args, **kwargs)

    def _run_step(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """Calls a step of the module. Under automatic optimization this is a call of the module itself, so that FSDP2
        gathers its weights."""
        module = self.lightning_module
        assert module is not None
        if self.session is not None:
            return getattr(module, name)(*args, **kwargs)
        assert self._driver is not None
        with self._driver.forward_pass():
            if module.automatic_optimization:
                return self._forward_redirection(module, module, name, *args, **kwargs)
            return getattr(module, name)(*args, **kwargs)

    def optimizer_step(self, optimizer: Any, closure: Any, model: Any = None, **kwargs: Any) -> Any:
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        assert self._driver is not None
        self._driver.after_optimizer_step(optimizer)
        return output

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        assert self._driver is not None
        with self._driver.no_sync():
            yield

    # ---- validation, test and prediction

    def on_validation_start(self) -> None:
        self._gather_for(lambda trainer: trainer.num_val_batches)

    def on_test_start(self) -> None:
        self._gather_for(lambda trainer: trainer.num_test_batches)

    def on_predict_start(self) -> None:
        self._gather_for(lambda trainer: trainer.num_predict_batches)

    def on_validation_end(self) -> None:
        self._release()

    def on_test_end(self) -> None:
        self._release()

    def on_predict_end(self) -> None:
        self._release()

    def _gather_for(self, batches_of: Callable[[Any], Sequence[int | float]]) -> None:
        """Gathers all weights if the ranks have different numbers of batches: a rank that runs a batch more than the
        others would wait for their shards. Lightning's loaders for prediction divide samples in this way."""
        if self._driver is None or self.plan.axes.shard == 1:
            return
        assert self.lightning_module is not None
        counts = [count if count < float("inf") else None for count in batches_of(self.lightning_module.trainer)]
        of_ranks = all_gather_values(counts)
        if None in counts or any(other != counts for other in of_ranks):
            self._driver.gather()

    def _release(self) -> None:
        if self._driver is not None:
            self._driver.release()

    # ---- checkpoints

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        return True  # a rank may hold shards only

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if self._checkpoint_format == "lightning":
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        # The tensors are written from the module and the optimizers.
        contents = {key: value for key, value in checkpoint.items() if key not in ("state_dict", "optimizer_states")}
        path = Path(self.broadcast(str(filepath)))
        if self.session is not None:
            save_session(path, self.session, contents)
            return
        assert self._driver is not None
        # A checkpoint of weights only has no states of optimizers.
        optimizers = self.optimizers if "optimizer_states" in checkpoint else []
        step = int(checkpoint["global_step"])
        save_folder(path, self._driver.module, self._driver.mesh, optimizers, contents, step)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        path = Path(checkpoint_path)
        self._loaded_folder = is_checkpoint_folder(path)
        if not self._loaded_folder:
            refuse_other_folder(path)
            return super().load_checkpoint(checkpoint_path, weights_only)
        with naming_other_checkpoints(path):
            if self.session is not None:
                contents = load_session(path, self.session)
            else:
                assert self._driver is not None
                contents = load_folder(path, self._driver.module, self._driver.mesh, self.optimizers)
        return {**contents, "state_dict": {}, "optimizer_states": []}

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """The weights for `Trainer.save_checkpoint`: whole tensors for a file of Lightning's format, and what this rank
        holds for a folder."""
        if self.session is not None:
            return {}
        assert self._driver is not None
        if self._checkpoint_format == "lightning":
            return self._driver.whole_state()
        self._driver.reshard()
        state: dict[str, Any] = self._driver.module.state_dict()
        return state

    def full_state_dict(self) -> dict[str, Any]:
        """The module's weights as whole tensors, on every rank; those of the session if the module has one. All ranks
        call this together."""
        if self.session is not None:
            return self.session.state_dict()
        assert self._driver is not None
        return self._driver.whole_state()

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        if not self._loaded_folder:
            assert self._driver is not None
            self._driver.module.load_state_dict(checkpoint["state_dict"], strict=strict)

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        if self._checkpoint_format == "meshwright":
            return {}  # `save_checkpoint` writes the shards
        assert self._driver is not None
        return self._driver.whole_optimizer_state(
            optimizer._optimizer if isinstance(optimizer, LightningOptimizer) else optimizer
        )

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        states = [] if self._loaded_folder else checkpoint["optimizer_states"]
        for optimizer, state in zip(self.optimizers, states, strict=not self._loaded_folder):
            optimizer.load_state_dict(divide_loaded_state(optimizer, state))
        for optimizer in self.optimizers:
            if self.plan.compute.fused_optimizer:
                use_fused_kernels(optimizer)  # the saved state may be of an optimizer that was not fused
