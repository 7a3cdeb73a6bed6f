"""`Server`: one parameter server of a run. It implements `StepRunner` as `Session` does, so that the trainer logs,
evaluates, saves and resumes as in any other run. Its step waits for gradients of workers. All servers of a run call
each method together."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from meshwright.checkpoint.load import load
from meshwright.checkpoint.manifest import Manifest
from meshwright.checkpoint.state import State, model_state, optimizer_state
from meshwright.data.loading import LoadingOptions
from meshwright.errors import CollectiveError, InputError
from meshwright.plan import Plan
from meshwright.processes.peer_connection import ConnectToStore
from meshwright.train.metrics import Metric, MetricTotals
from meshwright.train.servers.clocks import WorkerClocks
from meshwright.train.servers.connections import Connections
from meshwright.train.servers.coordinator import Coordinator, Position, Staleness
from meshwright.train.servers.parameter_shard import ParameterShard
from meshwright.train.servers.participants import Participants
from meshwright.train.servers.rounds import ServerRounds
from meshwright.train.servers.server_group import ServerGroup
from meshwright.train.servers.training_spec import TrainingSpec
from meshwright.train.shares.check import default_parts
from meshwright.train.step.optimizer import use_fused_kernels
from meshwright.train.step.schedule import needs_metric, step_schedule


@dataclass
class ServerStep:
    """What `Server.batches` yields to the trainer in place of a `Batch`. `Server.step` fills it in when the step is
    done, because only workers have the samples."""

    samples: int = 0
    epoch: int = 0
    index: int = 0
    last: bool = False


@dataclass(frozen=True)
class _StepResult:
    """What the coordinator tells the other servers about a step. `all_finished`: no worker has any more batches.
    `left_out`: number of updates that were left out because they were not finite."""

    steps: int
    position: Position
    all_finished: bool
    stepped: bool
    loss: float
    samples: int
    left_out: int
    loss_scale: dict[str, float] | None


class Server:
    """One parameter server of a run: updates its rows of the parameters with the gradients that workers send, and
    replies with the new weights. The first server is the coordinator. `recorded`: replies also carry the combined
    gradients, for a proof."""

    def __init__(
        self,
        spec: TrainingSpec,
        plan: Plan,
        group: ServerGroup,
        connect: ConnectToStore,
        timeout_s: float,
        *,
        recorded: bool = False,
    ) -> None:
        self.plan = plan
        self.seed = spec.seed
        self.steps = 0
        self.position = (0, 0)
        self.all_finished = False  # no worker has any more batches
        self.nonfinite: str | None = None
        self.spike: str | None = None  # spikes are refused with servers
        self.skipped_steps = 0  # number of updates that were left out
        self._group = group
        self._schedule_per = spec.schedule_per
        rate = 1.0 if plan.gradients.updates == "synchronous" or plan.world_size == 1 else 1 / plan.world_size
        fused = plan.compute.fused_optimizer
        self._shard = ParameterShard(spec, group, fused=fused, recorded=recorded, rate=rate)
        self._loss_scale: dict[str, float] | None = None
        self._timeout_s = timeout_s
        workers, gradients = plan.world_size, plan.gradients
        connections = Connections(group.rank, workers, self._shard, connect, timeout_s)
        self._connections = connections
        self._rounds = ServerRounds(
            group, connections, self._shard, workers, timeout_s, one_worker_per_update=rate != 1.0
        )
        clocks = WorkerClocks(gradients.staleness if gradients.updates == "bounded" else None)
        participants = Participants(connections, clocks, workers, gradients.updates, timeout_s)
        self.coordinator = Coordinator(self._rounds, participants, self.seed)
        self.coordinator.positions[0] = (0, 0)

    @property
    def module(self) -> None:
        """None: only workers have the model."""

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        return self._shard.optimizer

    @property
    def schedule(self) -> LRScheduler | None:
        return self._shard.schedule

    @property
    def staleness(self) -> Staleness:
        return self.coordinator.staleness

    @property
    def parts(self) -> int | None:
        """Number of fixed parts of the data set with `data.partition: sample`, otherwise None."""
        return self.coordinator.data_parts or None

    def set_data_parts(self, loading: LoadingOptions) -> None:
        """With `data.partition: sample`, fixes the number of parts of the data set. A resumed run keeps its number."""
        if loading.partition == "sample":
            self.coordinator.data_parts = self.parts or loading.parts or default_parts(self.plan)

    def limit(self, steps: int | None) -> None:
        """Sets the number of batches after which workers are done; None means no limit."""
        self.coordinator.clocks.total = steps

    # ---- training

    def batches(self, *_: Any) -> Iterator[ServerStep]:
        """Yields a `ServerStep` for each step, until no worker has any more batches. Takes the arguments of
        `Session.batches`, and ignores them."""
        while not self.all_finished:
            yield ServerStep()

    def step(self, server_step: Any) -> Tensor:
        """Runs one step of the run: one update with the gradients of all workers, or as many asynchronous updates as
        make a global batch. Fills in `server_step`, and returns the mean loss."""
        fields = self._coordinate_step() if self._group.is_coordinator else self._rounds.follow()
        result = _StepResult(**fields)
        self.steps, self.position, self.all_finished = result.steps, result.position, result.all_finished
        self._loss_scale = result.loss_scale
        self.skipped_steps += result.left_out
        problem = "a gradient is not finite" if math.isfinite(result.loss) else f"the loss is {result.loss}"
        self.nonfinite = problem if result.left_out else None
        server_step.samples, server_step.last = result.samples, self.position[1] == 0
        server_step.epoch = self.position[0] - server_step.last
        schedule = self.schedule
        # Stepped once per step of the run, not per update: otherwise it would depend on the number of workers.
        is_due = result.stepped if self._schedule_per == "step" else server_step.last
        if schedule and is_due and not needs_metric(schedule):
            schedule.step()
        return torch.tensor(result.loss, dtype=torch.float64)

    def leave_out(self, server_step: Any) -> None:
        raise AssertionError("`restore` refuses runs that leave out batches")

    def step_schedule(self, metric: float | None = None) -> None:
        """Steps the learning-rate schedule, with the metric if it needs one. Does nothing without a schedule."""
        if self.schedule is not None:
            step_schedule(self.schedule, metric)

    def _coordinate_step(self) -> Any:
        """Runs a step with the other servers, and returns the fields of its `_StepResult`."""
        coordinator = self.coordinator
        progress = coordinator.step(self.steps)
        steps = min(coordinator.clocks.step, self.steps + 1)
        left_out, progress.left_out = progress.left_out, 0  # asynchronous steps may end with the same update
        scale, good, skipped = coordinator.participants.loss_scale
        result = _StepResult(
            steps=steps,
            position=coordinator.position_at(steps),
            all_finished=coordinator.clocks.all_finished,
            stepped=progress.stepped,
            loss=progress.loss / (progress.count or 1.0),
            samples=progress.samples,
            left_out=left_out,
            loss_scale={"value": scale, "good": good, "skipped": skipped} if scale else None,
        )
        return self._rounds.end(asdict(result))

    # ---- evaluation

    def evaluate(
        self,
        dataset: Any,
        metrics: Mapping[str, Metric] | None = None,
        batch: int = 128,
        loading: Any = None,
        interrupted: Callable[[], bool] = lambda: False,
    ) -> dict[str, float] | None:
        """Returns the loss and the metrics of the evaluation set by name; None if the evaluation was interrupted. The
        workers compute them with the data set and the loading options of the job; `dataset`, `batch` and `loading` are
        ignored."""
        if not self._group.is_coordinator:
            values: dict[str, float] | None = self._rounds.follow()
            return values
        totals_of_parts = self.coordinator.evaluate(interrupted)
        if totals_of_parts is None:
            return self._rounds.end(None)
        totals: dict[str, Tensor] = {}
        for part in totals_of_parts:
            for name, total in part.items():
                totals[name] = totals[name] + total if name in totals else total
        metric_totals = MetricTotals({**(metrics or {})}, torch.device("cpu"))
        return self._rounds.end(metric_totals.finish(totals))

    # ---- the end

    def stop(self) -> None:
        """Tells the workers to stop."""
        try:
            if self._group.is_coordinator:
                self.coordinator.stop()
                self._rounds.end(None)
            else:
                self._rounds.follow()
            self._connections.close(self._timeout_s)
        except CollectiveError:  # the run is complete, so a worker that fails now does not matter
            pass

    # ---- checkpoints

    def state(self) -> State:
        """The contents of a checkpoint by the keys of `Session.state`, with this server's rows of each tensor."""
        layouts, tied, mesh = self._shard.weight_division()
        schedule = self._shard.schedule
        return {
            **model_state(self._shard.module, layouts),
            **optimizer_state(self._shard.module, self._shard.optimizer, layouts, tied, mesh),
            "schedule": schedule.state_dict() if schedule else None,
            "loss_scale": self._loss_scale,
        }

    def about(self) -> dict[str, Any]:
        """What a checkpoint's manifest says about the run: the entries of `Session.about`, and `clocks` (worker, clock,
        epoch and batch of each), `workers` and `staleness`."""
        coordinator = self.coordinator
        clocks = [
            [w, clock, *coordinator.position_at(clock)] for w, clock in sorted(coordinator.clocks.by_worker.items())
        ]
        staleness = coordinator.staleness
        return {
            "step": self.steps,
            "position": list(self.position),
            "seed": self.seed,
            "clocks": clocks if self.plan.gradients.updates != "synchronous" else [],
            "workers": self.plan.world_size,
            "skipped": self.skipped_steps,
            "staleness": [staleness.pushes, staleness.total, staleness.largest, coordinator.clocks.largest_lead],
            **({"parts": self.parts} if self.parts else {}),
        }

    def restore(self, path: Path, manifest: Manifest) -> None:
        """Resumes from the checkpoint that has this manifest. Files that differ from it are refused."""
        about = manifest.about
        if about.get("left_out"):
            raise InputError(
                f"{path}: the run leaves out {len(about['left_out'])} batches (train.on_nonfinite: rewind), which"
                " workers of parameter servers cannot: set gradients.servers to 0"
            )
        objects = load(path, manifest, self._shard.module, self._shard.optimizer, *self._shard.weight_division())
        if self._shard.schedule and objects["schedule"] is not None:
            self._shard.schedule.load_state_dict(objects["schedule"])
        if self.plan.compute.fused_optimizer:
            use_fused_kernels(self._shard.optimizer)
        self._loss_scale = objects.get("loss_scale")
        self.steps = int(about["step"])
        self.seed = int(about["seed"])
        self.position = (int(about["position"][0]), int(about["position"][1]))
        self.skipped_steps = int(about.get("skipped", 0))
        self._restore_coordinator(about)

    def _restore_coordinator(self, about: Mapping[str, Any]) -> None:
        coordinator, scale = self.coordinator, self._loss_scale
        coordinator.seed = self.seed
        coordinator.data_parts = int(about.get("parts") or 0)
        coordinator.clocks.start_at(self.steps)
        coordinator.positions = {self.steps: self.position}
        coordinator.participants.loss_scale = (
            (scale["value"], int(scale["good"]), int(scale["skipped"])) if scale else (0.0, 0, 0)
        )
        if about.get("staleness"):
            pushes, total, largest, coordinator.clocks.largest_lead = about["staleness"]
            coordinator.staleness = Staleness(pushes, total, largest)
        if about.get("workers") == self.plan.world_size and self.plan.gradients.updates != "synchronous":
            for worker, clock, epoch, index in about.get("clocks", ()):  # each worker resumes at its own position
                coordinator.participants.start_clocks[worker] = clock
                coordinator.positions[clock] = (epoch, index)
