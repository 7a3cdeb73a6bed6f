"""`MeshwrightTrainer`: transformers' `Trainer`, whose model is trained by a session under a plan.

Trainer's loop, arguments, callbacks, schedules and checkpoints stay as they are. A session divides the model, combines
gradients and clips them; every rank loads its share of each global batch.

Trainer's loss on a rank, L, comes in three kinds, of which the loss of the global batch is (`_loss_over_ranks`):

    tokens    Σ of the rank's tokens · data ranks / number of all tokens           mean of L over the data ranks
    ignored   the rank's mean · data ranks, as the model has ignored the number    mean of L / data ranks, weighted
    mean      the rank's mean over its labels                                      mean of L, weighted

The weight of a rank is its number of labels: of tokens with a label, or of samples if these have one label (`_weight`).
"""

import inspect
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Trainer
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_pt_utils import find_batch_size

from meshwright.auto.choose import best_plan
from meshwright.compat.check import check_in_loop
from meshwright.compat.loaders import batch_of_first_samples
from meshwright.compat.plan_argument import PlanArgument, ignoring_accumulation, without_accumulation
from meshwright.compat.transformers.accelerator import SessionAccelerator, use_session_accelerator
from meshwright.compat.transformers.arguments import (
    check_arguments,
    checked_plan,
    plan_of_argument,
    with_arguments_precision,
)
from meshwright.compat.transformers.resume import check_checkpoint
from meshwright.compat.transformers.session_model import SessionModel
from meshwright.compat.transformers.whole_states import divides_weights, whole_weights
from meshwright.errors import InputError
from meshwright.plan import Plan
from meshwright.proof.before_training.before_training import fastest_equal_plan
from meshwright.proof.before_training.plan_kind import needs_check
from meshwright.train.parallelize import parallelize
from meshwright.train.session import Session
from meshwright.train.step.optimizer import use_fused_kernels


