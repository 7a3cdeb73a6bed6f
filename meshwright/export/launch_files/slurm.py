"""The sbatch script of a job: Slurm starts the ranks, each of them `meshwright train`."""

import shlex
from pathlib import Path

from meshwright.export.launch_files.request import TOKEN_ASSIGNMENT, LaunchFile, LaunchRequest, python_module

_REQUEUE_S = 15  # what is left of the job's time when the ranks have saved, to queue it again
_LONGEST_SIGNAL_S = 65_535  # of Slurm's option --signal

# Slurm sends USR1 to this script before the time limit, and TERM when the job is cancelled. The ranks get TERM from
# Slurm in the second case, and when the job is preempted, of which this script is not told. A signal interrupts `wait`,
# but not the ranks that it waits for. The exit code of the ranks is in a file, because bash 5.2 forgets that of a
# process which ends just when a signal interrupts `wait`.
_BODY = """\
stop=
exit_code=$(mktemp) || exit 1
trap 'rm -f -- "$exit_code"' EXIT
trap 'stop=requeue; scancel --signal=TERM "$SLURM_JOB_ID"' USR1
trap 'stop=${stop:-end}' TERM

while :; do
    {
        trap : USR1 TERM
        srun --kill-on-bad-exit=1 --cpus-per-task="$cores" "${train[@]}"
        echo "$?" >"$exit_code"
    } &
    while kill -0 "$!" 2>/dev/null; do wait "$!"; done
    code=$(cat -- "$exit_code")
    # Exit code 2 is wrong input, which would be wrong again.
    if [ -n "$stop" ] || [ "$code" -eq 0 ] || [ "$code" -eq 2 ] || [ "$restarts" -eq 0 ]; then break; fi
    restarts=$((restarts - 1))
    echo "the ranks ended with exit code $code: they start again from the last checkpoint" >&2
done

# Exit code 0 means that the newest run is finished, or that its ranks have saved and stopped.
is_finished() {
    local run number newest=-1 newest_run=
    for run in "$runs"-*; do
        number=${run#"$runs"-}
        if [[ $number =~ ^[0-9]{1,9}$ ]] && ((10#$number > newest)); then
            newest=$((10#$number)) newest_run=$run
        fi
    done
    [ -e "$newest_run/result.json" ]
}
# A job that is being preempted is still running, and Slurm takes it for finished if this script just ends. One that was
# cancelled, or queued again by somebody, is not running any more.
is_running() { [ "$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%T)" = RUNNING ]; }
if { [ -n "$stop" ] || [ "$code" -eq 0 ]; } && ! is_finished && is_running; then
    scontrol requeue "$SLURM_JOB_ID"
fi
exit "$code"
"""


def slurm_script(request: LaunchRequest) -> LaunchFile:
    layout = request.layout
    options = {
        "job-name": request.job.name,
        "nodes": layout.nodes,
        "ntasks-per-node": layout.ranks_per_node,
        "gpus-per-node": layout.gpus_per_node or None,
        "cpus-per-task": layout.cores_per_rank,
        "time": _time(request.options.time_s) if request.options.time_s is not None else None,
        "partition": request.options.partition,
        # To the script alone (B:), which stops the ranks and then queues the job again.
        "signal": f"B:USR1@{min(request.grace_s + _REQUEUE_S, _LONGEST_SIGNAL_S)}",
        "open-mode": "append",
    }
    lines = [
        "#!/bin/bash",
        f"# {request.plan}: {layout.describe()}",
        *(f"#SBATCH --{name}={value}" for name, value in options.items() if value is not None),
        "#SBATCH --requeue",
        "",
        f"cd -- {shlex.quote(request.folder)} || exit 1",
        # Each start has a secret of its own, by which its ranks tell each other from strangers. srun passes it on.
        f"export {TOKEN_ASSIGNMENT}",
        *(f"export {name}={shlex.quote(value)}" for name, value in request.variables.items()),
        f"train=({shlex.join([*python_module('meshwright'), *request.arguments])})",
        f"runs={shlex.quote(str(Path(request.job.output, request.job.name)))}",
        f"cores={layout.cores_per_rank}",
        f"restarts={request.job.train.restarts}",
    ]
    return LaunchFile("\n".join([*lines, _BODY]), "sbatch FILE")


def _time(seconds: int) -> str:
    """Returns the time as DAYS-HOURS:MINUTES:SECONDS."""
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    return f"{days}-{hours:02}:{minutes:02}:{seconds:02}"
