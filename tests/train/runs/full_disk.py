"""Trainings on disks of a few MB: `unshare -rm python -m tests.train.runs.full_disk FOLDER RANKS CASE ...`, which may
mount them without being root. In each case something happens to the disk during the training. What the user is told and
what is left is printed as a line of JSON."""

import json
import shutil
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

# Nothing here imports torch when it is loaded, so that `preloaded` forks this process instead of starting another one.
from meshwright.errors import MeshwrightError
from meshwright.processes.local.fork_server import preloaded

DISK_BYTES = 4_194_304
JOB: dict[str, Any] = {
    "name": "toy",
    "model": {"call": "tests.train.toy:Net", "hidden": 256},  # with Adam's state, a checkpoint has 0.9 MB
    "loss": {"call": "torch.nn.functional:cross_entropy"},
    "optimizer": {"call": "torch.optim:Adam", "lr": 0.01},
    "train": {"epochs": 100, "steps": 20, "global_batch": 8, "restarts": 2},
    # Not asynchronous: what is left of the disk would depend on whether an older checkpoint is deleted already.
    "checkpoint": {"every_steps": 2, "keep": 1, "asynchronous": False},
    "log": {"every_steps": 1, "tensorboard": False},
}


class DisturbedPoints:
    """A data set that does something to the disk of a run, once, when a rank reads its 24th sample: with batches of 8
    samples that is in step 3 of one rank, and in step 6 of two, which read three samples at the start to compare
    them."""

    def __init__(self, disk: str, action: str) -> None:
        from tests.train.toy import points

        self._points, self._disk, self._action = points(320), Path(disk), action
        self._samples_read = 0

    def __len__(self) -> int:
        return 320

    def __getitem__(self, index: int) -> Any:
        self._samples_read += 1
        if self._samples_read == 24:
            with suppress(FileExistsError):
                self._disk.with_suffix(".disturbed").touch(exist_ok=False)
                ACTIONS[self._action](self._disk)
        return self._points[index]


def fill(disk: Path, left: int = 0) -> None:
    """Leaves so many bytes of the disk free."""
    from validation.bench.faults.inject import fill_disk

    fill_disk(disk, left)


def make_read_only(disk: Path) -> None:
    """Mounts the run folder over itself without permission to write. A disk itself cannot be made read-only by `mount`
    as long as files on it are open, but the kernel does so when it has an error."""
    run = disk / "runs" / "toy-0001"
    subprocess.run(["mount", "--bind", run, run], check=True)
    subprocess.run(["mount", "-o", "remount,bind,ro", run], check=True)


def delete_run(disk: Path) -> None:
    gone = disk / "gone"
    (disk / "runs" / "toy-0001").rename(gone)  # at once, as other ranks may be creating files in it
    while gone.exists():
        shutil.rmtree(gone, ignore_errors=True)


ACTIONS = {
    "fill": fill,
    "fill all but 0.5 MB": lambda disk: fill(disk, 500_000),
    "make read-only": make_read_only,
    "delete": delete_run,
}


def train_on(disk: Path, ranks: int, action: str, **sections: dict[str, Any]) -> dict[str, Any]:
    """Trains with its run folder on this disk. Returns the class and text of the error, or None in both if there was
    none; the step of the newest valid checkpoint, or None if there is none; and the names in the folder of
    checkpoints."""
    from meshwright.checkpoint.load import find_newest_valid
    from meshwright.cluster.detect import find_cluster
    from meshwright.job import Job
    from meshwright.plan import Plan
    from meshwright.plan_fields.groups import Axes
    from meshwright.train.run import train

    data = {"train": {"call": "tests.train.runs.full_disk:DisturbedPoints", "disk": str(disk), "action": action}}
    merged = {key: {**JOB[key], **values} for key, values in sections.items()}
    job = Job.model_validate({**JOB, **merged, "data": data, "output": str(disk / "runs")})
    error = None
    try:
        train(job, Plan(axes=Axes(replicate=ranks)), find_cluster(f"{ranks}xcpu"))
    except MeshwrightError as raised:
        error = raised
    checkpoints = disk / "runs" / "toy-0001" / "checkpoints"
    newest = find_newest_valid(checkpoints).manifest if checkpoints.exists() else None
    return {
        "class": type(error).__name__ if error else None,
        "error": str(error) if error else None,
        "step": newest.step if newest else None,
        "names": sorted(path.name for path in checkpoints.glob("*")),
    }


def first_save(disk: Path, ranks: int) -> list[dict[str, Any]]:
    return [train_on(disk, ranks, "fill all but 0.5 MB", checkpoint={"every_steps": 10})]


def later_save(disk: Path, ranks: int) -> list[dict[str, Any]]:
    """The second training has space again."""
    first = train_on(disk, ranks, "fill all but 0.5 MB")
    (disk / "ballast").unlink()
    return [first, train_on(disk, ranks, "fill all but 0.5 MB")]


def metrics(disk: Path, ranks: int) -> list[dict[str, Any]]:
    return [train_on(disk, ranks, "fill", checkpoint={"every_steps": None}, train={"steps": 80})]


def events(disk: Path, ranks: int) -> list[dict[str, Any]]:
    sections: dict[str, dict[str, Any]] = {
        "checkpoint": {"every_steps": None},
        "train": {"steps": 80},
        "log": {"tensorboard": True},
    }
    return [train_on(disk, ranks, "fill", **sections)]


def read_only(disk: Path, ranks: int) -> list[dict[str, Any]]:
    return [train_on(disk, ranks, "make read-only")]


def deleted(disk: Path, ranks: int) -> list[dict[str, Any]]:
    return [train_on(disk, ranks, "delete")]


CASES = {case.__name__: case for case in (first_save, later_save, metrics, events, read_only, deleted)}


def main() -> None:
    folder, ranks, names = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]
    with preloaded("meshwright.train.rank"):
        for name in names:
            disk = folder / name
            disk.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", disk], check=True)
            print(json.dumps([name, CASES[name](disk, ranks)]), flush=True)


if __name__ == "__main__":
    main()
