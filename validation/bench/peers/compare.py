"""`validation.bench peers`: how fast other libraries train a job, compared with plain DDP and with us. The contestants
take turns, one run each per round."""

import json
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

from meshwright.auto.decide import plan_of_job
from meshwright.calibrate.probe import measure_machine
from meshwright.cluster.cluster import Cluster
from meshwright.cluster.detect import check_is_local, find_cluster
from meshwright.data.loading import is_stream
from meshwright.errors import InputError, MeshwrightError, Stopped
from meshwright.files.storage import write_atomically
from meshwright.job import Job
from meshwright.plan import Plan
from meshwright.train.check import check_job
from meshwright.train.job_parts import JobParts
from meshwright.train.run import train
from validation.bench.peers.catalog import REFERENCE, SETTINGS, Interpreter, Peer
from validation.bench.peers.ranks import RankCommand, run_ranks
from validation.bench.peers.rows import TOLERANCES, Contestant, Measurement, PeerReport, make_rows
from validation.bench.peers.task import WARM_UP_STEPS

OURS = "meshwright"
Run = Callable[[], Measurement]


def cluster_of_ranks(ranks: int | None) -> Cluster:
    """Returns this machine with one device for each of `ranks`; with all its devices if `ranks` is None."""
    cluster = find_cluster("local", measure_machine)
    if ranks is None:
        return cluster
    if cluster.kind == "cpu":
        return find_cluster(f"{ranks}xcpu", measure_machine)
    if ranks > cluster.device_count:
        raise InputError(f"--ranks {ranks}: this machine has {cluster.device_count} GPUs")
    return cluster.with_device_count(ranks)


def compare(
    job: Job,
    cluster: Cluster,
    peers: Sequence[Peer],
    interpreter: Interpreter,
    *,
    precision: str,
    steps: int,
    rounds: int,
) -> PeerReport:
    """Measures the peers and our plan. A peer that is not installed, or that fails, is left out with the reason, and
    the others continue. Raises an error if our own run or plain DDP at its defaults fails, because all others are
    compared with these two."""
    check_is_local(cluster)
    with tempfile.TemporaryDirectory(prefix="meshwright-bench-") as folder:
        short_job = job_of_steps(job, steps + WARM_UP_STEPS, Path(folder))
        job_file = Path(folder) / "job.yaml"
        write_atomically(job_file, short_job.to_yaml())
        own_runs = _own_runs(short_job, cluster, precision)
        ours = next(iter(own_runs))
        peer_runs, left_out = _peer_runs(short_job, job_file, cluster, peers, interpreter, precision, steps)
        reference = next(contestant for contestant in peer_runs if contestant.name == REFERENCE.title)
        measured = measure_rounds({**own_runs, **peer_runs}, rounds, (ours, reference), left_out)
    rows = make_rows(measured, ours, reference, TOLERANCES[precision])
    return PeerReport(
        rows=rows,
        left_out=left_out,
        ours=ours,
        tolerance=TOLERANCES[precision],
        first_loss=measured[reference][-1].first_loss or 0.0,
        final_loss=measured[ours][-1].final_loss,
        ranks=cluster.device_count,
        steps=steps,
        precision=precision,
        versions=dict(interpreter.versions),
    )


def measure_rounds(
    runs: Mapping[Contestant, Run], rounds: int, needed: Sequence[Contestant], left_out: dict[str, str]
) -> dict[Contestant, list[Measurement]]:
    """Returns the measurements of every round. One round runs each contestant once; every second round goes through
    them in the opposite order. One that fails is added to `left_out`, unless it is `needed`: then its error is
    raised."""
    measured: dict[Contestant, list[Measurement]] = {contestant: [] for contestant in runs}
    for number in range(rounds):
        contestants = list(measured)
        for contestant in contestants if number % 2 == 0 else contestants[::-1]:
            name = f"{contestant.name}, {contestant.settings}"
            print(f"round {number + 1} of {rounds}: {name}", file=sys.stderr, flush=True)
            try:
                measured[contestant].append(runs[contestant]())
            except Stopped:
                raise
            except MeshwrightError as error:
                if contestant in needed:
                    raise type(error)(f"{name}: {error}") from None
                left_out[name] = f"failed: {error}"
                del measured[contestant]
    return measured


def job_of_steps(job: Job, steps: int, folder: Path) -> Job:
    """Returns the job with this number of steps, and without what peers do not have or what is not training: the
    schedule of the learning rate, evaluations, callbacks, TensorBoard and checkpoints before the end. The steps
    that are not timed are logged by themselves. Raises an `InputError` if the job's samples come in an order that peers
    cannot follow."""
    for field, value in (("data.weights", job.data.weights), ("data.sampler", job.data.sampler)):
        if value is not None:
            raise InputError(f"bench peers cannot draw samples by weight as {field} says: leave it out")
    if job.data.partition != "batch":
        raise InputError(f"data.partition is {job.data.partition}: bench peers needs data.partition: batch")
    return job.model_copy(
        update={
            "train": job.train.model_copy(update={"steps": steps, "epochs": None}),
            "data": job.data.model_copy(update={"eval": None, "drop_last": True}),
            "checkpoint": job.checkpoint.model_copy(update={"every_steps": None, "best": None}),
            "log": job.log.model_copy(update={"tensorboard": False, "every_steps": WARM_UP_STEPS}),
            "schedule": None,
            "callbacks": [],
            "metrics": {},
            "output": str(folder / "runs"),
        }
    )


