"""`meshwright prove`: runs a few steps of a job under its plan and on one process, and compares everything."""

import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
import torch.distributed as dist

from meshwright.cluster.cores import usable_cores
from meshwright.cluster.detect import detect, detect_cpu
from meshwright.errors import InputError, RankError
from meshwright.job import Job
from meshwright.launch.local.launch import Ranks, launch
from meshwright.launch.world import World, is_launched
from meshwright.plan import Plan
from meshwright.proof.examine import examine
from meshwright.proof.examine_rounded import examine_rounded, explained
from meshwright.proof.fault import Fault
from meshwright.proof.proof import Proof
from meshwright.proof.question import DTYPES, Question
from meshwright.proof.record import question_file as carry
from meshwright.proof.record.rank import QUESTION
from meshwright.proof.record.record import record
from meshwright.proof.shrink import shrink
from meshwright.train.check import check

EXACT = "fp64"  # in which the cause is looked for
_FEWEST_CPU_RANKS = 8  # processes of a few small steps share cores well enough


@dataclass(frozen=True)
class Machine:
    """So many ranks, on devices of that kind."""

    device: str
    ranks: int


def prove(
    job: Job,
    plan: Plan,
    *,
    ranks: int | None = None,
    steps: int = 3,
    dtype: str = "fp64",
    dropout: bool = False,
    device: str | None = None,
    plant: Fault | None = None,
) -> Proof:
    """Whether a job trains under a plan as on one device. `ranks`: at most so many; `device`: cpu or cuda."""
    machine = find_machine(plan, ranks, device)
    smaller, shrunk = shrink(with_precision(plan, dtype), machine.ranks)
    cluster = detect() if machine.device == "cuda" else detect_cpu()
    check(job, smaller, cluster.with_devices(machine.ranks))
    question = Question(job, smaller, steps, dtype, dropout, plant)
    with work_folder(Path(job.output)) as folder:
        return replace(prove_on(question, machine.device, folder), shrunk=shrunk)


def with_precision(plan: Plan, dtype: str) -> Plan:
    """What `auto` will be is of no concern, unless the comparison shall be in it."""
    if plan.numerics.precision != "auto":
        return plan
    if dtype == "plan":
        raise InputError("plan.numerics.precision is auto, which a run chooses: name it, to compare in the plan's own")
    return plan.model_copy(update={"numerics": plan.numerics.model_copy(update={"precision": "fp32"})})


def find_machine(plan: Plan, ranks: int | None, device: str | None) -> Machine:
    """GPUs where there are at least two, or one for a plan of one rank: ranks on the CPU prove more than none."""
    if ranks is not None and ranks < 1:
        raise InputError(f"--ranks {ranks}: take at least one")
    gpus = torch.cuda.device_count()
    kind = device or ("cuda" if gpus >= min(2, plan.world_size) else "cpu")
    if kind == "cuda":
        if not gpus:
            raise InputError("this machine has no GPU: compare on the CPU")
        return Machine(kind, min(gpus, ranks or gpus))
    return Machine(kind, ranks or max(_FEWEST_CPU_RANKS, usable_cores()))


def prove_on(question: Question, device: str, folder: Path) -> Proof:
    """Starts ranks for a question that fits on this machine."""
    check_question(question)
    carry.check_guarded()
    if is_launched():
        raise InputError("prove starts ranks of its own: call it without torchrun, mpirun or srun")
    proof = _run(question, device, folder)
    if question.rounds and not proof.equal:
        proof = explained(proof, _run(replace(question, dtype=EXACT), device, folder))
    return proof


def _run(question: Question, device: str, folder: Path) -> Proof:
    carry.write(question, folder / QUESTION)
    count = question.plan.processes
    threads = question.plan.compute.threads or max(1, usable_cores() // question.plan.world_size)
    launch(
        "meshwright.proof.record.rank",
        [str(folder.resolve()), device],
        Ranks(count, device, threads, restarts=0),
        folder / "logs",
    )
    return _examined(question, folder, torch.device(device))


def _examined(question: Question, folder: Path, device: torch.device) -> Proof:
    return (examine_rounded if question.rounds else examine)(question, folder, device)


def prove_in(question: Question, world: World, folder: Path) -> Proof | None:
    """In ranks that are there already, all of which call it with a folder that they share: the proof on the first."""
    check_question(question)
    if question.plan.gradients.servers:
        raise InputError("prove starts parameter servers itself: call it without torchrun, mpirun or srun")
    record(question, world, folder)
    proof = _examined(question, folder, world.device) if world.rank == 0 else None
    if question.rounds and _said(proof is not None and not proof.equal, world):
        exact = prove_in(replace(question, dtype=EXACT), world, folder)
        return explained(proof, exact) if proof and exact else None
    return proof


def _said(word: bool, world: World) -> bool:
    """The first rank's word, on every rank."""
    told = [word]
    if world.size > 1:
        dist.broadcast_object_list(told, src=0)
    return told[0]


def check_question(question: Question) -> None:
    if question.steps < 1:
        raise InputError(f"{question.steps} steps prove nothing: take at least one")
    gradients = question.plan.gradients
    if gradients.updates != "synchronous":
        raise InputError(
            f"gradients.updates is {gradients.updates}: workers then train on weights of different ages, which no"
            " single device does; prove takes synchronous ones"
        )
    if question.dtype not in DTYPES:
        raise InputError(f"cannot compare in {question.dtype}: choose {' or '.join(DTYPES)}")


@contextmanager
def work_folder(beside: Path | None) -> Iterator[Path]:
    """A folder for what ranks record, several times the model's size: where checkpoints go, not in /tmp. It is kept
    when a rank has failed, whose log the user is told to read."""
    absent = [path for path in (beside, *beside.parents) if not path.exists()] if beside else []
    try:
        if beside:
            beside.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(prefix=".proof-", dir=beside))
    except OSError as error:
        raise InputError(f"output: cannot write in '{beside}': {error.strerror}") from None
    try:
        yield folder
    except RankError:
        for file in folder.glob("*.p*"):
            file.unlink()
        raise
    except BaseException:
        shutil.rmtree(folder, ignore_errors=True)
        _remove_empty(absent)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def _remove_empty(folders: list[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:
            return