class MeshwrightTrainer(Trainer):
    """Trains under a plan: a `Plan`, its groups as a dict, the path of a plan file, or `auto` for the fastest one that
    Trainer's loop can run. Without a plan, every rank is a replica. With `check`, a plan that divides the model is
    first compared with one device, and refused if it trains another model. All other arguments are Trainer's.

    Trainers of other libraries that inherit from `Trainer` get the same by inheriting from this class first:
    `class MyTrainer(MeshwrightTrainer, SFTTrainer)`.
    """

    accelerator: SessionAccelerator
    model: Any

    def __init__(self, *args: Any, plan: PlanArgument = None, check: bool = True, **kwargs: Any) -> None:
        self._plan_argument = plan
        self._is_checked = not check  # whether the plan needs no check any more
        self._plan: Plan | None = None
        self._sample_batch: Any = None
        self._session: Session | None = None
        self._session_model: SessionModel | None = None
        self._token_count: Any = None  # the number of tokens by which the last loss was divided; None if by samples
        self._batch: Any = None  # of the last loss
        self._borrowed: Any = None  # the batch that has a sample of another rank only, which must have no weight
        self._ignores_count: bool | None = None  # whether the model ignores that number; None until it is known
        super().__init__(*args, **kwargs)
        if self.is_model_parallel or self.is_distributed_loading_by_transformers:
            raise InputError(
                "the model was divided among devices when it was loaded: load it without device_map and"
                " distributed_config, and let the plan divide it"
            )

    @property
    def plan(self) -> Plan:
        """The plan. With `plan="auto"`, it is chosen when the first loader is made."""
        if self._plan is None:
            raise InputError("the plan is chosen when training or evaluation begins: read trainer.plan after that")
        return self._plan

    @property
    def session(self) -> Session | None:
        """The session that trains the model; None before training or evaluation has begun."""
        return self._session

    # ---- setting up

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args)
        plan = plan_of_argument(self._plan_argument, self.args)
        self._plan = None if plan == "auto" else plan
        self.args._n_gpu = 1  # one process trains on one device
        super().create_accelerator_and_postprocess()
        use_session_accelerator(self.accelerator, self._plan_for, self._loss_over_ranks)
        self.gather_function = self.accelerator.gather_for_metrics

    def _plan_for(self, loader: Any) -> Plan:
        """Returns the plan, and chooses it if it is `auto`. `loader` has one rank's batches."""
        needs_sample = self._plan is None or self._plan.axes.tensor > 1 or bool(self._plan.modules.splits)
        if needs_sample and self._sample_batch is None:
            self._sample_batch = batch_of_first_samples(loader)
            if self._sample_batch is None:
                raise InputError(
                    "MeshwrightTrainer: this plan needs a sample batch (it is `auto`, or splits layers), and the data"
                    " set is a stream: give a data set with a length, or a plan of replicas and shards"
                )

        def check(plan: Plan) -> None:
            if not self._is_checked:
                self._check_plan(plan, loader)

        if self._plan is None:
            self._plan = fastest_equal_plan(self._best_plan, check)
        elif not self.accelerator.prepares_evaluation:
            check(self._plan)
        self._is_checked = self._is_checked or not self.accelerator.prepares_evaluation
        return self._plan

    def _check_plan(self, plan: Plan, loader: Any) -> None:
        """Raises `UnequalPlan` if the plan does not train the same model as one device. A stream is not read for it."""
        batch = batch_of_first_samples(loader) if self._sample_batch is None else self._sample_batch
        created = self.create_optimizer() if needs_check(plan) else None
        check_in_loop(self.model, getattr(created, "optimizer", created), batch, plan, self.args.device.type)

    def _best_plan(self, refuse: Callable[[Plan], None]) -> Plan:
        """The fastest plan that Trainer's loop can run, for one of the batches that it accumulates. `refuse` raises an
        `InputError` for plans that it must not be."""
        args = self.args

        def check(plan: Plan) -> None:
            refuse(checked_plan(plan, args))

        plan = best_plan(
            self.model,
            self._sample_batch,
            global_batch=args.per_device_train_batch_size * args.world_size,
            optimizer=self.create_optimizer(),
            device=args.device.type,
            check=ignoring_accumulation(check),
            tune=0,  # session.step is timed, and Trainer makes its own steps
        )
        plan = with_arguments_precision(without_accumulation(plan), args, plan_decides=False)
        return checked_plan(plan, args)

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """Returns the model that the loops call. Makes the session if there is none of this model."""
        if self._session is None or self._session_model is None or self._session.module is not self.model:
            self._session = self._make_session()
            self._session_model = SessionModel(self._session)
        return self._session_model

    def _make_session(self) -> Session:
        if self.optimizer is None:  # an evaluation before the training
            self.create_optimizer()
        template = getattr(self.optimizer, "optimizer", self.optimizer)
        session = parallelize(
            self.model,
            template,
            plan=self.plan,
            seed=self.args.seed,
            device=self.args.device.type,
            sample_batch=self._sample_batch,
        )
        session.seeds_passes = self.args.world_size > 1  # one process draws the random numbers that Trainer draws
        if divides_weights(session):
            session.driver.take_whole_tensors(session.optimizer)
        self.model, self.optimizer, self.accelerator.session = session.module, session.optimizer, session
        if self.lr_scheduler is not None:  # the user's, for the template
            _use_optimizer(self.lr_scheduler, template, session.optimizer)
        return session

    def _prepare_for_training(self, *args: Any, **kwargs: Any) -> Any:
        prepared = super()._prepare_for_training(*args, **kwargs)
        assert self._session is not None
        self._session.steps = self.state.global_step  # random numbers continue as in the saved run
        return prepared

    # ---- batches and losses

    def get_tp_size(self) -> int:
        """The number of ranks that have the same samples."""
        return self._plan.axes.tensor if self._plan is not None else 1

    def get_total_train_batch_size(self, args: Any) -> int:
        """The global batch, which is the same under every plan."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        """Also tells the accelerator which loaders are for evaluations."""
        arguments = inspect.signature(super()._get_dataloader).bind(*args, **kwargs).arguments
        self.accelerator.prepares_evaluation = not arguments.get("is_training", False)
        try:
            return super()._get_dataloader(*args, **kwargs)
        finally:
            self.accelerator.prepares_evaluation = False

    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: torch.device) -> tuple[list[Any], Any]:
        batches, count = super().get_batch_samples(epoch_iterator, num_batches, device)
        self._borrowed = batches[-1] if batches and self.accelerator.borrows_sample else None
        return batches, count

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: torch.device) -> Any:
        """Also gives no weight to the tokens of a sample that this rank has borrowed."""
        if batch_samples and self.accelerator.borrows_sample:
            labels = batch_samples[-1].get("labels")
            if isinstance(labels, Tensor) and not labels.is_floating_point():
                batch_samples[-1]["labels"] = torch.full_like(labels, -100)
        self._token_count = super()._get_num_items_in_batch(batch_samples, device)
        return self._token_count

    def _samples(self) -> int:
        """The number of this rank's samples in the batch of the last loss; 0 if the sample is borrowed."""
        return 0 if self._batch is self._borrowed else find_batch_size(self._batch) or 1

    def _weight(self) -> int:
        """The number of labels in the batch of the last loss, over which its mean was taken on this rank."""
        labels = self._batch.get("labels")
        if self._batch is self._borrowed or not isinstance(labels, Tensor):
            return self._samples()
        if labels.dim() < 2 or labels.is_floating_point():
            return self._samples()
        return int((labels[..., 1:] if self._loss_shifts_labels else labels).ne(-100).sum())

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        self._token_count, self._batch = num_items_in_batch, inputs
        self._find_out_ignored_count(model, inputs)
        super().training_step(model, inputs, num_items_in_batch)
        assert self.accelerator.last_loss is not None
        return self.accelerator.last_loss

    def _loss_over_ranks(self, loss: Tensor) -> Tensor:
        """Returns the loss of the global batch, the same on every rank, of which `loss` is this rank's part."""
        session = self._session
        assert session is not None
        if session.plan.data_ranks == 1:
            return loss
        if not self.accelerator.divides_loader:  # of a loader that the user has divided
            return session.mean(loss, 1)
        if not self._divides_by_tokens:
            return session.mean(loss, self._weight())
        if self._ignores_count:
            return session.mean(loss / session.plan.data_ranks, self._weight())
        return session.mean(loss, 1)

    @property
    def _divides_by_tokens(self) -> bool:
        if self.loss_is_scaled_for_ga is not None:  # what a subclass with a loss of its own says about it
            return self.loss_is_scaled_for_ga
        takes_count = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        return self._token_count is not None and takes_count

    def _find_out_ignored_count(self, model: nn.Module, inputs: Any) -> None:
        """Computes the first loss of several ranks with two numbers of tokens. Many models accept the number and return
        the mean over their batch nevertheless, which Trainer cannot know."""
        if self._ignores_count is not None or not self._divides_by_tokens:
            return
        if type(self).compute_loss is not Trainer.compute_loss or self.plan.data_ranks == 1:
            self._ignores_count = False
            return
        was_training = model.training
        model.eval()
        losses: list[Any] = []
        with torch.no_grad():
            for count in (self._token_count, self._token_count * 2):
                prepared = self._prepare_inputs({**inputs})
                losses.append(Trainer.compute_loss(self, model, prepared, num_items_in_batch=count))
        model.train(was_training)
        first, second = losses
        differs = (first - second).abs() > 0.1 * first.abs()  # False for a loss that is NaN, without any token
        self._ignores_count = not bool(self.accelerator.gather(differs.reshape(1)).any())

    # ---- evaluation

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        try:
            return super().evaluation_loop(*args, **kwargs)
        finally:
            self.accelerator.row_counts = None

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> tuple[Tensor | None, Any, Any]:
        self._token_count, self._batch = None, inputs
        self._borrowed = inputs if self.accelerator.borrows_sample else None
        if self.accelerator.divides_loader:
            own = torch.tensor([self._samples()], device=self.args.device)
            self.accelerator.row_counts = self.accelerator.gather(own).tolist()
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if loss is not None and self.plan.data_ranks > 1:
            self._find_out_ignored_count(model, inputs)
            loss = self._loss_over_ranks(loss)
        if loss is not None and self.plan.axes.tensor > 1:  # Trainer repeats it for the samples of one rank
            loss = loss.expand(self.plan.axes.tensor)
        return loss, logits, labels

    # ---- checkpoints

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self._session is None or not divides_weights(self._session):
            super().save_model(output_dir, _internal_call)
            return
        state = whole_weights(self._session)
        if self.args.should_save:
            self._save(output_dir, state_dict=state)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self._session is None or not divides_weights(self._session):
            super()._save_optimizer_and_scheduler(output_dir)
            return
        state = self._session.driver.whole_optimizer_state(self._session.optimizer, keeps=self.args.should_save)
        if self.args.should_save:
            torch.save(state, os.path.join(output_dir, OPTIMIZER_NAME))
            assert self.lr_scheduler is not None
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER_NAME))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        check_checkpoint(Path(resume_from_checkpoint))
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        super()._load_optimizer_and_scheduler(checkpoint)
        if self.plan.compute.fused_optimizer and self._session is not None:
            use_fused_kernels(self._session.optimizer)  # the saved options may be of an optimizer that was not fused


def _use_optimizer(schedule: Any, template: Any, optimizer: torch.optim.Optimizer) -> None:
    """Makes a schedule, and those that it consists of, set the learning rates of `optimizer` instead of `template`."""
    if getattr(schedule, "optimizer", None) is template:
        schedule.optimizer = optimizer
    for part in getattr(schedule, "_schedulers", ()):
        _use_optimizer(part, template, optimizer)
