"""`OwnLoop`: the part of a session for training loops that call backward themselves, instead of `Session.step`.

loss = session.forward(batch)          the mean loss over the global batch
loss = session.mean(value)             the same for a loss that the loop computes from `session.model(...)`
session.backward(loss)                 leaves the mean of the data ranks' gradients in the parameters
session.optimizer.step()

mean                 = Σ over data ranks of (count · value) / Σ of the counts                            GlobalMean
gradient on a rank   = data ranks · count / Σ of the counts · gradient of the rank's own value           GlobalMean
gradient             = mean of these over the data ranks                                                 backward
"""

import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from torch.utils.data import DataLoader

from meshwright.blocks.borrowed_samples import borrowed_samples
from meshwright.data.batch import Batch, Microbatch, SampleShare
from meshwright.data.collate.dependence import BatchDependence
from meshwright.data.digest import check_same_samples, check_same_stream, check_same_weights, check_shares
from meshwright.data.loading import LoadingOptions, is_stream
from meshwright.data.order import derive_seed
from meshwright.data.prepared import PreparedLoader, PreparedShare, check_divisible, loading_of
from meshwright.data.samples import check_undivided, is_hugging_face
from meshwright.errors import InputError
from meshwright.model_io.batch import ModelBatch, split_batch
from meshwright.numbers.limits import is_number
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.replicate.unused import UnusedParameters
from meshwright.plan_fields.shares import describe_shares
from meshwright.plan_rules.table import refusal
from meshwright.train.drive.driver import Driver, check_loss
from meshwright.train.loop_checks.copies import WeightCopies
from meshwright.train.loop_checks.gradient_hooks import LateHooks
from meshwright.train.loop_checks.own_backward import describe_loss
from meshwright.train.loop_checks.padding import Collation, changes_loss
from meshwright.train.loop_checks.settings import Settings, read_settings
from meshwright.train.loss.global_mean import GlobalMean, is_mean_of_ranks
from meshwright.train.loss.loss import Loss
from meshwright.train.shares.adaptive import AdaptiveShares
from meshwright.train.step.batch import cut_share, move_to_device, samples_in
from meshwright.train.step.explained_errors import Explainer, explains_errors
from meshwright.train.step.randomness import StepGenerators
from meshwright.train.step.remote_optimizer import RemoteOptimizer
from meshwright.train.step.schedule import step_schedule


