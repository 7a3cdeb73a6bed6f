"""What a configuration of another program is written from: a plan, and of a job the facts that a plan does not have."""

from dataclasses import dataclass
from typing import Any, NamedTuple

from meshwright.cluster.cluster import DeviceKind
from meshwright.errors import InputError
from meshwright.job import Job
from meshwright.plan import Plan

TORCH_OPTIMIZERS, TORCH_SCHEDULES = "torch.optim:", "torch.optim.lr_scheduler:"


class Unsaid(NamedTuple):
    """A choice of the plan or the job that the other program's configuration cannot say, and what to do instead."""

    field: str
    value: Any
    instead: str


@dataclass(frozen=True)
class Configuration:
    """A configuration of another program. `text` is that of the file, and `command` starts the training with the file
    FILE and the user's SCRIPT."""

    text: str
    command: str
    cannot_say: tuple[Unsaid, ...]


@dataclass(frozen=True)
class PlannedTraining:
    """A plan for devices of a `kind` on `machines` machines; `job` is None if only the plan is known."""

    plan: Plan
    job: Job | None
    kind: DeviceKind
    machines: int = 1

    @property
    def ranks_per_machine(self) -> int:
        return -(-self.plan.world_size // self.machines)

    @property
    def samples(self) -> int | None:
        """The samples of a microbatch of a rank; None without a job. Raises an `InputError` if they are not equally
        many for all, which other programs do not support."""
        if self.job is None:
            return None
        batch, shares = self.job.train.global_batch, self.plan.batch_parts
        if batch % shares:
            below = batch - batch % shares
            raise InputError(
                f"train.global_batch is {batch}, which {self.plan.data_ranks} data ranks × {self.plan.microbatches}"
                f" microbatches do not divide, and other programs give every rank equally many samples: set it to"
                f" {f'{below} or ' if below else ''}{below + shares} (--set train.global_batch=N)"
            )
        return batch // shares

    @property
    def environment(self) -> str:
        """Environment variables of the command, with a space at the end, or an empty text."""
        threads = self.plan.compute.threads
        return f"OMP_NUM_THREADS={threads} " if threads is not None else ""


def torch_call(training: PlannedTraining, section: str, prefix: str) -> tuple[str, dict[str, Any]] | None:
    """The name and the options of the class that a section of the job calls, if it is one of torch's; otherwise
    None."""
    call = getattr(training.job, section) if training.job else None
    if call is None or not call.call.startswith(prefix):
        return None
    return call.call.removeprefix(prefix), dict(call.model_extra or {})
