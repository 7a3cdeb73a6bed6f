"""Runs one case in plain PyTorch and under its plan, and says how it ended."""

import json
import math
import re
import shutil
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.collectives.shared_memory.compiled_helper import load_helper
from tests.ranks import RankFailure, RankPool
from validation.fuzz.program import Case
from validation.fuzz.training.compare import TOLERANCE, difference
from validation.fuzz.training.plain import Invalid, Training, train
from validation.fuzz.training.rank import RankResult, run_case

# The loops of cases change no weights, so a step under the plan has made the ranks' weights differ.
_DIVERGED = "differ from those of rank"
_NOISE = 1e-14  # a change of weights that is like rounding
_FACTOR = 100  # how much larger an error is, at least, than what the noise becomes
_AMPLIFIED = 1e-11  # a case that turns the noise into a larger difference cannot be compared to the tolerance


@dataclass(frozen=True)
class Outcome:
    """`kind`: equal, refused, wrong, crash, or invalid for a case that does not run in plain PyTorch. `reason` is what
    differs or the message. `names_line`: whether a refusal names a line of the program's file."""

    kind: str
    reason: str = ""
    error: float = 0.0
    when: str = ""
    names_line: bool = False


class Pools:
    """Ranks that are reused, by their number. A pool whose ranks may be out of step is ended; it starts again when it
    is needed."""

    def __init__(self, timeout_s: float = 25) -> None:
        load_helper()  # it is compiled once on each machine, which can take ranks longer than their time
        self.timeout_s = timeout_s
        self._pools: dict[int, RankPool] = {}

    def run(self, ranks: int, *arguments: Any) -> list[RankResult]:
        pool = self._pools.setdefault(ranks, RankPool(ranks, self.timeout_s))
        return pool.run(run_case, *arguments)

    def end(self, ranks: int) -> None:
        if ranks in self._pools:
            self._pools[ranks].close()

    def close(self) -> None:
        for pool in self._pools.values():
            pool.close()


def outcome_of(case: Case, pools: Pools, fault: str | None = None) -> Outcome:
    """Runs the case in plain PyTorch and under its plan, and compares."""
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    try:
        try:
            expected = train(case, folder / "program.py")
        except Invalid as error:
            return Outcome("invalid", str(error)[:300])
        outcome = _compare(case, expected, folder, pools, fault)
        if outcome.kind != "wrong" or not _may_be_rounding(outcome.error, case, expected, folder):
            return outcome
        if case.steps > 1:  # fewer steps amplify less
            return outcome_of(replace(case, steps=case.steps - 1), pools, fault)
        return Outcome("invalid", f"it amplifies rounding: {outcome.reason}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _compare(case: Case, expected: Training, folder: Path, pools: Pools, fault: str | None) -> Outcome:
    try:
        results = pools.run(case.ranks, case.as_json(), str(folder), fault)
    except (RankFailure, TimeoutError) as error:
        return _crash(folder, error)
    refused = [result for result in results if result.outcome == "refused"]
    if refused and len(refused) < len(results):
        pools.end(case.ranks)
        return Outcome("crash", f"only some ranks refuse: {refused[0].message}", when=refused[0].when)
    if refused:
        if refused[0].when != "parallelize":
            pools.end(case.ranks)  # a rank may have sent what nobody has received
        if _DIVERGED in refused[0].message:
            return Outcome("wrong", refused[0].message, error=math.inf, when=refused[0].when)
        names_line = any(re.search(r"program_\d+\.py\D{1,8}\d+", result.message) for result in refused)
        return Outcome("refused", refused[0].message, when=refused[0].when, names_line=names_line)
    worst = (0.0, "")
    for rank, result in enumerate(results):
        state = {
            name: torch.from_numpy(value) if value.shape else torch.tensor(value)
            for name, value in result.state.items()
        }
        off, where = difference(expected, result.losses, state)
        worst = max(worst, (off, f"{where} on rank {rank}"))
    if worst[0] <= TOLERANCE:
        return Outcome("equal", error=worst[0])
    return Outcome("wrong", f"{worst[1]} is off by {worst[0]:.2g}", worst[0])


def _crash(folder: Path, error: Exception) -> Outcome:
    """An exception of a rank that is no refusal, or a hang; with what the ranks have written about it."""
    refusals = sorted(folder.glob("refused_*.json"))
    if refusals:
        when, message = json.loads(refusals[0].read_text())
        return Outcome("crash", f"only some ranks refuse: {message}", when=when)
    texts = [file.read_text() for file in sorted(folder.glob("crash_*.txt"))]
    text = next((text for text in texts if "gloo" not in text and "CollectiveError" not in text), "".join(texts[:1]))
    when, _, trace = text.partition("\n")
    if not trace:
        return Outcome("crash", f"hang: {error}"[:2000])
    return Outcome("crash", trace[-2500:], when=when)


def _may_be_rounding(error: float, case: Case, expected: Training, folder: Path) -> bool:
    """Whether changes of the first weights that are like rounding are amplified to something like this error."""
    if not math.isfinite(error):
        return False
    try:
        disturbed = train(case, folder / "disturbed.py", _NOISE)
    except Invalid:
        return True
    amplified, _ = difference(expected, disturbed.losses, disturbed.state)
    return error < _FACTOR * amplified or (error < 1e-3 and amplified > _AMPLIFIED)
