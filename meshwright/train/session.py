"""`Session`: a model under a plan, trained step by step, by the trainer or in a user's own loop."""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from meshwright.batch import Example, split
from meshwright.checkpoint.load import load
from meshwright.checkpoint.manifest import verify
from meshwright.checkpoint.save import save_at
from meshwright.checkpoint.state import State, model_state, optimizer_state
from meshwright.data.loading import Batch, Loading, Microbatch, Share, eval_batches, train_batches
from meshwright.data.order import derive
from meshwright.errors import InputError
from meshwright.launch.world import World
from meshwright.parallel.across import Across
from meshwright.parallel.apply import Fill, apply
from meshwright.parallel.check import check_sparse
from meshwright.parallel.mesh import data_group
from meshwright.parallel.model import ParallelModel
from meshwright.plan import Plan
from meshwright.train.metrics import Metric, Tally
from meshwright.train.step.batch import chunks, move, samples_in
from meshwright.train.step.cuda_graphs import Graphs
from meshwright.train.step.evaluation import Rounds, combine
from meshwright.train.step.loss import Loss, LossFunction, check_joined, join, models_own, understand
from meshwright.train.step.loss_scale import LossScale
from meshwright.train.step.mean import Mean
from meshwright.train.step.optimizer import fuse

Report = Callable[[str], None]
Parameters = Mapping[str, nn.Parameter]  # those that this rank holds, by the untouched model's names
MakeOptimizer = Callable[[Parameters], torch.optim.Optimizer]
MakeSchedule = Callable[[torch.optim.Optimizer], LRScheduler]


class Updater(Protocol):
    """Takes a step's gradients where the optimizer lives elsewhere, and leaves new weights. They are a sum over the
    session's own samples, which `session.count` goes with. Returns whether there was a step, and the mean loss."""

    share: Share  # of each global batch

    def update(self, session: "Session", loss_sum: Tensor) -> tuple[bool, Tensor]: ...


