"""`Serving`: a server's side of a run, shaped like a `Session`, so that the trainer logs, evaluates, saves and resumes
it as any other. A step of it waits for what workers push; all servers call everything together."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.load import load
from meshwright.checkpoint.state import State, model_state, optimizer_state
from meshwright.data.loading import Loading
from meshwright.errors import CollectiveError
from meshwright.launch.pairs import Connect
from meshwright.plan import Plan
from meshwright.train.metrics import Metric, Tally
from meshwright.train.servers.clocks import Clocks
from meshwright.train.servers.connections import Desk
from meshwright.train.servers.coordinator import Lead, Staleness
from meshwright.train.servers.parameter_shard import Holding
from meshwright.train.servers.recipe import Recipe
from meshwright.train.servers.rounds import Rounds
from meshwright.train.servers.team import Team
from meshwright.train.step.optimizer import fuse


@dataclass
class Taken:
    """A step of the run as the trainer sees it; filled when it is done, since only workers have samples."""

    samples: int = 0
    epoch: int = 0
    index: int = 0
    last: bool = False


class Serving:
    def __init__(
        self, recipe: Recipe, plan: Plan, team: Team, connect: Connect, timeout_s: float, *, recorded: bool = False
    ) -> None:
        self.plan = plan
        self.seed = recipe.seed
        self.steps = 0
        self.position = (0, 0)
        self.over = False  # nobody has any more batches
        self._team = team
        self._schedule_per = recipe.schedule_per
        rate = 1.0 if plan.gradients.updates == "synchronous" or plan.world_size == 1 else 1 / plan.world_size
        fused = plan.compute.fused_optimizer
        self._holding = Holding(recipe, team, fused=fused, recorded=recorded, rate=rate)
        self._loss_scale: dict[str, float] | None = None
        self._timeout_s = timeout_s
        workers, gradients = plan.world_size, plan.gradients
        self._desk = Desk(team.rank, workers, self._holding, connect, timeout_s)
        self._rounds = Rounds(team, self._desk, self._holding, workers, timeout_s, singly=rate != 1.0)
        clocks = Clocks(gradients.staleness if gradients.updates == "bounded" else None)
        self.lead = Lead(self._rounds, self._desk, clocks, workers, gradients.updates, timeout_s, self.seed)
        self.lead.positions[0] = (0, 0)

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._holding.optimizer

    @property
    def staleness(self) -> Staleness:
        return self.lead.staleness

    @property
    def parts(self) -> int | None:
        """Of a data set that is divided by sample."""
        return self.lead.divided or None

    def divide(self, loading: Loading) -> None:
        """A run keeps its parts, whoever goes on with it."""
        if loading.partition == "sample":
            self.lead.divided = self.parts or loading.parts or self.plan.data_ranks

    def limit(self, steps: int | None) -> None:
        """No worker goes beyond so many batches."""
        self.lead.clocks.total = steps

    # ---- training

    def batches(self, *_: Any) -> Iterator[Taken]:
        while not self.over:
            yield Taken()

    def step(self, taken: Any) -> Tensor:
        """One step of the run: an update of all workers' gradients, or as many single ones as make a global batch."""
        told = self._lead_step() if self._team.leads else self._rounds.follow()
        self.steps, self.position, self.over, stepped, loss, samples, self._loss_scale = told
        taken.samples, taken.last = samples, self.position[1] == 0
        taken.epoch = self.position[0] - taken.last
        schedule = self._holding.schedule
        # Many single updates make a global batch: counted by those, a schedule would depend on the number of workers.
        if schedule and (stepped if self._schedule_per == "step" else taken.last):
            schedule.step()
        return torch.tensor(loss, dtype=torch.float64)

    def _lead_step(self) -> Any:
        lead = self.lead
        progress = lead.step(self.steps)
        steps = min(lead.clocks.step, self.steps + 1)
        scale, good, skipped = lead.loss_scale
        kept = {"value": scale, "good": good, "skipped": skipped} if scale else None
        loss = progress.loss / (progress.count or 1.0)
        done = (steps, lead.position_at(steps), lead.clocks.over, progress.stepped, loss, progress.samples, kept)
        return self._rounds.end(done)

    # ---- evaluation

    def evaluate(
        self,
        dataset: Any,
        metrics: Mapping[str, Metric] | None = None,
        batch: int = 128,
        loading: Any = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """What the workers find, added up. They know the job's data and metrics themselves."""
        if not self._team.leads:
            values: dict[str, float] | None = self._rounds.follow()
            return values
        found = self.lead.evaluate(interrupted)
        if found is None:
            return self._rounds.end(None)
        totals: dict[str, Tensor] = {}
        for part in found:
            for name, total in part.items():
                totals[name] = totals[name] + total if name in totals else total
        tally = Tally({**(metrics or {})}, torch.device("cpu"))
        return self._rounds.end(tally.finish(totals))

    # ---- the end

    def stop(self) -> None:
        """Sends the workers home."""
        try:
            if self._team.leads:
                self.lead.stop()
                self._rounds.end(None)
            else:
                self._rounds.follow()
            self._desk.close(self._timeout_s)
        except CollectiveError:  # the work is done, whatever a worker still wanted
            pass

    # ---- checkpoints

    def state(self) -> State:
        """As a session's: each server has its pieces of it."""
        layouts, tied, mesh = self._holding.division()
        schedule = self._holding.schedule
        return {
            **model_state(self._holding.module, layouts),
            **optimizer_state(self._holding.module, self._holding.optimizer, layouts, tied, mesh),
            "schedule": schedule.state_dict() if schedule else None,
            "loss_scale": self._loss_scale,
        }

    def about(self) -> dict[str, Any]:
        lead = self.lead
        clocks = [[w, clock, *lead.position_at(clock)] for w, clock in sorted(lead.clocks.alive.items())]
        seen = lead.staleness
        return {
            "step": self.steps,
            "position": list(self.position),
            "seed": self.seed,
            "clocks": clocks if self.plan.gradients.updates != "synchronous" else [],
            "workers": self.plan.world_size,
            "staleness": [seen.pushes, seen.total, seen.largest, lead.clocks.largest_lead],
            **({"parts": self.parts} if self.parts else {}),
        }

    def restore(self, path: Path, about: Mapping[str, Any]) -> None:
        objects = load(path, self._holding.module, self._holding.optimizer, *self._holding.division())
        if self._holding.schedule and objects["schedule"] is not None:
            self._holding.schedule.load_state_dict(objects["schedule"])
        if self.plan.compute.fused_optimizer:
            fuse(self._holding.optimizer)
        self._loss_scale = objects.get("loss_scale")
        self.steps = int(about["step"])
        self.seed = int(about["seed"])
        self.position = (int(about["position"][0]), int(about["position"][1]))
        self._restore_lead(about)

    def _restore_lead(self, about: Mapping[str, Any]) -> None:
        lead = self.lead
        lead.seed = self.seed
        lead.divided = int(about.get("parts") or 0)
        lead.clocks.start_at(self.steps)
        lead.positions = {self.steps: self.position}
        scale = self._loss_scale
        lead.loss_scale = (scale["value"], int(scale["good"]), int(scale["skipped"])) if scale else (0.0, 0, 0)
        if about.get("staleness"):
            pushes, total, largest, lead.clocks.largest_lead = about["staleness"]
            lead.staleness = Staleness(pushes, total, largest)
        if about.get("workers") == self.plan.world_size and self.plan.gradients.updates != "synchronous":
            for worker, clock, epoch, index in about.get("clocks", ()):  # each goes on where it was
                lead.starts[worker] = clock
                lead.positions[clock] = (epoch, index)
