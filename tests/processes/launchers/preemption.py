"""Submits a script to Slurm, and disturbs its job: `python -m tests.processes.launchers.preemption HOW SCRIPT OUTPUT
RUN STEP`. When rank 1 of the run is at the step, the job is preempted by an urgent one (`preempt`) or queued again
(`requeue`), or cancelled (`cancel`). Ends when no job is left."""

import subprocess
import sys
import time
from pathlib import Path

from meshwright.train.output.folder import RunFolder
from validation.bench.faults.moments import wait_for

_POLL_S, _END_S = 0.5, 300.0


def main() -> None:
    how, script, output, run, step = sys.argv[1:]
    job = _call("sbatch", "--parsable", f"--output={output}", script)
    wait_for(RunFolder(Path(run)), rank=1, step=int(step))
    if how == "preempt":
        _call("sbatch", "--partition=urgent", "--ntasks=2", "--output=/dev/null", "--wrap=true")
    elif how == "requeue":
        _call("scontrol", "requeue", job)
    else:
        _call("scancel", job)
    deadline = time.monotonic() + _END_S
    while queue := _call("squeue", "--noheader", "--format=%i %P %T %r"):
        if time.monotonic() > deadline:
            sys.exit(f"jobs are left in the queue after {_END_S:g} s: {queue}")
        # A job that is queued again waits for two minutes, unless it is told to begin now.
        if f"{job} all PENDING" in queue:
            subprocess.run(["scontrol", "update", f"JobId={job}", "StartTime=now"], capture_output=True)
        time.sleep(_POLL_S)


def _call(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