class Session:
    """Holds what changes while training: weights, optimizer, schedule, and the position in the data."""

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
        seed: int = 0,
        target: str | None = None,
        frozen: tuple[str, ...] = (),
        report: Report = lambda doing: None,
        sample: Any = None,
        fill: Fill | None = None,
    ) -> None:
        """`sample` is a batch, which only plans that split or cut the model want to see; `fill` gives a model on the
        meta device its weights, once a plan has divided it."""
        if plan.gradients.servers:
            raise InputError(
                f"the plan ({plan.summary()}) has parameter servers, which `meshwright train` starts beside the"
                " workers: take it there, or set gradients.servers to 0"
            )
        self.plan = plan
        self.world = world
        self.seed = seed
        check_sparse(plan, model, clip_norm)
        self._parallel = apply(plan, model, world.device, world.size, sample, target, fill)
        self.optimizer = make_optimizer(self._parallel.parameters())
        if plan.compute.fused_optimizer:
            fuse(self.optimizer)
        self.loss_scale = LossScale(world.device, world.size) if plan.numerics.precision == "fp16" else None
        self.schedule = make_schedule(self.optimizer) if make_schedule else None
        self._schedule_per = schedule_per
        self._loss: Loss = understand(loss) if loss else models_own()
        check_joined(self._loss, plan)
        others = data_group(self._parallel.mesh, plan)
        self._across = Across(others) if others is not None else None
        self._loss = replace(self._loss, function=join(self._loss.function, self._across))
        self._clip_norm = clip_norm
        self._target = target
        self._frozen = frozen
        self._report = report
        self.updater: Updater | None = None
        self.on_gradients: Callable[[], None] | None = None  # called once a step's gradients are whole
        self.gradient_norm: Tensor | None = None  # of the last step, before clipping; None where nothing clips
        # Only what one rank does alone is recorded here; compiled blocks bring their own graphs.
        recorded = plan.compute.cuda_graphs and plan.compute.compile == "none" and world.device.type == "cuda"
        self._graphs = Graphs(self._forward_backward, list(self.module.parameters())) if recorded else None
        self._mean = Mean(self._parallel, self._loss, self.loss_scale, report)
        self.parts: int | None = None  # of a data set that is divided by sample
        self.steps = 0
        self.position = (0, 0)  # the epoch and batch that come next
        self._train_mode()

    @property
    def module(self) -> nn.Module:
        """The caller's model with the trained weights in it, or this rank's part of it."""
        return self._parallel.module

    @property
    def parallel(self) -> ParallelModel:
        """For those who look on: where this rank stands, and how the plan has divided the model."""
        return self._parallel

    @property
    def count(self) -> Tensor | float:
        """Of the last step's targets, where an updater divides by it; 0: by nothing."""
        return self._mean.count

    # ---- training

    def batches(
        self,
        dataset: Any,
        epochs: int | None = None,
        global_batch: int = 128,
        loading: Loading | None = None,
        drop_last: bool = False,
    ) -> Iterator[Batch]:
        """This rank's part of every global batch, from the session's position on."""
        if global_batch < self.plan.shares:
            raise InputError(
                f"train.global_batch is {global_batch}, fewer than the {self.plan.data_ranks} ranks × "
                f"{self.plan.microbatches} microbatches of the plan: raise it or use fewer ranks"
            )
        loading = loading or Loading()
        if loading.partition == "sample":  # a run keeps its parts, whoever goes on with it
            self.parts = self.parts or loading.parts or self._share().ranks
            loading = replace(loading, parts=self.parts)
        return train_batches(
            dataset,
            seed=self.seed,
            global_batch=global_batch,
            share=self._share(),
            loading=loading,
            accumulation=self.plan.microbatches,
            start=self.position,
            epochs=epochs,
            drop_last=drop_last,
        )

    def step(self, batch: Any) -> Tensor:
        """One optimizer step on a `Batch` of ours, or on this rank's share of a global batch as any loader
        gives it. Returns the mean loss of the global batch, the same on every rank."""
        # Randomness is a function of (seed, step, samples): evaluations and restarts leave no trace in it, and ranks
        # that hold copies of the same activations drop the same of them.
        _seed_all(derive(self.seed, "step", self.steps, self._share().rank), self.world.device)
        if self._parallel.local:
            self._parallel.local.begin(self.steps)
        self.optimizer.zero_grad(set_to_none=True)
        ours = isinstance(batch, Batch)
        parts = batch.parts if ours else self._microbatches(batch)
        examples = [(self._example(part.data, part.width), part.samples) for part in parts]
        if self.plan.axes.pipeline > 1:
            # A short batch has fewer microbatches than the schedule: the last one is borrowed, and counts for nothing.
            examples += [(examples[-1][0], 0)] * (self.plan.microbatches - len(examples))
        samples = batch.samples if ours else None
        if self._graphs is not None:
            loss = self._graphs(examples, samples, self.loss_scale.value if self.loss_scale else None)
        else:
            loss = self._forward_backward(examples, samples)
        self._report("optimizer")
        if self.updater is None:
            stepped = self._update()
        else:
            stepped, loss = self.updater.update(self, loss)
        if self._parallel.local:
            self._parallel.local.end()
        self.steps += 1
        if ours:
            self.position = (batch.epoch + 1, 0) if batch.last else (batch.epoch, batch.index + 1)
        # One that counts steps counts those of the optimizer; epochs pass all the same.
        if self.schedule and (stepped if self._schedule_per == "step" else ours and batch.last):
            self.schedule.step()
        return loss

    def _update(self) -> bool:
        """The optimizer's step; False where it was left out, since fp16 was too small for a gradient."""
        if self.loss_scale and not self.loss_scale.unscale_(self.module.parameters()):
            return False
        if self.on_gradients is not None:
            self.on_gradients()
        if self._clip_norm is not None:
            self.gradient_norm = self._parallel.clip_(self._clip_norm)
        self.optimizer.step()
        return True

    def _forward_backward(self, examples: list[tuple[Example, int]], global_samples: int | None) -> Tensor:
        return self._mean(examples, global_samples, served=self.updater is not None)

    # ---- evaluation

    def evaluate(
        self,
        dataset: Any,
        metrics: Mapping[str, Metric] | None = None,
        batch: int = 128,
        loading: Loading | None = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """The loss and the metrics over every sample once, the same on every rank.

        `interrupted` is asked before each batch; where any rank says yes, all give up and return None.
        """
        tally, gave_up = self.tallied(dataset, metrics, batch, loading, interrupted)
        self._report("evaluate (combining)")
        return combine(tally, gave_up, self.world.size)

    def tallied(
        self,
        dataset: Any,
        metrics: Mapping[str, Metric] | None,
        batch: int,
        loading: Loading | None,
        interrupted: Callable[[], bool],
        share: Share | None = None,
    ) -> tuple[Tally, bool]:
        """This rank's part of an evaluation, or that `share` of it; and whether it was given up."""
        self._report("evaluate")
        self._parallel.align_buffers()
        self._parallel.train(False)
        joined = self._loss.kind == "joined" or any(hasattr(metric, "joined") for metric in (metrics or {}).values())
        own_metrics = {name: join(metric, self._across) for name, metric in (metrics or {}).items()}
        tally = Tally(own_metrics, self.world.device)
        share = share or self._share()
        own = eval_batches(dataset, batch=max(1, batch // share.ranks), share=share, loading=loading or Loading())
        together = self._parallel.in_step or share.ranks < self.world.size or (joined and self.world.size > 1)
        rounds = Rounds(own, interrupted, together)
        with torch.no_grad():  # not inference_mode: what a model caches in here, training could not use
            for part in rounds:
                example = self._example(part.data, part.width)
                output = self._parallel.evaluate(example)
                if not self._parallel.place.speaks or not (part.samples or joined):
                    continue
                term = self._loss.term(output, example.target, part.samples)
                count = self._loss.count(example.target, part.samples)
                tally.add_value("loss", (term.sum, count if term.own_count is None else term.own_count), part.samples)
                tally.add(output, example.target, part.samples)
        self._train_mode()
        return tally, rounds.gave_up

    # ---- weights and checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Full, ordinary weights that load into the untouched model; all ranks ask together."""
        self._parallel.align_buffers()
        return self._parallel.full_state()

    def full_gradients(self) -> dict[str, Tensor]:
        """The whole gradients by name, once `on_gradients` is called; all ranks ask together."""
        return self._parallel.full_gradients()

    def state(self) -> State:
        """What a checkpoint keeps of the model, the optimizer and the schedule."""
        self._parallel.align_buffers()
        self._parallel.reshard()
        schedule = self.schedule.state_dict() if self.schedule else None
        return {
            **model_state(self.module, self._parallel.layouts),
            **optimizer_state(self.module, self.optimizer, *self._parallel.division),
            "schedule": schedule,
            "loss_scale": self.loss_scale.state_dict() if self.loss_scale else None,
        }

    def about(self) -> dict[str, Any]:
        """What a checkpoint's manifest says: the position, and the seed that with the step makes all
        randomness."""
        said = {"step": self.steps, "position": list(self.position), "seed": self.seed}
        return said | ({"parts": self.parts} if self.parts else {})

    def save(self, path: str | Path) -> Path:
        """A whole checkpoint in the folder `path`; all ranks call it."""
        return save_at(self.state(), Path(path), self.steps, self.about())

    def load(self, path: str | Path) -> None:
        """Goes on from a checkpoint of this or of any other plan."""
        manifest = verify(Path(path))
        self.restore(Path(path), manifest.about)

    def restore(self, path: Path, about: Mapping[str, Any]) -> None:
        """`load` for a checkpoint that has been verified."""
        self._parallel.reshard()
        objects = load(path, self.module, self.optimizer, *self._parallel.division)
        if self.schedule and objects["schedule"] is not None:
            self.schedule.load_state_dict(objects["schedule"])
        if self.loss_scale and objects.get("loss_scale"):
            self.loss_scale.load_state_dict(objects["loss_scale"])
        if self.plan.compute.fused_optimizer:
            fuse(self.optimizer)  # the saved run may not have been
        self.steps = int(about["step"])
        self.seed = int(about["seed"])  # the order and the randomness to come are the saved run's
        self.position = (int(about["position"][0]), int(about["position"][1]))
        self.parts = int(about["parts"]) if about.get("parts") else None

    # ---- parts

    def _share(self) -> Share:
        if self.updater is not None:
            return self.updater.share
        place = self._parallel.place
        return Share(place.data_rank, self.plan.data_ranks, place.tensor, self.plan.axes.tensor)

    def _example(self, data: Any, width: int | None) -> Example:
        """`width` of the whole input, where the data has only this rank's columns of it."""
        channels_last = self.plan.compute.layout == "channels_last"
        moved = move(data, self.world.device, channels_last=channels_last)
        example = split(moved, self._target)
        return example if width is None else self._parallel.with_columns(example, width)

    def _microbatches(self, data: Any) -> list[Microbatch]:
        return [Microbatch(chunk, samples_in(chunk)) for chunk in chunks(data, self.plan.microbatches)]

    def _train_mode(self) -> None:
        """Frozen modules stay in evaluation mode: neither their weights nor their statistics change."""
        self._parallel.train()
        for name in self._frozen:
            self.module.get_submodule(name).eval()


def _seed_all(seed: int, device: torch.device) -> None:
    """As `torch.manual_seed`, for the devices in use: on the others that remembers every call, with its stack."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