class OwnLoop:
    """Forward and backward passes that a user's loop calls. `steps` is the number of optimizer steps so far. The random
    numbers of forward passes depend on it and on `seed`."""

    optimizer: torch.optim.Optimizer
    schedule: LRScheduler | None = None

    def __init__(
        self,
        parallel: ParallelModel,
        loss: Loss,
        seed: int,
        target: str | None,
        report: Callable[[str], None] = lambda activity: None,
    ) -> None:
        """`target` is the key of the target in batches that are dicts. `report` is called with what the rank is
        doing."""
        self._parallel = parallel
        self._report = report
        self._loss = loss
        self._target = target
        self.seed = seed
        self.steps = 0
        self.generators = StepGenerators(parallel.device, always_seeds=parallel.plan.world_size > 1)
        self.gradient_norm: Tensor | None = None
        self.remote_optimizer: RemoteOptimizer | None = None
        self.checks_first_batch = False  # whether the first batch of another loader is compared between ranks
        # Called once, with the first batch and with whether all ranks call it together
        self.first_batch_check: Callable[[Any, bool], None] | None = None
        self.seeds_passes = True  # whether `model` seeds the generators; otherwise it draws from them as they are
        self.explainer: Explainer | None = None
        self.shares: AdaptiveShares | None = None  # None if the plan's shares are fixed
        self._unused_parameters = UnusedParameters()
        self._collation = Collation(parallel)
        self._late_hooks = LateHooks(parallel)
        self._weight_copies: WeightCopies | None = None  # None if they are not compared
        self.driver = Driver.of(parallel)
        self._prepared_share: PreparedShare | None = None  # what the loop of a prepared loader trains on at the moment
        self._forward_passes = 0  # since the last optimizer step
        self._has_own_passes = False  # whether the loop has called the model since the last optimizer step
        # Whether the last backward pass combined the gradients of the ranks; None if there was none since the last step
        self._gradients_are_combined: bool | None = None

    def __call__(self, *arguments: Any, **keywords: Any) -> Any:
        """The same as `model`."""
        return self.model(*arguments, **keywords)

    @explains_errors
    def model(self, *arguments: Any, **keywords: Any) -> Any:
        """Calls the parallel model and returns its output, in the plan's precision. Any number of calls, also of other
        sessions' models, may come before a backward pass. Random numbers such as dropout masks depend on the session's
        seed, the number of steps and the data rank; the generators of the caller are left as they were."""
        if torch.is_grad_enabled() or self._parallel.pipeline is not None:
            self._check_plan("model")
        seed = derive_seed(self.seed, "forward", self.steps, self._forward_passes, self._parallel.position.data_rank)
        self._late_hooks.before_pass(self._parallel)
        if torch.is_grad_enabled():
            if not (arguments and keywords):
                self._look_at_first_batch(keywords or arguments, together=False)
            self._report("forward")
            self._has_own_passes = True
            self._forward_passes += 1
        is_borrowed = torch.is_grad_enabled() and self._prepared_share is not None and not self._prepared_share.samples
        borrowed = borrowed_samples(self._parallel.module) if is_borrowed else nullcontext()
        with self.generators.seeded(seed) if self.seeds_passes else nullcontext(), borrowed:
            output = self.driver.forward(*arguments, **keywords)
        self._late_hooks.after_pass()
        return output

    @explains_errors
    def forward(self, batch: Any) -> Tensor:
        """Calls the model and the loss function with this rank's share of a global batch. Returns the mean loss over
        the global batch, the same on every rank. `backward` of it gives the gradient of that mean."""
        self._check_first_batch(batch)
        self._look_at_first_batch(batch, together=True)
        example, samples = self._example(batch, None), self._share_of(batch).samples
        self._try_loss(batch)
        with self._loss.forward_context(samples > 0):
            output = self.model(*example.arguments, **example.keywords)
        term = self._loss.term(output, example.target, samples)
        count = self._loss.count(example.target, samples) if term.returned_count is None else term.returned_count
        return self._global_mean(term.value, term.weight, count if self._loss.is_divided else None)

    def _try_loss(self, data: Any) -> None:
        """Finds out with the first batch what the loss is a mean over, if no sample batch was there before. All ranks
        call this together."""

    @explains_errors
    def mean(self, value: Tensor, count: "int | float | Tensor | None" = None) -> Tensor:
        """Returns the mean over the samples of all data ranks, the same on every rank, of a `value` that is the mean
        over this rank's samples. The backward pass of the result gives the gradient of that mean, also if ranks have
        different numbers of samples.

        `count` is the number of samples (or of targets) that `value` is a mean over. None means this rank's share of
        the batch that the session's prepared loader yielded last. All ranks call this together.
        """
        if count is None:
            if self._prepared_share is None:
                raise InputError(
                    "session.mean(value) needs to know how many samples the value is a mean over: call it in a loop"
                    " over session.prepare(loader), or give session.mean(value, count)"
                )
            count = self._prepared_share.samples
        if not isinstance(value, Tensor) or value.numel() != 1:
            raise InputError(f"session.mean takes a loss, one number, and this is {describe_loss(value)}")
        if not isinstance(count, Tensor) and not (is_number(count) and 0 <= count < math.inf):
            raise InputError(f"session.mean: count is {count!r}: give the number of samples of this rank, at least 0")
        return self._global_mean(value, count, count)

    def _global_mean(self, value: Tensor, weight: "float | Tensor", count: "float | Tensor | None") -> Tensor:
        """Returns Σ weight · value / Σ count over the data ranks; the divisor is 1 if `count` is None or if the sum of
        the counts is 0."""
        parallel, ranks = self._parallel, self._parallel.plan.data_ranks
        if not isinstance(weight, Tensor) and weight == 0:
            value = value.nan_to_num()  # a rank without samples may have any value
        terms = (weight * value.detach(), 1.0 if count is None else count)
        sums = torch.stack([torch.as_tensor(term, device=value.device).double().reshape(()) for term in terms])
        if parallel.sums is not None:
            contributes = parallel.position.first_of_data_rank
            sums = parallel.sums.start(sums if contributes else torch.zeros_like(sums))()
        divisor = torch.ones_like(sums[1]) if count is None else sums[1] + (sums[1] == 0)
        mean: Tensor = GlobalMean.apply(value, weight * ranks / divisor, sums[0] / divisor)
        return mean

    @explains_errors
    def backward(self, loss: Tensor, *, retain_graph: bool = False) -> None:
        """Runs the backward pass of a loss. The gradients of this session's parameters are then the mean over the data
        ranks of what was accumulated in them; within `no_sync`, they are not combined. A loss of `forward` or `mean`
        gives the gradient of the mean over the global batch; any other loss the mean of the ranks' gradients. Gradients
        of other sessions' parameters, through which the loss was computed, are accumulated but not combined. All ranks
        call this together."""
        self._check_plan("backward")
        check_loss(loss, "session.backward", ": give what session.forward or session.mean returned")
        if self._parallel.plan.shares.samples and not is_mean_of_ranks(loss):
            samples = describe_shares(self._parallel.plan.shares.samples)
            raise InputError(
                f"the plan has shares ({samples}), so the ranks' losses have different weights: give"
                " session.backward(session.mean(loss)), or session.mean(loss, count) for a mean over other things than"
                " the samples of a prepared loader"
            )
        self._report("backward")
        self.driver.backward(loss, retain_graph=retain_graph)
        self._gradients_are_combined = self.driver.synchronizes

    def no_sync(self) -> AbstractContextManager[None]:
        """Within this context, `backward` accumulates gradients without combining them over the data ranks. Use it for
        all but the last backward pass before an optimizer step."""
        return self.driver.no_sync()

    @explains_errors
    def clip_gradients(self, max_norm: float) -> Tensor:
        """Scales the gradients so that the norm of the whole model's gradient is at most `max_norm`. Returns the norm
        before, the same on every rank. All ranks call this together, after the last `backward` of a step."""
        if not (is_number(max_norm) and max_norm > 0):
            raise InputError(f"session.clip_gradients: max_norm is {max_norm!r}: give a number above 0")
        self.gradient_norm = norm = self._parallel.clip_(max_norm)
        return norm

    def step_schedule(self, metric: float | None = None) -> None:
        """Steps the learning-rate schedule, for loops that do not call `step`, and for schedules that need a metric
        (`ReduceLROnPlateau`), which `step` never steps. The metric of rank 0 is used on every rank; all ranks call this
        together. Does nothing without a schedule."""
        if self.schedule is not None:
            step_schedule(self.schedule, metric)

    def _before_optimizer_step(self) -> None:
        """Looks for parameters without a gradient. Raises an `InputError` if a loop has computed gradients that are not
        combined over the data ranks: every rank would go on with weights of its own."""
        self._late_hooks.check(self._parallel)
        self._check_combined()
        self._unused_parameters.look(self._parallel)

    def _check_combined(self) -> None:
        if not self._has_own_passes or self._gradients_are_combined or self._parallel.plan.data_ranks == 1:
            return
        if self._gradients_are_combined is False:
            raise InputError(
                "the last session.backward before session.optimizer.step() was within session.no_sync(), so the ranks'"
                " gradients are not combined: call it outside of no_sync for the last batch of a step"
            )
        averager, parameters = self._parallel.gradient_averager, self._parallel.module.parameters()
        if averager is not None and any(parameter.grad is not None for parameter in parameters):
            raise InputError(
                "session.optimizer.step() without session.backward(loss), so the ranks' gradients are not combined:"
                " replace loss.backward() by session.backward(loss) of the session whose optimizer makes the step"
            )

    @explains_errors
    def _after_optimizer_step(self) -> None:
        """Counts an optimizer step of the user's loop, and makes the buffers equal on all data ranks. Does nothing
        after an optimizer step of `Session.step`."""
        self._gradients_are_combined = None
        steps = self.steps + 1
        self.driver.after_optimizer_step(aligns=self._has_own_passes)
        if self._has_own_passes:
            self._has_own_passes = False
            self._forward_passes = 0
            self.steps += 1
        if self.explainer is not None:
            self.explainer.note_steps(steps)
        if self._weight_copies is not None:
            self._weight_copies.after_step(steps)

    def compare_weight_copies(self) -> None:
        """From now on, raises an `InputError` if ranks that hold copies of a weight have different ones or other
        settings, at the end of some steps and before weights are saved."""

        def settings() -> Settings:
            session = this()
            assert session is not None
            return read_settings(session._parallel, session.optimizer, session._late_hooks.changing())

        this = ref(self)
        self._weight_copies = WeightCopies(self._parallel, settings)

    def _align(self) -> None:
        """Makes buffers equal on all data ranks, and compares the copies of weights."""
        self._parallel.align_buffers()
        if self._weight_copies is not None:
            self._weight_copies.compare_now(self.steps)

    # ---- batches

    def prepare(self, loader: "DataLoader[Any]") -> PreparedLoader:
        """Returns an iterable that yields this rank's share of every batch of a `DataLoader`, on the session's device,
        for `step`, `forward` or `model`. All ranks call this together, and loop over the result together. Batch k is
        the same on any number of ranks: rank 0 takes it from the loader's sampler. A rank without a sample of a short
        batch gets one of another rank, which `step`, `forward` and `mean` give no weight."""
        check_divisible(loader)
        self._check_same_samples(loader.dataset)
        if self.shares is not None:
            self.shares.note_loading(loading_of(loader))
        this = ref(self)  # the loader may live longer than the session, and would keep its memory

        def note(share: PreparedShare | None) -> None:
            if (session := this()) is not None:
                session.note_share(share)
                if session.shares is not None and share is not None:
                    session.shares.note_batch(share.number)

        def steps() -> int:
            return session.steps if (session := this()) else 0

        device = self._parallel.device
        loading = self._collation_of(loader.dataset, loading_of(loader))
        return PreparedLoader(
            loader,
            self._share(),
            self.seed,
            steps,
            note,
            lambda batch: move_to_device(batch, device),
            loading.whole_batches,
        )

    def _collation_of(self, dataset: Any, loading: LoadingOptions) -> LoadingOptions:
        """Returns the loading options with the choice whether ranks collate whole batches. All ranks call this
        together."""

        def changes(dependence: BatchDependence) -> bool | None:
            collate = loading.collate
            if self.remote_optimizer is not None or collate is None:  # workers of servers do not wait for each other
                return None
            self._try_loss(collate([*dependence.small, dependence.large]))
            return changes_loss(self._parallel, self._loss, self._example, collate, dependence)

        return self._collation.choose(dataset, loading, self.seed, self._share().ranks, changes)

    def note_share(self, share: PreparedShare | None) -> None:
        """Tells what the loop trains on at the moment, if a loader that knows it has given it; None at its end."""
        self._prepared_share = share

    def _check_same_samples(self, dataset: Any, loading: LoadingOptions | None = None) -> None:
        """Raises an `InputError` if the samples, or the weights by which `loading` draws them, differ between ranks."""
        if self._parallel.mesh is None or self.remote_optimizer is not None:
            return
        if is_stream(dataset):
            if is_hugging_face(dataset):  # begins anew with every iter(), which other streams may not do
                check_undivided(dataset)
                check_same_stream(dataset, self.seed)
        else:
            check_same_samples(dataset, self.seed)
            if loading is not None and loading.sampling is not None:
                check_same_weights(loading.sampling.weights)

    def _share(self) -> SampleShare:
        if self.remote_optimizer is not None:
            return self.remote_optimizer.share
        place = self._parallel.position
        plan = self._parallel.plan
        columns = (place.tensor, plan.axes.tensor)
        changes = self.shares.table if self.shares is not None else None
        return SampleShare(place.data_rank, plan.data_ranks, *columns, plan.shares.samples, changes, self.steps)

    def _example(self, data: Any, width: int | None) -> ModelBatch:
        """Moves a batch to the device, and splits it into the model's arguments and the target. `width` is the number
        of columns of the full input if `data` holds only this rank's columns of it, otherwise None."""
        channels_last = self._parallel.plan.compute.layout == "channels_last"
        moved = move_to_device(data, self._parallel.device, channels_last=channels_last)
        example = split_batch(moved, self._target)
        return example if width is None else self._parallel.with_input_columns(example, width)

    def _share_of(self, data: Any) -> PreparedShare:
        """Returns the batch with the number of its samples that count. This is 0 if the loop of a prepared loader is at
        a batch that has no sample for this rank. The number of samples over all ranks is None if it is not known."""
        share = self._prepared_share
        if share is not None and share.data is data:
            return share
        return PreparedShare(data, 0 if share is not None and share.samples == 0 else samples_in(data))

    def _microbatches(self, batch: Any) -> tuple[Sequence[Microbatch], int | None]:
        """Returns the microbatches of a `Batch`, or cuts a batch of a prepared or another loader into them; and the
        number of samples over all ranks, or None if it is not known."""
        self._late_hooks.before_pass(self._parallel)
        if isinstance(batch, Batch):
            self._look_at_first_batch(batch.microbatches[0].data, together=True)
            return batch.microbatches, batch.samples
        self._check_first_batch(batch)
        self._look_at_first_batch(batch, together=True)
        return cut_share(self._share_of(batch), self._parallel.plan)

    def _check_first_batch(self, data: Any) -> None:
        """Raises an `InputError` if the first batches of another loader cannot be shares of a global batch."""
        if self.checks_first_batch and self._parallel.mesh is not None and self._prepared_share is None:
            check_shares(data, self._parallel.position.data_rank)
        self.checks_first_batch = False

    def _look_at_first_batch(self, data: Any, together: bool) -> None:
        """Checks the model with the first batch of a loop. `together`: all ranks call this at the same time."""
        check, self.first_batch_check = self.first_batch_check, None
        if check is not None:
            check(data, together)

    def _check_plan(self, method: str) -> None:
        if reason := refusal(self._parallel.plan, "own loop"):
            raise InputError(f"session.{method} cannot run under the plan ({self._parallel.plan.summary()}): {reason}")
