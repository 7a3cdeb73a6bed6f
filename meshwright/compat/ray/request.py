"""What the command sends to the workers of Ray Train, as plain values."""

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class WorkerRequest:
    """What each worker trains. `job` and `plan` are the dumped models; `plan` is None if rank 0 is to choose one.
    `folder` is the working folder of the command, and `notes` the folder in which the workers leave their notes."""

    job: dict[str, Any]
    plan: dict[str, Any] | None
    cluster: str
    resume: str
    record: int
    folder: str
    notes: str
    unproved: bool = False

    def fields(self) -> dict[str, Any]:
        return asdict(self)
