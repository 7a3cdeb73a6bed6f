"""`DeepSpeedEngine`: what `initialize` returns in place of DeepSpeed's engine. It trains on a `Session` of Meshwright.

engine(…)               forward pass under the plan
engine.backward(loss)   gradient of loss / gradient_accumulation_steps; combined over the ranks in the last micro
                        step before an optimizer step
engine.step()           counts a micro step; in the last one: unscale (fp16), clip, optimizer, schedule
"""

import math
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.compat.deepspeed.api.dataloader import DeepSpeedDataLoader
from meshwright.compat.deepspeed.api.zero import note_model
from meshwright.compat.deepspeed.checkpoints import EngineCheckpoints
from meshwright.compat.deepspeed.errors import CallError
from meshwright.compat.deepspeed.settings import EngineSettings
from meshwright.compat.deepspeed_config.batch import CompleteSizes, complete
from meshwright.compat.deepspeed_config.config import DeepSpeedConfig
from meshwright.parallel.clip import global_norm
from meshwright.train.drive.driver import check_loss
from meshwright.train.session import Session

_USE_BACKWARD = "call engine.backward(loss) in place of loss.backward()"


class DeepSpeedEngine(EngineSettings, EngineCheckpoints, nn.Module):
    """Trains a model as DeepSpeed's engine. Attributes that it does not have are those of the model.

    `global_steps` are the optimizer steps so far, also those that were skipped, `micro_steps` the calls of `step`, and
    `global_samples` the samples of all steps. `optimizer` is None for a model that is not trained.
    """

    def __init__(
        self,
        session: Session,
        configuration: DeepSpeedConfig,
        sizes: CompleteSizes,
        *,
        trains: bool,
        collate_fn: Any = None,
    ) -> None:
        super().__init__()
        self.session = session
        self.module = session.module
        note_model(session.module)
        self.configuration = configuration
        self.sizes = sizes
        self.optimizer: torch.optim.Optimizer | None = session.optimizer if trains else None
        self.basic_optimizer = self.optimizer
        self.lr_scheduler: Any = session.schedule
        self.training_dataloader: DeepSpeedDataLoader | None = None
        self.collate_fn = collate_fn
        world, position = session.world, session.parallel.position
        self.device, self.local_rank, self.global_rank = world.device, world.local_rank, world.rank
        self.world_size, self.dp_world_size = world.size, session.plan.data_ranks
        self.data_rank = position.data_rank
        self.mp_world_size = session.plan.axes.tensor
        self.global_steps = self.micro_steps = self.global_samples = self.skipped_steps = 0
        self.loaded_checkpoint_tag: str | None = None
        self._boundary: bool | None = None  # what `set_gradient_accumulation_boundary` says
        self._backward_passes = 0  # since the last step
        self._is_stepped = False
        self._norm: float | None = None
        if trains:
            session.driver.lay_out_gradients()

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name in ("module", "session"):  # not set yet
                raise
            return getattr(self.module, name)

    @property
    def config(self) -> dict[str, Any]:
        """The configuration as it was given."""
        return dict(self.configuration.raw)

    # ---- passes

    def forward(self, *inputs: Any, **keywords: Any) -> Any:
        return self.session.driver.forward(*inputs, **keywords)

    def backward(self, loss: Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True) -> Tensor:
        """Runs the backward pass of a loss, which is the mean over this rank's micro batch. Returns it divided by the
        number of micro steps. All ranks call this together."""
        self._require_optimizer("backward")
        check_loss(loss, "engine.backward", error=CallError)
        scaled = loss / self.gradient_accumulation_steps() if scale_wrt_gas else loss
        # Without managed accumulation, a later call of `step` ends it, so every pass has to be combined.
        accumulates = self.managed_gradient_accumulation() and not self.is_gradient_accumulation_boundary()
        with self.session.driver.no_sync() if accumulates else nullcontext():
            self.session.driver.backward(self.scale(scaled), retain_graph=retain_graph)
        self._backward_passes += 1
        return scaled

    def scale(self, loss: Tensor) -> Tensor:
        """Returns the loss times the loss scale of fp16, and times the number of ranks if gradients are added up."""
        factor = self.session.loss_scale.value if self.session.loss_scale else 1.0
        if self.configuration.gradient_sum:
            factor *= self.dp_world_size
        return loss if factor == 1.0 else loss * factor

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context, backward passes accumulate gradients without combining them over the ranks."""
        if self.zero_optimization_partition_gradients():
            raise CallError(
                f"engine.no_sync does not work with ZeRO stage {self.zero_optimization_stage()}, which divides"
                " gradients after each backward pass: choose stage 0 or 1"
            )
        if not self.session.driver.synchronizes:
            raise CallError("engine.no_sync is called within engine.no_sync: leave out the inner one")
        return self.session.driver.no_sync()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Whether the next call of `step` makes an optimizer step."""
        if self._boundary is not None:
            return self._boundary
        if not self.managed_gradient_accumulation():
            return self._is_stepped
        return (self.micro_steps + 1) % self.gradient_accumulation_steps() == 0

    def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
        """Says for the next passes whether they are the last before an optimizer step, in place of the counter."""
        self._boundary = is_boundary

    # ---- steps

    def step(self, lr_kwargs: dict[str, Any] | None = None) -> None:
        """Counts a micro step, and makes the optimizer's step if it is the last one. All ranks call this together."""
        if not self.session.driver.synchronizes:
            raise CallError("engine.step was called within engine.no_sync: call it after that context")
        self._require_optimizer("step")
        self._is_applied = False
        self._is_stepped = True
        if self.is_gradient_accumulation_boundary():
            if not self._backward_passes:
                raise CallError(f"engine.step has no gradients of this engine's backward pass: {_USE_BACKWARD}")
            self._update(lr_kwargs or {})
        self._is_stepped = False
        self.micro_steps += 1

    def _update(self, lr_kwargs: dict[str, Any]) -> None:
        assert self.optimizer is not None
        session, parallel = self.session, self.session.parallel
        is_finite = session.loss_scale is None or session.loss_scale.unscale_(self.module.parameters())
        if is_finite:
            is_finite = self._clip()
        if is_finite:
            self.optimizer.step()
            session.steps += 1
            if self.lr_scheduler is not None:
                self.lr_scheduler.step(**lr_kwargs)
        else:
            self.skipped_steps += 1
            parallel.reshard()
        self._is_applied = is_finite
        self.zero_grad()
        self.global_steps += 1
        passes = self.gradient_accumulation_steps() if self.managed_gradient_accumulation() else self._backward_passes
        self.global_samples += self.sizes.micro * self.dp_world_size * passes
        self._backward_passes = 0
        every = self.steps_per_print()
        if every and self.global_steps % every == 0 and self.global_rank == 0:
            print(f"step={self.global_steps}, skipped={self.skipped_steps}, lr={self.get_lr()}", flush=True)

    def _clip(self) -> bool:
        """Clips the gradients and notes their norm. Returns False if the step has to be left out."""
        parallel = self.session.parallel
        if self.gradient_clipping() > 0:
            norm = parallel.clip_(self.gradient_clipping())
        else:
            gradients = [(name, parameter.grad) for name, parameter in self.module.named_parameters()]
            norm = global_norm(gradients, *parallel.weight_division)
        self._norm = float(norm)
        return math.isfinite(self._norm) or not self.configuration.skips_overflow

    _is_applied = False

    def was_step_applied(self) -> bool:
        """Whether the last call of `step` has changed the weights."""
        return self._is_applied

    def zero_grad(self, set_to_none: bool = True) -> None:
        for parameter in self.module.parameters():
            parameter.grad = None

    def _require_optimizer(self, method: str) -> None:
        if self.optimizer is None:
            raise CallError(
                f"engine.{method} needs an optimizer: give initialize(optimizer=…), or the section optimizer of the"
                " configuration"
            )

    # ---- values that scripts ask for

    def get_global_grad_norm(self) -> float | None:
        """The norm of the last step's gradient before clipping; None before the first step."""
        return self._norm

    def get_lr(self) -> list[Any]:
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        return self._of_groups("momentum" if self.optimizer_name() in ("SGD", "RMSprop") else "betas")

    def get_type(self) -> list[Any]:
        return self._of_groups("type")

    def _of_groups(self, option: str) -> list[Any]:
        return [group.get(option, 0.0) for group in self.optimizer.param_groups] if self.optimizer else []

    def loss_scale(self) -> float:
        return self.session.loss_scale.value if self.session.loss_scale else 1.0

    cur_scale = property(loss_scale)

    def get_data_parallel_rank(self) -> int:
        return self.data_rank

    def get_tensor_parallel_rank(self) -> int:
        return self.session.parallel.position.tensor

    get_model_parallel_rank = get_tensor_parallel_rank

    def train(self, mode: bool = True) -> "DeepSpeedEngine":
        self.session.parallel.train(mode)
        self.training = mode
        return self

    def eval(self) -> "DeepSpeedEngine":
        return self.train(False)

    def compile(self, *arguments: Any, **keywords: Any) -> None:
        raise CallError("engine.compile is not offered: write compute.compile: blocks in a plan (docs/plan.md)")

    def destroy(self) -> None:
        """Does nothing: memory is freed with the engine."""

    def empty_partition_cache(self) -> None:
        """Frees weights that were gathered for a pass."""
        self.session.parallel.reshard()

    # ---- batches

    def set_train_batch_size(self, train_batch_size: int) -> None:
        """Changes the number of micro steps so that a step has this many samples."""
        share = self.sizes.micro * self.dp_world_size
        if train_batch_size < 1 or train_batch_size % share:
            raise CallError(f"train_batch_size {train_batch_size} is no multiple of {share}, the samples of all ranks")
        self.sizes = CompleteSizes(train_batch_size, self.sizes.micro, train_batch_size // share, self.dp_world_size)

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Changes the samples of a rank in one pass. The number of micro steps stays."""
        sizes = self.configuration.batch.__class__(None, micro_batch_size, self.sizes.accumulation)
        self.sizes = complete(sizes, self.dp_world_size, "set_train_micro_batch_size")

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool | None = None,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DeepSpeedDataLoader:
        """Returns a loader of this rank's micro batches. For `route="train"` the samples are shuffled, in the same
        order in each epoch."""
        return DeepSpeedDataLoader(
            dataset,
            batch_size or self.train_micro_batch_size_per_gpu(),
            rank=self.data_rank,
            ranks=self.dp_world_size,
            shuffle=route == "train",
            sampler=data_sampler,
            collate_fn=collate_fn or self.collate_fn,
            workers=num_local_io_workers or 0,
            pin_memory=self.device.type == "cuda" if pin_memory is None else pin_memory,
            drop_last=self.dataloader_drop_last(),
        )
