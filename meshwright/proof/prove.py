"""`meshwright prove`: trains a few steps of a job under its plan and in one process, and compares everything."""

import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from meshwright.cluster.cores import usable_cores
from meshwright.cluster.detect import detect, detect_cpu
from meshwright.errors import InputError, RankError
from meshwright.files.storage import output_error
from meshwright.job import Job
from meshwright.messages.exchange import broadcast_value
from meshwright.plan import Plan
from meshwright.plan_rules.table import check_rules
from meshwright.processes.local.launch import RankSettings, launch
from meshwright.processes.world import World, is_launched
from meshwright.progress import phase
from meshwright.proof.exact_comparison import compare_exactly
from meshwright.proof.proof import Proof
from meshwright.proof.record.rank import REQUEST_FILE
from meshwright.proof.record.record import record
from meshwright.proof.record.request_file import check_main_guard, write_request
from meshwright.proof.request import COMPARISON_DTYPES, STARTS, ProofRequest
from meshwright.proof.rounded_comparison import compare_rounded, with_exact_cause
from meshwright.proof.shrink import shrink
from meshwright.train.check import check_job
from meshwright.train.job_parts import JobParts
from meshwright.train.session import Session

EXACT_DTYPE = "fp64"  # the precision in which causes are looked for
_FEWEST_CPU_RANKS = 8  # also on fewer cores: for a few small steps, processes may share cores


@dataclass(frozen=True)
class AvailableRanks:
    """The type of device that ranks will run on (cpu or cuda), and the largest number of ranks that may be started."""

    device: str
    count: int


def prove(
    job: Job,
    plan: Plan,
    *,
    ranks: int | None = None,
    steps: int = 3,
    dtype: str = "fp64",
    dropout: bool = False,
    start: str = "job",
    device: str | None = None,
    prepare_session: Callable[[Session], None] | None = None,
    parts: JobParts | None = None,
) -> Proof:
    """Compares a job's training under a plan with its training on one device.

    `ranks` is the largest number of ranks to start; a plan for more ranks is shrunk. `device` is cpu or cuda; None
    chooses. `start` and `prepare_session` are explained in `ProofRequest`. `parts` are the job's parts if planning the
    job has already built them; their memory is released before the ranks start.
    """
    parts = parts or JobParts(job)
    available = available_ranks(plan, ranks, device)
    smaller, shrunk = shrink(with_fixed_precision(plan, dtype), available.count)
    cluster = detect() if available.device == "cuda" else detect_cpu()
    with phase("checking the job and the plan"):
        check_job(job, smaller, cluster.with_device_count(available.count), parts)
    parts.release()
    request = ProofRequest(job, smaller, steps, dtype, dropout, prepare_session, start)
    with work_folder(Path(job.output)) as folder:
        return replace(prove_in_new_ranks(request, available.device, folder), shrunk=shrunk)


def with_fixed_precision(plan: Plan, dtype: str) -> Plan:
    """Returns the plan with fp32 in place of the precision `auto`, which only a training run resolves. Other plans are
    returned unchanged. If `dtype` is `plan` (compare in the plan's own precision), `auto` raises InputError."""
    if plan.numerics.precision != "auto":
        return plan
    if dtype == "plan":
        raise InputError(
            "plan.numerics.precision is auto, which a run chooses: name it to compare in the plan's own precision"
        )
    return plan.model_copy(update={"numerics": plan.numerics.model_copy(update={"precision": "fp32"})})


def available_ranks(plan: Plan, ranks: int | None, device: str | None) -> AvailableRanks:
    """Returns the type of device to compare on, and how many ranks may be started. GPUs are chosen if there are at
    least two, or at least one for a plan of one rank. Otherwise the CPU is chosen, on which several ranks can run."""
    if ranks is not None and ranks < 1:
        raise InputError(f"--ranks {ranks}: take at least one")
    gpus = torch.cuda.device_count()
    device_type = device or ("cuda" if gpus >= min(2, plan.world_size) else "cpu")
    if device_type == "cuda":
        if not gpus:
            raise InputError("this machine has no GPU: compare on the CPU")
        return AvailableRanks(device_type, min(gpus, ranks or gpus))
    return AvailableRanks(device_type, ranks or max(_FEWEST_CPU_RANKS, usable_cores()))


