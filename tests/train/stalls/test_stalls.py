"""Planted hangs and mismatches: the error, which is the first line of a report with the stacks of all ranks, names the
rank that is stuck and its place, under our launcher and in a user's own loop under torchrun."""

import os
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright.errors import CollectiveError
from tests import ranks as ranks_file
from tests.forking.environment import REPOSITORY
from tests.forking.forked import start as start_process
from tests.train.commands import start, write_job
from tests.train.stalls import loop

TIMEOUT_S = 6.0  # joining may take as long where cores are busy
BUCKET = r"gradient exchange of blocks\.0\.linear to head \(bucket 0\)"
IN_BLOCK = r"do_fault \(planted\.py, line \d+\), in the forward pass of blocks\.1"
# Rank 0 comes to the gradients only if rank 1 has taken part in the sum of counts before.
SUM = "sum of losses or counts over the ranks"
NO_ANSWER = r" \(no answer within 6 s\)"

# By fault, the line that users see.
LINES = {
    "hang": rf"rank 1 has not entered the ({BUCKET}|{SUM}) at step 2; rank 0 waits there; rank 1 is in"
    rf" {IN_BLOCK}{NO_ANSWER}",
    "data": rf"rank 1 has not entered the {SUM} at step \d+; rank 0 waits there; rank 1 is in"
    rf" Points\.read_slowly \(planted\.py, line \d+\), called by DataLoader\.__next__( at step \d+)?{NO_ANSWER}",
    "skip": rf"rank 1 has not entered the all-reduce of 3 float32 values called in {IN_BLOCK} at step 2; rank 0 waits"
    rf" there; rank 1 waits in the ({BUCKET}|{SUM}){NO_ANSWER}",
    "order": rf"rank 1 calls all-reduce of 5 float32 values in {IN_BLOCK}, where rank 0 calls all-reduce of 2 int64"
    rf" values in {IN_BLOCK}, at step 2: the dtype and shape of collective \d+ of this group must be the same .*",
    "operation": rf"rank 1 calls broadcast of 4 float32 values in {IN_BLOCK}, where rank 0 calls all-reduce of 4"
    rf" float32 values in {IN_BLOCK}, at step 2: the operation of collective \d+ of this group must be the same .*",
    "shape": rf"rank 1 calls all-reduce of 700 float32 values in {IN_BLOCK}, where rank 0 calls all-reduce of 500"
    rf" float32 values in {IN_BLOCK}, at step 2: the shape of collective \d+ of this group must be the same .*",
    "dtype": rf"rank 1 calls all-reduce of 500 float64 values in {IN_BLOCK}, where rank 0 calls all-reduce of 500"
    rf" float32 values in {IN_BLOCK}, at step 2: the dtype of collective \d+ of this group must be the same .*",
    "left out": rf"rank 1 has not entered the {SUM} at step 3; rank 0 waits there; rank 1 waits in the broadcast of 1"
    rf" int64 value called in DataLoader\.__next__ at step 2{NO_ANSWER}",
}


def job(fault: str, **plan: Any) -> dict[str, Any]:
    data = {"call": "tests.train.stalls.planted:Points"}
    model = {"call": "tests.train.stalls.planted:Net"}
    return {
        "name": "toy",
        "model": model if fault == "data" else {**model, "fault": fault},
        "data": {"train": {**data, "sample": 300} if fault == "data" else data, "workers": 0},
        "loss": {"call": "torch.nn.functional:cross_entropy"},
        "optimizer": {"call": "torch.optim:SGD", "lr": 0.1},
        "train": {"epochs": 1, "global_batch": 16, "timeout_s": TIMEOUT_S, "restarts": 0},
        "checkpoint": {"every_steps": None},
        "plan": plan or {"axes": {"replicate": 2}},
    }


def check(line: str, pattern: str, report: Path) -> None:
    assert re.fullmatch(pattern, line), line
    first, *rest = report.read_text().splitlines()
    assert first == line
    for rank in (0, 1):
        stack = "\n".join(rest).partition(f"--- rank {rank}\n")[2].partition("--- rank")[0]
        assert re.search(r'(planted|loop|session|forward_backward)\.py", line', stack)


def train(folder: Path, fault: str, **plan: Any) -> tuple[str, Path]:
    """Trains the job with this fault. Returns the line that it fails with, and the report."""
    process, _ = start(folder, job(fault, **plan), 2)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1, err
    line = next(line for line in err.splitlines() if line.startswith("meshwright: "))
    report = next(line for line in err.splitlines() if line.startswith("the report of all ranks: "))
    return line.removeprefix("meshwright: "), Path(report.partition(": ")[2])


@pytest.mark.parametrize(
    "fault",
    ["hang", *(pytest.param(fault, marks=pytest.mark.soak) for fault in LINES if fault not in ("hang", "left out"))],
)
def test_a_job_names_the_rank_and_its_place(tmp_path: Path, fault: str) -> None:
    line, report = train(tmp_path, fault)
    assert report.parent == tmp_path / "runs" / "toy-0001" / "logs"
    check(line, LINES[fault], report)


def write_error_of_loop(rank: int, size: int, fault: str, folder: Path) -> None:
    """Writes the line and the report of the error that a user's own loop raises. Gloo may end the process before."""
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(size)})  # as torchrun sets them
    with pytest.raises(CollectiveError) as error:
        loop.main(fault, str(TIMEOUT_S))
    (folder / str(rank)).write_text(f"{error.value}\n{error.value.report}")


