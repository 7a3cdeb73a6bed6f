"""`Session`: a model that is trained under a plan, step by step, by the trainer or in a user's own loop."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.blocks.sync_batch_norm import normalize_locally
from meshwright.checkpoint.frozen import without_frozen
from meshwright.checkpoint.load import load, read_manifest_once
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.save import save_at
from meshwright.checkpoint.state import State, model_state, optimizer_state
from meshwright.data.loading import Batch, LoadingOptions, SampleShare, StreamState, train_batches
from meshwright.data.prepared import refuse_loader
from meshwright.errors import InputError
from meshwright.model_io.batch import ModelBatch, target_key
from meshwright.parallel.apply import FillWeights, apply
from meshwright.parallel.check import check_sparse
from meshwright.parallel.gather_samples import GatherSamples
from meshwright.parallel.mesh import data_group
from meshwright.parallel.model import ParallelModel
from meshwright.parallel.weights.offload import offload_optimizer
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.processes.world import World
from meshwright.train.loop_checks.gradient_hooks import check_gradient_hooks, refuse_lost_hooks
from meshwright.train.loss.finder import LossFinder
from meshwright.train.loss.loss import LossFunction
from meshwright.train.loss.spikes import SpikeDetector
from meshwright.train.metrics import Metric, MetricTotals
from meshwright.train.shares.adaptive import make_adaptive_shares
from meshwright.train.shares.check import check_global_batch, default_parts
from meshwright.train.step.cuda_graphs import StepGraphs
from meshwright.train.step.evaluation import Evaluator, combine_totals
from meshwright.train.step.explained_errors import explains_errors
from meshwright.train.step.forward_backward import ForwardBackward
from meshwright.train.step.loss_scale import DEFAULTS, LossScale
from meshwright.train.step.nonfinite import NO_PROBLEM, make_step_check
from meshwright.train.step.optimizer import call_around_steps, checked_optimizer, choose_kernels
from meshwright.train.step.own_loop import OwnLoop
from meshwright.train.step.randomness import step_seed
from meshwright.train.step.schedule import needs_metric
from meshwright.user.job_sections import LossScaleSettings

Report = Callable[[str], None]  # called with what the rank is doing, for its heartbeat
Parameters = Mapping[str, nn.Parameter]  # those that this rank holds, by their names in the user's model
MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]
MakeSchedule = Callable[[torch.optim.Optimizer], LRScheduler]


class Session(OwnLoop):
    """Trains a model under a plan on this rank: makes steps, evaluates, saves and loads. Holds weights, optimizer and
    schedule. `OwnLoop` has the methods for loops that call backward themselves.

    `steps` is the number of steps so far, and `position` the epoch and the index of the batch that come next. `parts`
    is the number of fixed parts of the data set with `data.partition: sample`, otherwise None. `stream_state` is that
    of the last batch, if it came from a stream that can continue there, otherwise None. `gradient_norm` is the norm of
    the last step's gradients before clipping, or None without clipping. `on_gradients` is called in each step when the
    gradients are complete, before they are clipped.

    `nonfinite` says what was NaN or infinite in the last step, such as `the loss is nan`; None if nothing was, and
    always with `on_nonfinite="ignore"`. `spike` says why its loss was a spike. `skipped_steps` is the number of steps
    whose update was left out for this.
    """

    def __init__(
        self,
        model: nn.Module,
        make_optimizer: MakeOptimizer,
        *,
        loss: LossFunction | None,
        plan: Plan,
        world: World,
        make_schedule: MakeSchedule | None = None,
        schedule_per: Literal["step", "epoch"] = "step",
        clip_norm: float | None = None,
        on_nonfinite: Literal["ignore", "skip"] = "ignore",
        spikes: SpikeDetector | None = None,
        loss_scale: LossScaleSettings = DEFAULTS,
        seed: int = 0,
        target: str | None = None,
        frozen: tuple[str, ...] = (),
        report: Report = lambda activity: None,
        sample: Any = None,
        fill: FillWeights | None = None,
    ) -> None:
        """`make_optimizer` is called with the parameters that this rank holds. With `on_nonfinite="skip"`, the update
        of a step whose loss or gradients are NaN or infinite is left out on all ranks, with `spikes` also that of a
        spike. `target` is the key of the target in batches that are dicts. `frozen` are modules that stay in evaluation
        mode. `sample` is for plans that split or cut the model. `fill` makes the weights of one on the meta device."""
        check_rules(plan, "session")
        self.plan = plan
        self.world = world
        target = target_key(target, loss is not None)
        check_sparse(plan, model, clip_norm)
        hooks = check_gradient_hooks(model, plan)
        normalize_locally(model)  # before the model is traced
        self._loss_finder = LossFinder(loss, model, plan, sample, target)
        self._parallel = apply(plan, model, world.device, world.size, sample, target, fill)
        refuse_lost_hooks(hooks, self._parallel)
        self.optimizer = checked_optimizer(make_optimizer, self._parallel)
        offload_optimizer(self.optimizer, plan, world.device)
        choose_kernels(self.optimizer, plan)
        is_fp16 = plan.numerics.precision == "fp16"
        self.loss_scale = LossScale(world.device, world.size, loss_scale) if is_fp16 else None
        self.schedule = make_schedule(self.optimizer) if make_schedule else None
        self._schedule_per = schedule_per
        data_ranks = data_group(self._parallel.mesh, plan)
        self._gather_samples = GatherSamples(data_ranks) if data_ranks is not None else None
        shares = make_adaptive_shares(self._parallel, world.rank, world.size)
        report = shares.marking(report) if shares else report
        super().__init__(self._parallel, self._loss_finder.over_ranks(self._gather_samples), seed, target, report)
        self._clip_norm, self._frozen, self.shares = clip_norm, frozen, shares
        self.on_gradients: Callable[[], None] | None = None
        self._step_check = make_step_check(self._parallel, world.size, on_nonfinite == "skip", is_fp16, spikes)
        self.nonfinite, self.spike = NO_PROBLEM
        self.skipped_steps = 0
        # Captures forward and backward passes of a single rank. With several ranks, compiled code captures itself.
        captures = plan.compute.cuda_graphs and plan.processes == 1 and world.device.type == "cuda"
        self.graphs = StepGraphs(self._run_forward_backward, self.module, world.device) if captures else None
        self._forward_backward = ForwardBackward(self._parallel, self._loss, self.loss_scale, report)
        self._evaluator = Evaluator(self._parallel, self._loss, self._gather_samples, self._example, world.size)
        self.parts: int | None = None
        self.position = (0, 0)
        self._ended_epoch = False  # whether an epoch ended since the session began or was loaded
        self.stream_state: StreamState | None = None
        self._train_mode()
        call_around_steps(self.optimizer, self._before_optimizer_step, self._after_optimizer_step)

    @property
    def module(self) -> nn.Module:
        """The user's model with the trained weights, or this rank's part of it."""
        return self._parallel.module

    @property
    def parallel(self) -> ParallelModel:
        """The model as the plan has divided it, and this rank's position in the mesh."""
        return self._parallel

    @property
    def target_count(self) -> Tensor | float:
        """What this rank adds to the number that a remote optimizer divides the last step's gradients by: its number of
        targets or samples. 0 for a loss that is a sum and is not divided."""
        return self._forward_backward.count

    # ---- training

    def batches(
        self,
        dataset: Any,
        epochs: int | None = None,
        global_batch: int = 128,
        loading: LoadingOptions | None = None,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """Yields this rank's share of every global batch, from `position` on, until the session has trained `epochs`
        epochs in all; without end if `epochs` is None. All ranks call this together."""
        refuse_loader(dataset, "session.batches takes a data set: loop over session.prepare(loader) instead")
        if epochs is not None and self._ended_epoch and self.position >= (epochs, 0):
            raise InputError(
                f"session.batches: epochs is {epochs}, but this session has already trained {self.position[0]}, and"
                " epochs counts from the session's first step: call it once with the number of all epochs, or in epoch"
                f" e of a loop of your own with epochs=e + 1 (now epochs={self.position[0] + 1})"
            )
        loading = loading or LoadingOptions()
        check_global_batch(self.plan, global_batch, loading.partition, self.parts or loading.parts)
        if loading.partition == "batch":  # with the other partitions, a rank may not be able to read every sample
            self._check_same_samples(dataset, loading)
        elif loading.partition == "sample":  # a run that is resumed on other ranks keeps its parts
            self.parts = self.parts or loading.parts or default_parts(self.plan)
            loading = replace(loading, parts=self.parts)
        loading = self._collation_of(dataset, loading)
        batches = train_batches(
            dataset,
            seed=self.seed,
            global_batch=global_batch,
            share=self._share(),
            loading=loading,
            accumulation=self.plan.microbatches,
            start=self.position,
            epochs=epochs,
            drop_last=drop_last,
            stream_state=self.stream_state,
        )
        return batches if self.shares is None else self.shares.watch(batches, loading, self.steps)

    @explains_errors
    def step(self, batch: Any) -> Tensor:
        """Makes one optimizer step on a `Batch` that `batches` yielded, on a batch of a prepared loader, or on this
        rank's share of a global batch from another loader. Returns the mean loss of the global batch, which is the same
        on every rank."""
        # Random numbers depend only on the seed, the step and the data rank. Evaluations and restarts do not change
        # them, and ranks that compute the same activations use the same dropout masks.
        states = self.generators.seed(step_seed(self.seed, self.steps, self._share().rank))
        try:
            return self._step(batch)
        finally:
            self.generators.restore(states)

    def _step(self, batch: Any) -> Tensor:
        self._report("prepare")
        if self._step_check:
            self._step_check.copy_buffers()
        if self._parallel.local_steps:
            self._parallel.local_steps.before_step(self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        microbatches, samples = self._microbatches(batch)
        if self.shares is not None:
            self.shares.begin_step(samples)
        self._try_loss(microbatches[0].data)
        examples = [(self._example(part.data, part.width), part.samples) for part in microbatches]
        if self.plan.axes.pipeline > 1:  # a short batch may have too few: the last one is repeated with weight 0
            examples += [(examples[-1][0], 0)] * (self.plan.microbatches - len(examples))
        if self.graphs is not None:
            loss = self.graphs(examples, samples, self.loss_scale.value if self.loss_scale else None)
        else:
            loss = self._run_forward_backward(examples, samples)
        self._late_hooks.after_pass()
        self._report("optimizer")
        if self._step_check:
            self.nonfinite, self.spike = self._step_check.examine(loss)
            self.skipped_steps += bool(self.nonfinite or self.spike)
        if self.remote_optimizer is None:
            stepped = not (self.nonfinite or self.spike) and self._update()
        else:
            stepped, loss = self.remote_optimizer.update(self, loss)
        if self._parallel.local_steps:
            self._parallel.local_steps.after_step()
        self._advance(batch if isinstance(batch, Batch) else None, stepped)
        if self.shares is not None:
            self.shares.end_step(self.steps, [part.samples for part in microbatches])
        return loss

    def leave_out(self, batch: Batch) -> None:
        """Counts a batch that `batches` yielded as a step, but does not train on it."""
        self.nonfinite = self.spike = None
        self.skipped_steps += 1
        if self._parallel.local_steps:  # replicas may have to average their weights after this step
            self._parallel.local_steps.before_step(self.steps)
            self._parallel.local_steps.after_step()
        self._advance(batch, stepped=False)
        if self.shares is not None:
            self.shares.finish_window(self.steps)

    def _advance(self, batch: Batch | None, stepped: bool) -> None:
        """Counts a step. `batch` is None for a batch from another loader. `stepped`: the optimizer made a step."""
        self.steps += 1
        if batch:
            self.position = (batch.epoch + 1, 0) if batch.last else (batch.epoch, batch.index + 1)
            self.stream_state = None if batch.last else batch.stream
            self._ended_epoch |= batch.last
        # A schedule that is stepped per step is not stepped if the optimizer's step was skipped. One that needs a
        # metric is stepped by `step_schedule` only.
        is_due = stepped if self._schedule_per == "step" else batch and batch.last
        if self.schedule and is_due and not needs_metric(self.schedule):
            self.schedule.step()

    def _update(self) -> bool:
        """Makes the optimizer's step. Returns False when it was skipped because a gradient was not finite in fp16."""
        if self.loss_scale and not self.loss_scale.unscale_(self.module.parameters()):
            return False
        if self.on_gradients is not None:
            self.on_gradients()
        if self._clip_norm is not None:
            self.gradient_norm = self._parallel.clip_(self._clip_norm)
        self._gradients_are_combined = True
        self.optimizer.step()
        return True

    def _try_loss(self, data: Any) -> None:
        if not self._loss_finder.is_tried:
            self._loss_finder.try_batch(data)
            loss = self._loss_finder.over_ranks(self._gather_samples)
            self._loss = self._forward_backward.loss = self._evaluator.loss = loss

    def _run_forward_backward(
        self, examples: list[tuple[ModelBatch, int]], global_samples: int | None, falls_back: bool = True
    ) -> Tensor:
        divide = self.remote_optimizer is None
        return self._forward_backward(examples, global_samples, divide=divide, falls_back=falls_back)

    # ---- evaluation

    @explains_errors
    def evaluate(
        self,
        dataset: Any,
        metrics: Mapping[str, Metric] | None = None,
        batch: int = 128,
        loading: LoadingOptions | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """Returns the metrics by name, and the loss as `loss`, over the whole data set, with each sample counted once.
        They are the same on every rank.

        `interrupted` is called before each batch. If it returns True on any rank, all ranks return None.
        """
        refuse_loader(dataset, "session.evaluate takes a data set: give it the loader's data set")
        totals, gave_up = self.evaluate_share(dataset, metrics, batch, loading, interrupted)
        self._report("evaluate (combining)")
        return combine_totals(totals, gave_up, self.world.size)

    def evaluate_share(
        self,
        dataset: Any,
        metrics: Mapping[str, Metric] | None,
        batch: int,
        loading: LoadingOptions | None,
        interrupted: Callable[[], bool],
        share: SampleShare | None = None,
    ) -> tuple[MetricTotals, bool]:
        """Evaluates this rank's share of the data set, or another `share`. Returns its totals, which are not combined
        with those of other ranks, and whether the evaluation was interrupted."""
        self._report("evaluate")
        loading = self._collation_of(dataset, loading or LoadingOptions())
        result = self._evaluator.totals(dataset, metrics or {}, batch, share or self._share(), loading, interrupted)
        self._train_mode()
        return result

    # ---- weights and checkpoints

    @explains_errors
    def state_dict(self) -> dict[str, Any]:
        """The full weights, as plain tensors that load into the user's own model. All ranks must call this together."""
        self._report("weights")
        self._align()
        return self._parallel.full_state()

    def full_gradients(self) -> dict[str, Tensor]:
        """The full gradients by parameter name. All ranks must call this together, inside `on_gradients`."""
        return self._parallel.full_gradients()

    def state(self) -> State:
        """The contents of a checkpoint by key: tensors of the model and the optimizer, `schedule` and `loss_scale`."""
        self._align()
        self._parallel.reshard()
        return {
            **model_state(self.module, self._parallel.layouts),
            **optimizer_state(self.module, self.optimizer, *self._parallel.weight_division),
            "schedule": self.schedule.state_dict() if self.schedule else None,
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale else None,
        }

    def about(self) -> dict[str, Any]:
        """What a checkpoint's manifest says about its position in the run: `step`, `position`, `seed`, `skipped`, and
        `parts`, `stream`, `losses` and `shares` if there are any. Seed and step determine all random numbers."""
        about = {"step": self.steps, "position": [*self.position], "seed": self.seed, "skipped": self.skipped_steps}
        stream = {"stream": [self.stream_state.before, self.stream_state.digest]} if self.stream_state else {}
        losses = self._step_check.about() if self._step_check else {}
        shares = {"shares": self.shares.about(self.steps)} if self.shares else {}
        return about | ({"parts": self.parts} if self.parts else {}) | stream | losses | shares

    @explains_errors
    def save(self, path: str | Path, frozen: bool = True, extra: State | None = None) -> Path:
        """Writes a checkpoint to the folder `path`, and returns it. With `frozen=False` it does not hold the frozen
        parameters: `load` needs a model that has them already. `extra` are further entries of plain values, which
        `load` ignores. All ranks must call this together."""
        self._report("save")
        state = self.state() if frozen else without_frozen(self.state(), self.module)
        return save_at({**state, **(extra or {})}, Path(path), self.steps, self.about())

    @explains_errors
    def load(self, path: str | Path) -> None:
        """Verifies a checkpoint of any plan and resumes from it. All ranks must call this together."""
        self.restore(Path(path), read_manifest_once(Path(path)))

    def restore(self, path: Path, manifest: Manifest) -> None:
        """Resumes from the checkpoint that has this manifest. Files that differ from it are refused."""
        about = manifest.about
        self._parallel.reshard()
        objects = load(path, manifest, self.module, self.optimizer, *self._parallel.weight_division)
        if self.schedule and objects["schedule"] is not None:
            self.schedule.load_state_dict(objects["schedule"])
        if self.loss_scale and objects.get("loss_scale"):
            self.loss_scale.load_state_dict(objects["loss_scale"])
        choose_kernels(self.optimizer, self.plan)  # the saved state may be of an optimizer with other kernels
        self.steps = int(about["step"])
        self.seed = int(about["seed"])  # order and random numbers continue as in the saved run
        self.position = (int(about["position"][0]), int(about["position"][1]))
        self._ended_epoch = False
        self.parts = int(about["parts"]) if about.get("parts") else None
        self.stream_state = StreamState(*about["stream"]) if about.get("stream") else None
        self.skipped_steps = int(about.get("skipped", 0))
        if self._step_check:
            self._step_check.restore(about)
        if self.shares is not None:
            self.shares.restore(self.steps, about.get("shares"))
        self._parallel.reset_compression()

    def _train_mode(self) -> None:
        """Puts the model into training mode. Frozen modules stay in evaluation mode, so that their running statistics
        do not change."""
        self._parallel.train()
        for name in self._frozen:
            self.module.get_submodule(name).eval()
