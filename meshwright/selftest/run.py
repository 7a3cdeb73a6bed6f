"""`doctor --selftest`: starts ranks on this machine, proves every case of the table against one device, and keeps which
parts of plans have passed on its GPUs. Ranks are started once for all cases of the same number of ranks; if one dies,
new ranks go on with the next case."""

import json
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Literal

import torch

from meshwright.cluster.cores import usable_cores
from meshwright.cluster.detect import detect
from meshwright.cluster.selftest_record import save_passed_parts
from meshwright.errors import InputError, RankError
from meshwright.processes.local.launch import RankSettings, launch
from meshwright.processes.world import is_launched
from meshwright.selftest.cases import Case, Placement, all_cases
from meshwright.selftest.rank import RESULTS, CaseProof


@dataclass(frozen=True)
class CaseResult:
    """`words` says why a case failed or was left out, or how far it is from one device."""

    case: Case
    state: Literal["passed", "failed", "left out"]
    words: str
    seconds: float = 0.0


@dataclass(frozen=True)
class Selftest:
    """The results of all cases on this machine. `devices` is the number of GPUs that were used, or of CPU cores."""

    placement: Placement
    device: str
    devices: int
    results: tuple[CaseResult, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no case failed, and at least one passed."""
        states = {result.state for result in self.results}
        return "failed" not in states and "passed" in states

    @property
    def passed_parts(self) -> frozenset[str]:
        """The parts of plans of which every case passed."""
        parts = {part for result in self.results if result.state == "passed" for part in result.case.parts}
        return frozenset(parts - {part for r in self.results if r.state == "failed" for part in r.case.parts})


def choose_placement() -> tuple[Placement, int]:
    """Where ranks run on this machine, and on how many devices: on its GPUs, on one GPU together, or on the CPU."""
    gpus = torch.cuda.device_count()
    if gpus > 1:
        return "gpus", gpus
    return ("shared", 1) if gpus else ("cpu", usable_cores())


def run_selftest(
    tell: Callable[[str], None] = lambda line: None,
    placement: tuple[Placement, int] | None = None,
    only: Collection[str] | None = None,
) -> Selftest:
    """Proves all cases, or those of the names in `only`, and calls `tell` with a line for each group of cases. With a
    GPU for each rank, what passed is kept in the cache folder, where `plan` looks it up."""
    if is_launched():
        raise InputError("--selftest starts its own ranks: run it without a launcher such as torchrun")
    begin = time.perf_counter()
    where, devices = placement or choose_placement()
    device = detect().nodes[0].device.name
    numbers = [number for number, case in enumerate(all_cases()) if only is None or case.name in only]
    results: dict[int, CaseResult] = {}
    runnable = []
    for number in numbers:
        reason = all_cases()[number].left_out(where, devices)
        if reason is None:
            runnable.append(number)
        else:
            results[number] = CaseResult(all_cases()[number], "left out", reason)
    for ranks, group in groupby(runnable, key=lambda number: all_cases()[number].plan.world_size):
        of_size = list(group)
        tell(f"{len(of_size)} plans on {ranks} ranks")
        results.update(_run_group(where, ranks, of_size))
    ordered = tuple(results[number] for number in numbers)
    selftest = Selftest(where, device, devices, ordered, time.perf_counter() - begin)
    if where == "gpus" and only is None:
        save_passed_parts(device, selftest.passed_parts)
    return selftest


def _run_group(placement: Placement, ranks: int, numbers: Sequence[int]) -> dict[int, CaseResult]:
    """Proves cases of the same number of ranks."""
    results: dict[int, CaseResult] = {}
    remaining = list(numbers)
    while remaining:
        with tempfile.TemporaryDirectory(prefix="selftest-") as name:
            folder = Path(name)
            error = _launch(placement, ranks, remaining, folder)
            for proof in _read_results(folder):
                results[proof.number] = _describe(proof)
        if error is None:
            return results
        broken = next((number for number in remaining if number not in results), remaining[-1])
        results[broken] = CaseResult(all_cases()[broken], "failed", error)
        remaining = [number for number in remaining if number not in results]
    return results


def _launch(placement: Placement, ranks: int, numbers: Sequence[int], folder: Path) -> str | None:
    """Starts the ranks. Returns why they failed, or None."""
    settings = RankSettings(
        ranks, "cuda" if placement == "gpus" else "cpu", threads=max(1, usable_cores() // ranks), restarts=0
    )
    arguments = [str(folder), placement, ",".join(map(str, numbers))]
    try:
        launch("meshwright.selftest.rank", arguments, settings, folder / "logs")
    except (RankError, InputError) as error:
        return " ".join(str(error).split())
    return None


def _read_results(folder: Path) -> list[CaseProof]:
    file = folder / RESULTS
    lines = [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
    return [CaseProof(**line) for line in lines if "equal" in line]


def _describe(proof: CaseProof) -> CaseResult:
    case = all_cases()[proof.number]
    if proof.equal:
        words = f"differs from one device by {proof.max_relative_error:.1g}, of {proof.tolerance:.1g} allowed"
        return CaseResult(case, "passed", words, proof.seconds)
    return CaseResult(case, "failed", proof.difference or "differs from one device", proof.seconds)
