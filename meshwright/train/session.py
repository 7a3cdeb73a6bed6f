"""`Session`: a model under a plan, trained step by step, by the trainer or in a user's own loop."""

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
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
from meshwright.parallel.apply import apply
from meshwright.plan import Plan
from meshwright.train.batch import chunks, move, samples_in
from meshwright.train.loss import Loss, LossFunction, models_own, understand
from meshwright.train.metrics import Metric, Tally

Report = Callable[[str], None]
MakeOptimizer = Callable[[nn.Module], torch.optim.Optimizer]
MakeSchedule = Callable[[torch.optim.Optimizer], LRScheduler]


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
    ) -> None:
        self.plan = plan
        self.world = world
        self.seed = seed
        self._parallel = apply(plan, model, world.device, world.size)
        self.optimizer = make_optimizer(self._parallel.module)
        self.schedule = make_schedule(self.optimizer) if make_schedule else None
        self._schedule_per = schedule_per
        self._loss: Loss = understand(loss) if loss else models_own()
        self._clip_norm = clip_norm
        self._target = target
        self._frozen = frozen
        self._report = report
        self.steps = 0
        self.position = (0, 0)  # the epoch and batch that come next
        self._train_mode()

    @property
    def module(self) -> nn.Module:
        """The caller's model, with the trained weights in it."""
        return self._parallel.module

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
        if global_batch < self.world.size * self.plan.memory.accumulation:
            raise InputError(
                f"train.global_batch is {global_batch}, fewer than the {self.world.size} ranks × "
                f"{self.plan.memory.accumulation} microbatches of the plan: raise it or use fewer ranks"
            )
        return train_batches(
            dataset,
            seed=self.seed,
            global_batch=global_batch,
            share=self._share(),
            loading=loading or Loading(),
            accumulation=self.plan.memory.accumulation,
            start=self.position,
            epochs=epochs,
            drop_last=drop_last,
        )

    def step(self, batch: Any) -> Tensor:
        """One optimizer step on a `Batch` of ours, or on this rank's share of a global batch as any loader
        gives it. Returns the mean loss of the global batch, the same on every rank."""
        # Randomness is a function of (seed, step, rank): evaluations and restarts leave no trace in it.
        _seed_all(derive(self.seed, "step", self.steps, self.world.rank), self.world.device)
        self.optimizer.zero_grad(set_to_none=True)
        ours = isinstance(batch, Batch)
        parts = batch.parts if ours else self._microbatches(batch)
        examples = [(self._example(part.data), part.samples) for part in parts]
        loss = self._forward_backward(examples, batch.samples if ours else None)
        self._report("optimizer")
        if self._clip_norm is not None:
            nn.utils.clip_grad_norm_(self.module.parameters(), self._clip_norm)
        self.optimizer.step()
        self.steps += 1
        if ours:
            self.position = (batch.epoch + 1, 0) if batch.last else (batch.epoch, batch.index + 1)
        if self.schedule and (self._schedule_per == "step" or (ours and batch.last)):
            self.schedule.step()
        return loss

    def _forward_backward(self, examples: list[tuple[Example, int]], global_samples: int | None) -> Tensor:
        """Leaves the mean gradient over the global batch in the parameters, and returns the mean loss.

        Ranks' gradients are averaged, so each rank's sum is multiplied by ranks / global count. The count is
        known beforehand or summed up while the forward pass runs; the loss's own sum travels beside backward.
        """
        ranks = self.world.size
        total = self._start_total(examples, global_samples)
        loss_sum: Any = 0.0
        own_count: Any = None
        for number, (example, samples) in enumerate(examples):
            last = number == len(examples) - 1
            with self._parallel.combining(last):
                self._report("forward")
                output = self._parallel.forward(example.arguments, example.keywords, training=True)
                term = self._loss.term(output, example.target, samples)
                del output  # the scores of a large vocabulary are gigabytes, and backward does not need them
                loss_sum = loss_sum + term.sum
                if term.own_count is not None:
                    own_count = term.own_count if own_count is None else own_count + term.own_count
                if last:
                    reduced = self._start_sum([loss_sum] if own_count is None else [loss_sum, own_count])
                self._report("backward")
                scale = term.weight * ranks / total()
                (term.value if isinstance(scale, float) and scale == 1.0 else term.value * scale).backward()
        sums = reduced()
        if own_count is None:
            return sums[0] / total()
        # The loss told its count only after its forward pass: the gradients were divided by another one.
        gradients = [p.grad for p in self.module.parameters() if p.grad is not None]
        torch._foreach_mul_(gradients, float(total() / sums[1]) if sums[1] else 0.0)
        return sums[0] / sums[1]

    def _start_total(self, examples: list[tuple[Example, int]], global_samples: int | None) -> Callable[[], Any]:
        """The global count that the sums are divided by, once it is asked for."""
        if self._loss.kind == "sum":
            return lambda: 1.0
        if self._loss.kind == "samples" and global_samples is not None:
            return lambda: global_samples
        count = sum(self._loss.count(example.target, samples) for example, samples in examples)
        if self.world.size == 1 and not isinstance(count, Tensor):
            return lambda: count
        reduced = self._start_sum([torch.as_tensor(count, device=self.world.device)])

        @cache
        def total() -> Tensor:
            found = reduced()[0]
            return found + (found == 0)  # no target at all: a gradient of zero, not of 0/0

        return total

    def _start_sum(self, values: list[Tensor]) -> Callable[[], Sequence[Tensor]]:
        """Adds a few numbers over all ranks while other work goes on; the result waits for them."""
        if self.world.size == 1:
            return lambda: values
        total = torch.stack([value.double() for value in values])
        work = dist.all_reduce(total, async_op=True)

        def result() -> Sequence[Tensor]:
            work.wait()
            return total.unbind()

        return result

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
        self._report("evaluate")
        self._parallel.align_buffers()
        self.module.eval()
        tally = Tally({**(metrics or {})}, self.world.device)
        gave_up = False
        parts = eval_batches(
            dataset, batch=max(1, batch // self.world.size), share=self._share(), loading=loading or Loading()
        )
        with torch.no_grad():  # not inference_mode: what a model caches in here, training could not use
            for part in parts:
                if gave_up := interrupted():
                    break
                example = self._example(part.data)
                output = self._parallel.forward(example.arguments, example.keywords, training=False)
                term = self._loss.term(output, example.target, part.samples)
                count = self._loss.count(example.target, part.samples)
                tally.add_value("loss", (term.sum, count if term.own_count is None else term.own_count), part.samples)
                tally.add(output, example.target, part.samples)
        self._train_mode()
        self._report("evaluate (combining)")
        return combine(tally, gave_up, self.world.size)

    # ---- weights and checkpoints

    def state_dict(self) -> dict[str, Any]:
        """Full, ordinary weights that load into the untouched model."""
        self._parallel.align_buffers()
        return self.module.state_dict()

    def state(self) -> State:
        """What a checkpoint keeps of the model, the optimizer and the schedule."""
        self._parallel.align_buffers()
        schedule = self.schedule.state_dict() if self.schedule else None
        return {
            **model_state(self.module),
            **optimizer_state(self.module, self.optimizer),
            "schedule": schedule,
        }

    def about(self) -> dict[str, Any]:
        """What a checkpoint's manifest says: the position, and the seed that with the step makes all
        randomness."""
        return {"step": self.steps, "position": list(self.position), "seed": self.seed}

    def save(self, path: str | Path) -> Path:
        """A whole checkpoint in the folder `path`; all ranks call it."""
        return save_at(self.state(), Path(path), self.steps, self.about())

    def load(self, path: str | Path) -> None:
        """Goes on from a checkpoint of this or of any other plan."""
        manifest = verify(Path(path))
        self.restore(Path(path), manifest.about)

    def restore(self, path: Path, about: Mapping[str, Any]) -> None:
        """`load` for a checkpoint that has been verified."""
        objects = load(path, self.module, self.optimizer)
        if self.schedule and objects["schedule"] is not None:
            self.schedule.load_state_dict(objects["schedule"])
        self.steps = int(about["step"])
        self.seed = int(about["seed"])  # the order and the randomness to come are the saved run's
        self.position = (int(about["position"][0]), int(about["position"][1]))

    # ---- parts

    def _share(self) -> Share:
        return Share(self.world.rank, self.world.size)

    def _example(self, data: Any) -> Example:
        channels_last = self.plan.compute.layout == "channels_last"
        moved = move(data, self.world.device, channels_last=channels_last)
        return split(moved, self._target)

    def _microbatches(self, data: Any) -> list[Microbatch]:
        return [Microbatch(chunk, samples_in(chunk)) for chunk in chunks(data, self.plan.memory.accumulation)]

    def _train_mode(self) -> None:
        """Frozen modules stay in evaluation mode: neither their weights nor their statistics change."""
        self._parallel.runner.train()
        for name in self._frozen:
            self.module.get_submodule(name).eval()


def combine(tally: Tally, gave_up: bool, ranks: int) -> dict[str, float] | None:
    """One rank's totals with those of the others. A rank that evaluated nothing knows no names, so the names
    travel with the totals."""
    if ranks == 1:
        return None if gave_up else tally.finish(tally.totals())
    mine = (gave_up, {name: total.cpu() for name, total in tally.totals().items()})
    parts: list[Any] = [None] * ranks
    dist.all_gather_object(parts, mine)
    if any(part[0] for part in parts):
        return None
    totals: dict[str, Tensor] = {}
    for _, part in parts:
        for name, total in part.items():
            totals[name] = totals[name] + total if name in totals else total
    return tally.finish(totals)


def _seed_all(seed: int, device: torch.device) -> None:
    """As `torch.manual_seed`, for the devices in use: on the others that remembers every call, with its stack."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % 2**32)
