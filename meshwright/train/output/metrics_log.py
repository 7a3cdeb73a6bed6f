"""Writes the metrics of a run to metrics.jsonl and as TensorBoard events; on rank 0 only."""

import json
import math
import os
import time
from contextlib import suppress
from typing import Any

from meshwright.errors import StorageError
from meshwright.files.storage import write_atomically, writing
from meshwright.processes.output import terminal
from meshwright.train.output.folder import RunFolder


class MetricsLog:
    """Writes the metrics of a run that starts or resumes at `step`. Entries of later steps are removed from an existing
    log, because these steps will be repeated and must not appear twice. An evaluation of `step` itself is kept if the
    checkpoint contains its result (`evaluated`); otherwise it is removed, because it will be repeated."""

    def __init__(self, folder: RunFolder, step: int, tensorboard: bool, evaluated: bool = True) -> None:
        self._folder = folder
        self._is_recreated = False
        folder.check_exists()
        with writing(folder.metrics):
            if folder.metrics.exists():
                lines = folder.metrics.read_bytes().splitlines(keepends=True)
                kept_lines = [line for line in lines if _last_step(line, evaluated) <= step]
                write_atomically(folder.metrics, b"".join(kept_lines))
            self._metrics = folder.metrics.open("a", buffering=1)
        self._events: Any = None
        if tensorboard:
            self._events = _open_events(folder, step)

    def write(self, kind: str, step: int, epoch: int, values: dict[str, Any]) -> None:
        """Writes one entry: a line of metrics.jsonl, and one TensorBoard scalar for each value that is not None."""
        json_values = {name: finite_or_none(value) for name, value in values.items()}
        entry = {"kind": kind, "step": step, "epoch": epoch, **json_values, "time": round(time.time(), 3)}
        self._check_folder()
        with writing(self._folder.metrics):
            if os.fstat(self._metrics.fileno()).st_nlink == 0:  # deleted: what is written there is lost
                self._metrics = self._folder.metrics.open("a", buffering=1)
                self._is_recreated = True
            self._metrics.write(json.dumps(entry) + "\n")
        if self._events is None:
            return
        with writing(self._folder.events):
            for name, value in values.items():
                if value is not None:
                    self._events.add_scalar(f"{kind}/{name}", value, step)

    def _check_folder(self) -> None:
        """Raises a `StorageError` if the run folder was deleted. If metrics.jsonl was created again while that went on,
        and kept the folder from being deleted, both are deleted."""
        try:
            self._folder.check_exists()
        except StorageError:
            if self._is_recreated:
                with suppress(OSError):
                    self._folder.metrics.unlink()
                    self._folder.path.rmdir()  # which fails if anything else is in it
            raise

    def close(self) -> None:
        with suppress(StorageError):  # the run may end because of another error
            self._check_folder()
        with writing(self._folder.metrics):
            self._metrics.close()
        if self._events is not None:
            with writing(self._folder.events):
                self._events.close()


def _open_events(folder: RunFolder, step: int) -> Any:
    """Returns a writer of events; None, after a line that says so, if the package tensorboard is not installed."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        line = f'log.tensorboard: no events are written ({error}): pip install "meshwright[pages]"'
        with suppress(OSError):  # a stream that cannot take it, such as a file on a full disk, does not end the run
            print(line, file=terminal(), flush=True)
        return None
    with writing(folder.events):
        return SummaryWriter(str(folder.events), purge_step=step + 1 if step else None)


def finite_or_none(value: Any) -> Any:
    """The value, or None when it is NaN or infinite, which JSON cannot express."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _last_step(line: bytes, evaluated: bool) -> float:
    """Returns the smallest step at which a run can resume without removing this line: the step of the line; half a step
    more if the line is an evaluation that will be repeated; infinity if the line cannot be read, for example because
    the process was killed while it wrote."""
    try:
        entry = json.loads(line)
        return float(entry["step"]) + (0.5 if entry["kind"] == "eval" and not evaluated else 0)
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return float("inf")