def _check_batch(parts: JobParts, ranks: int) -> None:
    """Raises an `InputError` if peers cannot divide the job's samples among ranks."""
    data, batch = parts.data[0], parts.job.train.global_batch
    if is_stream(data):
        raise InputError("data.train is a stream, but the peers' samplers need data with __getitem__ and __len__")
    if batch % ranks:
        raise InputError(f"train.global_batch is {batch}, which {ranks} ranks cannot divide evenly: change one of them")
    if len(data) < batch:
        raise InputError(f"train.global_batch is {batch}, but data.train has {len(data)} samples: lower it")


def _own_runs(job: Job, cluster: Cluster, precision: str) -> dict[Contestant, Run]:
    """Returns our own contestants: the job's plan, and a second one if the job allows its plan to change the
    numerics."""
    runs: dict[Contestant, Run] = {}
    for settings, own_job in _own_jobs(job).items():
        parts = JobParts(own_job)
        _check_batch(parts, cluster.device_count)
        plan = plan_of_job(parts, cluster, own_job.plan).plan
        if settings != "allow: changes":
            numerics = plan.numerics.model_copy(update={"precision": precision})
            plan = plan.model_copy(update={"numerics": numerics})
        check_job(own_job, plan, cluster, parts)
        parts.release()
        runs[Contestant(OURS, settings, plan.summary())] = partial(_train, own_job, plan, cluster)
    return runs


def _own_jobs(job: Job) -> dict[str, Job]:
    if job.plan != "auto":
        return {"plan of the job": job}
    if job.allow != "changes":
        return {"plan: auto": job}
    return {"plan: auto": job.model_copy(update={"allow": "rounding"}), "allow: changes": job}


def _train(job: Job, plan: Plan, cluster: Cluster) -> Measurement:
    result: dict[str, Any] = train(job, plan, cluster, resume="never")
    loss = result["loss"]
    lines = (Path(result["run"]) / "metrics.jsonl").read_text().splitlines()
    rate = rate_after_warm_up([json.loads(line) for line in lines])
    return Measurement(rate, float("nan") if loss is None else float(loss))


def rate_after_warm_up(entries: Sequence[Mapping[str, Any]]) -> float:
    """Returns the samples per second of the steps of our run after the first `WARM_UP_STEPS`, which are not timed with
    peers either. `entries` are the lines of the run's metrics log."""
    logged = {entry["step"]: entry["samples_per_s"] for entry in entries if entry["kind"] == "train"}
    timed_steps = [(end - begin, logged[end]) for begin, end in pairwise(sorted(logged)) if begin >= WARM_UP_STEPS]
    return sum(steps for steps, _ in timed_steps) / sum(steps / rate for steps, rate in timed_steps)


def _peer_runs(
    job: Job,
    job_file: Path,
    cluster: Cluster,
    peers: Sequence[Peer],
    interpreter: Interpreter,
    precision: str,
    steps: int,
) -> tuple[dict[Contestant, Run], dict[str, str]]:
    """Returns the installed peers, each with both settings, and the reasons why the others are left out, by title."""
    runs: dict[Contestant, Run] = {}
    left_out: dict[str, str] = {}
    ranks = cluster.device_count
    for peer in peers:
        reason = interpreter.missing(peer)
        if reason is not None:
            left_out[peer.title] = reason
            continue
        for settings in SETTINGS:
            threads = peer_threads(settings, ranks, cluster.cores)
            arguments = [str(job_file), str(steps), settings, precision, cluster.kind]
            module = f"validation.bench.peers.{peer.module}"
            command = RankCommand(interpreter.python, module, arguments, ranks, threads, job.train.timeout_s)
            of_rank = "1 thread" if threads == 1 else f"{threads} threads"
            how = f"{peer.package} {interpreter.versions[peer.package]}, {of_rank} per rank"
            runs[Contestant(peer.title, settings, how)] = partial(_run_peer, command)
    return runs, left_out


def peer_threads(settings: str, ranks: int, cores: int) -> int:
    """Returns the number of threads of a peer's rank. At their defaults it is 1, which torchrun sets for several ranks;
    at their best, the ranks share all cores, as torchrun's message advises."""
    return 1 if settings == "defaults" and ranks > 1 else max(1, cores // ranks)


def _run_peer(command: RankCommand) -> Measurement:
    result = run_ranks(command)
    return Measurement(result["samples_per_s"], result["final_loss"], result["first_loss"])