def prove_in_new_ranks(request: ProofRequest, device: str, folder: Path) -> Proof:
    """Starts ranks for a request whose plan fits on this machine, and compares what they recorded with the reference.
    If a comparison in the plan's own precision finds a difference, it is repeated in fp64 to find the cause."""
    check_request(request)
    check_main_guard()
    if is_launched():
        raise InputError(
            "prove starts its own ranks, but a launcher such as torchrun started this process: call prove without a"
            " launcher"
        )
    proof = _launch_and_compare(request, device, folder)
    if request.in_plan_precision and not proof.equal:
        proof = with_exact_cause(proof, _launch_and_compare(replace(request, dtype=EXACT_DTYPE), device, folder))
    return proof


def _launch_and_compare(request: ProofRequest, device: str, folder: Path) -> Proof:
    write_request(request, folder / REQUEST_FILE)
    processes = request.plan.processes
    threads = request.plan.compute.threads or max(1, usable_cores() // request.plan.world_size)
    steps = "1 step" if request.steps == 1 else f"{request.steps} steps"
    with phase(f"proving: training {steps} in {processes} {'rank' if processes == 1 else 'ranks'}"):
        launch(
            "meshwright.proof.record.rank",
            [str(folder.resolve()), device],
            RankSettings(processes, device, threads, restarts=0),
            folder / "logs",
        )
    with phase(f"proving: training {steps} on one device and comparing"):
        return _compare_records(request, folder, torch.device(device))


def _compare_records(request: ProofRequest, folder: Path, device: torch.device) -> Proof:
    return (compare_rounded if request.in_plan_precision else compare_exactly)(request, folder, device)


def prove_in_running_ranks(request: ProofRequest, world: World, folder: Path) -> Proof | None:
    """Compares in ranks that are already running. All ranks call this function, with a folder that they share. Returns
    the proof on rank 0, and None on all other ranks."""
    check_request(request)
    if request.plan.gradients.servers:
        raise InputError(
            f"plan.gradients.servers is {request.plan.gradients.servers}, but prove starts parameter servers only in"
            " ranks of its own: call it without a launcher such as torchrun"
        )
    record(request, world, folder)
    proof = _compare_records(request, folder, world.device) if world.rank == 0 else None
    if request.in_plan_precision and broadcast_value(proof is not None and not proof.equal):
        exact = prove_in_running_ranks(replace(request, dtype=EXACT_DTYPE), world, folder)
        return with_exact_cause(proof, exact) if proof and exact else None
    return proof


def check_request(request: ProofRequest) -> None:
    """Raises InputError if the request is invalid, or if no single device trains as its plan does."""
    if request.steps < 1:
        raise InputError(f"{request.steps} steps prove nothing: take at least one")
    check_rules(request.plan, "prove")
    if request.dtype not in COMPARISON_DTYPES:
        raise InputError(f"cannot compare in {request.dtype}: choose {' or '.join(COMPARISON_DTYPES)}")
    if request.start not in STARTS:
        raise InputError(f"cannot start from {request.start}: choose {' or '.join(STARTS)}")


@contextmanager
def work_folder(parent: Path | None) -> Iterator[Path]:
    """Yields a temporary folder for the files that ranks record, and deletes it at the end. The files are several times
    as large as the model, so the folder is created inside `parent` (the folder of runs) and not in /tmp, unless
    `parent` is None. If a rank fails, only the recorded files are deleted, and the ranks' logs stay for the user to
    read."""
    created = [path for path in (parent, *parent.parents) if not path.exists()] if parent else []
    try:
        if parent:
            parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".proof-", dir=parent))
    except OSError as error:
        raise output_error(error, parent or Path(tempfile.gettempdir())) from None
    try:
        yield folder
    except RankError:
        for file in folder.glob("*.p*"):
            file.unlink()
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(created)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
