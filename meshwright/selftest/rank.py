"""One rank of the selftest: `python -m meshwright.selftest.rank FOLDER PLACEMENT FIRST,SECOND,…`, started by `run`. It
proves the cases of these numbers one after another. Rank 0 writes a line to `results.jsonl` when a case begins, and one
with its result, so that the launcher knows in which case ranks have failed."""

import json
import shutil
import sys
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.processes.rank import run_rank
from meshwright.processes.world import World
from meshwright.proof.prove import prove_in_running_ranks
from meshwright.selftest.cases import Placement, all_cases
from meshwright.selftest.models import build_request

RESULTS = "results.jsonl"
_TIMEOUT_S = 90.0  # for a collective


@dataclass(frozen=True)
class CaseProof:
    """The result of one case: whether its plan trains as one device does, and the first difference if it does not."""

    number: int
    equal: bool
    max_relative_error: float
    tolerance: float
    seconds: float
    difference: str | None


def prove_cases(world: World, placement: Placement, numbers: list[int], folder: Path) -> None:
    if placement == "shared":  # the process group is that of CPU ranks, because NCCL refuses two ranks on one GPU
        torch.cuda.set_device(0)
        world = replace(world, device=torch.device("cuda", 0))
    for number in numbers:
        if world.rank == 0:
            _write(folder, {"number": number})
        result = _prove(world, number, folder)
        if result is not None:
            _write(folder, asdict(result))


def _prove(world: World, number: int, folder: Path) -> CaseProof | None:
    """Returns the result on rank 0, and None on the others."""
    case = all_cases()[number]
    begin = time.perf_counter()
    record = folder / f"case-{number}"
    record.mkdir(exist_ok=True)
    proof = prove_in_running_ranks(build_request(case.model, case.plan, case.dtype), world, record)
    if proof is None:
        return None
    shutil.rmtree(record, ignore_errors=True)
    first = proof.first_difference
    difference = None
    if first is not None:
        cause = f": {first.cause} ({first.explanation})" if first.cause else ""
        difference = f"step {first.step}, {first.what} {first.parameter or ''} differs by {first.error:.2g}{cause}"
    seconds = time.perf_counter() - begin
    return CaseProof(number, proof.equal, proof.max_relative_error, proof.tolerance, seconds, difference)


def _write(folder: Path, line: dict[str, Any]) -> None:
    with (folder / RESULTS).open("a") as file:
        file.write(json.dumps(line) + "\n")


def main() -> None:
    folder, placement, numbers = Path(sys.argv[1]), sys.argv[2], [int(word) for word in sys.argv[3].split(",")]
    device = "cuda" if placement == "gpus" else "cpu"
    run_rank(
        lambda world, heartbeat: prove_cases(world, placement, numbers, folder),  # type: ignore[arg-type]
        device,
        _TIMEOUT_S,
    )


if __name__ == "__main__":
    main()
