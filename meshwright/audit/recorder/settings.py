"""`Settings`: what the auditing process asks a recorder to do, as a JSON file in the record's folder."""

import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path

SKETCH_ABOVE = 2**18  # elements
FOLDER_VARIABLE = "MESHWRIGHT_AUDIT_RECORD"  # names the folder of the record in the recorded processes

# The environment variables by which launchers tell a process its rank: torchrun, Horovod, Open MPI, and other MPIs.
_RANK_AND_WORLD_VARIABLES = (
    ("RANK", "WORLD_SIZE"),
    ("HOROVOD_RANK", "HOROVOD_SIZE"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)


@dataclass(frozen=True)
class Settings:
    """`start` is own, random or reference. `reference` is the folder of the record whose start is loaded; without one
    and with `random`, weights are drawn. `shift` is the relative size of random changes of a start that is not drawn,
    in all trainings that are compared. `perturb` is that of random changes in this training alone, which show how much
    rounding may change. `keep_dropout` leaves dropout on. Of tensors with more than `sketch_above` elements a
    sketch is written (see `sketches.py`); None writes all elements of all."""

    steps: int = 3
    start: str = "random"
    reference: str | None = None
    shift: float = 0.0
    perturb: float = 0.0
    keep_dropout: bool = False
    seed: int = 0
    sketch_above: int | None = SKETCH_ABOVE

    def write(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "settings.json").write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, folder: Path) -> "Settings":
        return cls(**json.loads((folder / "settings.json").read_text()))


def record_folder() -> Path | None:
    """The folder of the record that this process belongs to; None if it is not recorded."""
    folder = os.environ.get(FOLDER_VARIABLE)
    return Path(folder) if folder else None


def rank_and_world() -> tuple[int, int]:
    """The rank of this process and the number of ranks."""
    import torch.distributed as dist

    if dist.is_available() and dist.is_initialized():
        return dist.get_rank(), dist.get_world_size()
    for rank, world in _RANK_AND_WORLD_VARIABLES:
        if rank in os.environ and world in os.environ:
            return int(os.environ[rank]), int(os.environ[world])
    return 0, 1
