"""What a run writes down about adaptive shares: every decision in `shares.jsonl` of the run folder, before a batch is
divided by it. A run that is resumed repeats the decisions that were made after its checkpoint, so that it divides the
same batches in the same way.

    {"step": 40, "first": 47, "samples": [86, 42], "speeds": [212.1, 104.0]}    changed after step 40, from batch 47 on
    {"step": 45}                                                                unchanged after step 45
"""

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from meshwright.files.storage import write_atomically, writing
from meshwright.messages.exchange import broadcast_value
from meshwright.plan_fields.shares import describe_shares, share_sizes
from meshwright.train.session import Session
from meshwright.train.shares.adaptive import ShareDecision
from meshwright.train.step_runner import StepRunner

_MOST_RANKS = 8  # whose shares are metrics of their own


def read_decisions(file: Path) -> list[ShareDecision]:
    """The decisions of a run, in their order. A last line that was not written whole is left out."""
    decisions = []
    try:
        lines = file.read_text().splitlines()
    except FileNotFoundError:
        return []
    for line in lines:
        try:
            values = json.loads(line)
        except ValueError:
            break
        decisions.append(_decision(values))
    return decisions


class ShareChanges:
    """The adaptive shares of one run; does nothing if the plan's shares are fixed. Only rank 0 writes."""

    def __init__(self, file: Path, session: StepRunner, rank: int, tell: Callable[[str], None]) -> None:
        """`tell` gets a line for the user when shares change."""
        self._file, self._rank, self._tell = file, rank, tell
        self._shares = session.shares if isinstance(session, Session) else None
        self._batch = 0
        self._changes = 0
        if self._shares is not None:
            self._shares.on_decision = self._note

    def restore(self, step: int) -> None:
        """Repeats the decisions that were made after step `step`, at which the session goes on. All ranks call this
        together, before the first batch is loaded."""
        if self._shares is None:
            return
        known = None if self._rank else [_values(decision) for decision in read_decisions(self._file)]
        decisions = [_decision(values) for values in broadcast_value(known)]
        ranks = len(self._shares.samples)
        if any(decision.samples and len(decision.samples) != ranks for decision in decisions):
            decisions = [decision for decision in decisions if decision.step <= step]  # of another number of ranks
        self._shares.repeat(decision for decision in decisions if decision.step > step)
        self._changes = sum(decision.first is not None for decision in decisions)
        if self._rank == 0 and decisions:
            write_atomically(self._file, "".join(map(_line, decisions)))

    def _note(self, decision: ShareDecision) -> None:
        """Writes a decision. A change is on the disk before a batch is divided by it."""
        if decision.first is not None:
            self._changes += 1
            shares, speeds = describe_shares(decision.samples), describe_speeds(decision.speeds)
            self._tell(f"shares are {shares} from step {decision.first + 1} on: the ranks compute {speeds} samples/s")
        if self._rank:
            return
        with writing(self._file), self._file.open("a") as file:
            file.write(_line(decision))
            file.flush()
            if decision.first is not None:
                os.fsync(file.fileno())

    def metrics(self, batch: int) -> dict[str, float]:
        """What is logged of the shares of a batch of so many samples: that of each data rank, or of many ranks the
        smallest and the largest."""
        if self._shares is None:
            return {}
        sizes = share_sizes(batch, self._shares.samples)
        if len(sizes) <= _MOST_RANKS:
            return {f"share_{rank}": float(size) for rank, size in enumerate(sizes)}
        return {"share_smallest": float(min(sizes)), "share_largest": float(max(sizes))}

    def result(self) -> dict[str, Any]:
        """What result.json says about shares."""
        if self._shares is None:
            return {}
        return {"shares": list(self._shares.samples), "share_changes": self._changes}


def describe_speeds(speeds: tuple[float, ...]) -> str:
    """Samples per second by rank, or of many ranks the smallest and the largest."""
    if len(speeds) > _MOST_RANKS:
        return f"{min(speeds):.3g} to {max(speeds):.3g}"
    return ", ".join(f"{speed:.3g}" for speed in speeds)


def _decision(values: dict[str, Any]) -> ShareDecision:
    samples, speeds = tuple(values.get("samples", ())), tuple(values.get("speeds", ()))
    return ShareDecision(values["step"], values.get("first"), samples, speeds)


def _values(decision: ShareDecision) -> dict[str, Any]:
    if decision.first is None:
        return {"step": decision.step}
    speeds = [round(speed, 4) for speed in decision.speeds]
    return {"step": decision.step, "first": decision.first, "samples": list(decision.samples), "speeds": speeds}


def _line(decision: ShareDecision) -> str:
    return json.dumps(_values(decision)) + "\n"