def test_a_loop_names_the_rank_and_its_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ranks_file, "_SETTLE_S", 60.0)
    pool = ranks_file.RankPool(2)  # whose ranks are of no use afterwards
    try:
        with suppress(ranks_file.RankFailure):
            pool.run(write_error_of_loop, "order", tmp_path)
    finally:
        pool.close()
    line, report = (tmp_path / "0").read_text().splitlines()
    check(line, LINES["order"], Path(report))


@pytest.mark.soak
@pytest.mark.parametrize("fault", LINES)
def test_a_loop_under_torchrun_names_the_rank_and_its_place(
    tmp_path: Path, fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.chdir(REPOSITORY)
    words = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "elastic")]
    script = ["-m", "tests.train.stalls.loop"]
    process = start_process("tests.forking.forked:torchrun", *words, *script, fault, str(TIMEOUT_S))
    _, err = process.communicate(timeout=240)  # torchrun starts new Python processes
    assert process.returncode != 0
    lines = [re.sub(r"^(\[rank\d\]: )?(meshwright\.errors\.CollectiveError: )?", "", line) for line in err.splitlines()]
    line = next((line for line in lines if re.fullmatch(LINES[fault], line)), err)
    report = next(line for line in lines if line.startswith("the report of all ranks: "))
    check(line, LINES[fault], Path(report.partition(": ")[2]))


@pytest.mark.soak
@pytest.mark.parametrize(
    ("plan", "exchange"),
    [
        ({"axes": {"replicate": 2}, "gradients": {"algorithm": "native"}}, BUCKET),
        ({"axes": {"replicate": 2}, "gradients": {"algorithm": "ring"}}, BUCKET),
        ({"axes": {"shard": 2}}, r"all-gather of the weights of \S+|reduce-scatter of the gradients of .+"),
        ({"axes": {"tensor": 2}}, r"exchange of a split layer of blocks\.1\S*"),
        (
            {"axes": {"pipeline": 2}, "pipeline": {"cuts": ["blocks.0"], "microbatches": 2}},
            "send or receive of the pipeline",
        ),
    ],
)
def test_every_kind_of_plan_names_what_is_waited_for(tmp_path: Path, plan: dict[str, Any], exchange: str) -> None:
    line, report = train(tmp_path, "hang", **plan)
    step = 1 if "pipeline" in plan else 2  # of the third forward pass: a step of the pipeline has two
    waits = (
        rf"rank 1 has not entered the ({exchange}|{SUM}) at step {step}; rank 0 waits there; rank 1 is in {IN_BLOCK}"
    )
    check(line, waits + NO_ANSWER, report)


@pytest.mark.parametrize("fault", ["memory", pytest.param("python memory", marks=pytest.mark.soak)])
def test_out_of_memory_says_where_and_what_was_in_use(tmp_path: Path, fault: str) -> None:
    process, _ = start(tmp_path, job(fault), 2)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 1
    lines = err[err.index("meshwright: ") :].splitlines()
    assert len(lines) >= 4, err
    line, _, predicted, smaller = lines[:4]
    wanted = r": it wanted 1 EiB more" if fault == "memory" else ""
    assert re.fullmatch(
        rf"meshwright: rank 1 failed at step 2 \(forward\): out of memory in {IN_BLOCK}{wanted}; in use were .*:"
        r" weights .*, gradients .*, optimizer state .*, activations and others .*",
        line,
    ), line
    assert predicted.startswith("predicted were "), err
    assert smaller.startswith(("the fastest plan that needs at least a tenth less is ", "no plan is predicted to need"))


@pytest.mark.soak
def test_out_of_memory_under_torchrun_names_a_plan_that_needs_less(tmp_path: Path) -> None:
    words, _ = write_job(tmp_path, {**job("memory"), "train": {"epochs": 1, "global_batch": 16}}, 2)
    ranks = ["--standalone", "--nproc-per-node", "2", "--log-dir", str(tmp_path / "elastic")]
    process = start_process("tests.forking.forked:torchrun", *ranks, "-m", "meshwright", *words)
    _, err = process.communicate(timeout=240)
    line = next(line for line in err.splitlines() if line.startswith("rank 1 failed at step 2 (forward): "))
    used = rf"out of memory in {IN_BLOCK}: it wanted 1 EiB more; in use were .*: weights .*; predicted were .*: "
    assert re.search(rf"{used}.*; (the fastest plan that needs at least a tenth less is |no plan is predicted)", line)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_out_of_memory_on_a_gpu_says_what_was_in_use(tmp_path: Path) -> None:
    on_one_gpu = {**job("memory", axes={}), "cluster": "local", "allow": "same"}
    on_one_gpu["model"] = {"call": "tests.train.stalls.planted:Net", "fault": "gpu memory", "rank": 0}
    process, _ = start(tmp_path, on_one_gpu, 1)
    _, err = process.communicate(timeout=300)
    line = err[err.index("meshwright: ") :].splitlines()[0]
    assert re.search(
        r"rank 0 failed at step 2 \(forward\): out of memory in .*: it wanted .* more; in use were ", line
    ), err
    assert ", optimizer state " in line
