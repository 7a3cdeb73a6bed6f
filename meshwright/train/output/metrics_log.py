"""What is written down about a run while it goes: metrics.jsonl and TensorBoard events; by rank 0 alone."""

import json
import math
import time
from typing import Any

from meshwright.train.output.folder import RunFolder, write_text


class Logbook:
    """Opened at the step a run starts or goes on from; what lies beyond it is of a future that did not happen,
    and is taken out, so that a restarted run's curves are those of an undisturbed one. So is an evaluation of
    that very step, unless the checkpoint knows of it (`evaluated`): it will be made again."""

    def __init__(self, folder: RunFolder, step: int, tensorboard: bool, evaluated: bool = True) -> None:
        if folder.metrics.exists():
            lines = folder.metrics.read_text().splitlines(keepends=True)
            write_text(folder.metrics, "".join(line for line in lines if _step_of(line, evaluated) <= step))
        self._metrics = folder.metrics.open("a", buffering=1)
        self._events: Any = None
        if tensorboard:
            # Loading it takes as long as torch itself: only who writes events pays for it.
            from torch.utils.tensorboard import SummaryWriter

            self._events = SummaryWriter(str(folder.events), purge_step=step + 1 if step else None)

    def write(self, kind: str, step: int, epoch: int, values: dict[str, Any]) -> None:
        numbers = {name: finite(value) for name, value in values.items()}
        entry = {"kind": kind, "step": step, "epoch": epoch, **numbers, "time": round(time.time(), 3)}
        self._metrics.write(json.dumps(entry) + "\n")
        if self._events is not None:
            for name, value in values.items():
                if value is not None:
                    self._events.add_scalar(f"{kind}/{name}", value, step)

    def close(self) -> None:
        self._metrics.close()
        if self._events is not None:
            self._events.close()


def finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: they become null."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: str, evaluated: bool) -> float:
    """The last step that a line tells of; one that a kill cut short tells of none."""
    try:
        entry = json.loads(line)
        return float(entry["step"]) + (0.5 if entry["kind"] == "eval" and not evaluated else 0)
    except (ValueError, KeyError, TypeError):
        return float("inf")
